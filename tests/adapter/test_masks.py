"""Tests masks that a pipeline passes to attention: by keys they are split, others are right on one rank and refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from seqpar.local import reference, sdpa
from seqpar.types.masks import key_bias
from tests.adapter.test_generic import TOLERANCE, VISIBLE, Outputs, body_of, called, error
from tests.support.diffusers_tiny import MODELS
from tests.support.meshes import random
from tests.support.pool import Pool

KEYS = 22  # the text and image tokens of the tiny FLUX, in a batch of two
LEFT_OUT = torch.arange(KEYS)[None] % torch.tensor([[5], [7]]) == 1


def left_out(number: float) -> Tensor:
    """Return a mask that adds a number to the scores of keys that are left out."""
    return torch.zeros(2, 1, 1, KEYS).double().masked_fill(LEFT_OUT[:, None, None], number)


def queries() -> Tensor:
    """Return a mask that lets each token read those before it, as regions of a prompt do in both directions."""
    return torch.ones(1, 1, KEYS, KEYS).tril().log().double()


# mask -> (its tensor, whether several ranks can split it)
MASKS: dict[str, tuple[Callable[[], Tensor], bool]] = {
    "bool": (lambda: ~LEFT_OUT[:, None, None], True),
    "expanded": (lambda: (~LEFT_OUT)[:, None, None].expand(2, 5, KEYS, KEYS), True),
    "numbers": (lambda: random((2, 1, 1, KEYS), 3) * 3, True),
    "one row": (lambda: random((1, KEYS), 3) * 3, True),
    "infinite": (lambda: left_out(-torch.inf), True),
    "lowest": (lambda: left_out(torch.finfo(torch.float64).min), True),
    "queries": (queries, False),
    "queries without a batch": (lambda: queries()[0, 0], False),
}


def masked(rank: int, world: int, device: torch.device, name: str, strategy: str) -> tuple[Outputs | None, str]:
    """Return what a split FLUX returns with a mask, or its message."""
    tiny = MODELS["flux"]
    arguments = with_mask(name, device)
    body = body_of(tiny.build().to(device), world, device, strategy)
    try:
        return called(body, arguments), ""
    except ValueError as refused:
        return None, str(refused)


def with_mask(name: str, device: torch.device | str) -> dict[str, Any]:
    """Return a call's arguments with a mask."""
    mask = MASKS[name][0]().to(device)
    if name == "expanded":  # a copy to another device is whole
        mask = mask[:, :1, :1].expand(MASKS[name][0]().shape)
    return {**MODELS["flux"].arguments(device), "joint_attention_kwargs": {"attention_mask": mask}}


WAYS = [(1, "ulysses", "queries"), (1, "ulysses", "queries without a batch"), (1, "ulysses", "infinite")]


@pytest.mark.parametrize(
    ("world", "strategy", "name"), [*WAYS, *((w, s, name) for w, s in ((2, "ring"), (3, "ulysses")) for name in MASKS)]
)
def test_a_mask_is_right_or_refused_on_every_rank(ranks: Pool, name: str, world: int, strategy: str) -> None:
    whole = MODELS["flux"].whole(arguments=with_mask(name, ranks.device), device=ranks.device)
    assert error(whole, MODELS["flux"].whole(device=ranks.device)) > VISIBLE
    for outputs, message in ranks.run(world, masked, name, strategy):
        if outputs is None:
            assert (world > 1, MASKS[name][1]) == (True, False), message
            assert "a mask that differs between queries or heads cannot be split" in message
        else:
            assert error(outputs, tuple(x.cpu() for x in whole)) < TOLERANCE


def flagged(rank: int, world: int, device: torch.device, name: str) -> float:
    """Return the error of a model whose padding is flagged by numbers in place of bool."""
    tiny = MODELS[name]
    arguments = tiny.arguments(device)
    key = next(key for key in arguments if key.endswith("mask"))
    arguments[key] = arguments[key].double()
    return error(
        called(body_of(tiny.build().to(device), world, device, "ulysses"), arguments), tiny.whole(device=device)
    )


@pytest.mark.filterwarnings("ignore:In CPU autocast")
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", ["qwen_masked", "mochi"])
def test_padding_that_is_flagged_by_numbers_is_left_out(ranks: Pool, name: str, world: int) -> None:
    assert max(ranks.run(world, flagged, name)) < TOLERANCE


def test_the_reference_adds_a_bias_as_kernels_do() -> None:
    q, k, v = (random((2, 5, 3, 4), seed) for seed in range(3))
    for bias in (random((2, 5), 4), key_bias(LEFT_OUT[:, :5], torch.float64)):
        got, wanted = (local.attend(q, k, v, bias) for local in (reference, sdpa))
        assert max((x - y).abs().max().item() for x, y in zip(got, wanted, strict=True)) < TOLERANCE
