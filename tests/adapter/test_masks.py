"""Tests masks that a pipeline passes to attention: by keys they are split, others are right on one rank and refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
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


def masked(rank: int, world: int, device: torch.device, names: Sequence[str], strategy: str) -> list[Outputs | str]:
    """Return what a split FLUX returns with each of some masks, or its message."""
    body, answers = body_of(MODELS["flux"].build().to(device), world, device, strategy), list[Outputs | str]()
    for name in names:
        try:
            answers.append(called(body, with_mask(name, device)))
        except ValueError as refused:
            answers.append(str(refused))
    return answers


def with_mask(name: str, device: torch.device | str) -> dict[str, Any]:
    """Return a call's arguments with a mask."""
    mask = MASKS[name][0]().to(device)
    if name == "expanded":  # a copy to another device is whole
        mask = mask[:, :1, :1].expand(MASKS[name][0]().shape)
    return {**MODELS["flux"].arguments(device), "joint_attention_kwargs": {"attention_mask": mask}}


@cache
def truth(name: str, device: str) -> Outputs:
    """Return what the whole transformer returns with a mask, in host memory; it matters."""
    whole = MODELS["flux"].whole(arguments=with_mask(name, device), device=device)
    assert error(whole, MODELS["flux"].whole(device=device)) > VISIBLE
    return tuple(x.cpu() for x in whole)


WAYS = [
    (1, "ulysses", ("queries", "queries without a batch", "infinite")),
    *((world, strategy, tuple(MASKS)) for world, strategy in ((2, "ring"), (3, "ulysses"))),
]


@pytest.mark.parametrize(("world", "strategy", "names"), WAYS, ids=str)
def test_masks_are_right_or_refused_on_every_rank(
    ranks: Pool, world: int, strategy: str, names: tuple[str, ...]
) -> None:
    for answers in ranks.run(world, masked, names, strategy):
        for name, got in zip(names, answers, strict=True):
            if isinstance(got, str):
                assert (world > 1, MASKS[name][1]) == (True, False), got
                assert "a mask that differs between queries or heads cannot be split" in got
            else:
                assert error(got, truth(name, ranks.device)) < TOLERANCE, name


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
@pytest.mark.parametrize(("world", "name"), [(1, "mochi"), (2, "qwen_masked"), (2, "mochi")])
def test_padding_that_is_flagged_by_numbers_is_left_out(ranks: Pool, name: str, world: int) -> None:
    assert max(ranks.run(world, flagged, name)) < TOLERANCE


def test_the_reference_adds_a_bias_as_kernels_do() -> None:
    q, k, v = (random((2, 5, 3, 4), seed) for seed in range(3))
    for bias in (random((2, 5), 4), key_bias(LEFT_OUT[:, :5], torch.float64)):
        got, wanted = (local.attend(q, k, v, bias) for local in (reference, sdpa))
        assert max((x - y).abs().max().item() for x, y in zip(got, wanted, strict=True)) < TOLERANCE
