"""Tests Chroma's mask of floating numbers, as its pipeline makes it: padding that attention weighs, without a mask."""

from __future__ import annotations

from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
import torch
from torch import Tensor

import seqpar
from seqpar.adapter.attention import UNLIKE
from seqpar.adapter.call import Call
from seqpar.adapter.table import cuts_of
from seqpar.attention._by_padding import ByPadding
from seqpar.fidelity.verify import VerificationError
from tests.adapter.test_body import TOLERANCE, VISIBLE, body_of, error
from tests.blocks.test_blocks import cast
from tests.support.calls import Captures
from tests.support.diffusers_tiny import MODELS, flat
from tests.support.foreign import InDouble
from tests.support.meshes import LAYOUTS, mesh_for, refused
from tests.support.pool import Pool

TEXT, IMAGE = 7, 15  # tokens of the tiny Chroma
# kind of mask -> tokens of padding that attention weighs; 0 where it gets masks
KINDS = {"alike": 3, "all": 7, "one": 1, "unlike": 0, "in the middle": 0, "in the image": 0, "bool": 0}


def mask_of(kind: str, batch: int) -> Tensor:
    """Return a mask (B, L) for the tokens of text and image."""
    mask = torch.ones(batch, TEXT + IMAGE).double()
    mask[:, TEXT - KINDS[kind] : TEXT] = 0
    if kind == "unlike":
        mask[0, 4:TEXT] = 0
    if kind in ("in the middle", "in the image"):
        mask[:, {"in the middle": 3, "in the image": -2}[kind]] = 0
    if kind == "bool":
        mask[:, 4:TEXT] = 0
    return mask.bool() if kind == "bool" else mask


def arguments(kind: str, device: torch.device | str, batch: int = 2) -> dict[str, Any]:
    tiny = replace(MODELS["chroma"], batch=batch)
    return {**tiny.arguments(device), "attention_mask": mask_of(kind, batch).to(device)}


def called(
    rank: int, world: int, device: torch.device, strategy: str, kinds: tuple[str, ...], fused: bool
) -> tuple[dict[str, tuple[float, int, bool]], str]:
    """Return, for each kind, the error of a second call, the padding that was weighed, and whether keys were masked.

    Besides return what this rank has printed.
    """
    module = MODELS["chroma"].build().to(device)
    body = body_of(module, world, device, strategy, fused=fused)
    within: Any = InDouble(body)
    call = Call(module, mesh_for(strategy, world, device), within, Captures(), cuts_of(module))
    results, printed = {}, StringIO()
    for batch, kind in enumerate(kinds, start=1):
        given = arguments(kind, device, 1 + batch % 3 if kind != "unlike" else 3)
        truth = MODELS["chroma"].whole(None, given, device)
        with redirect_stdout(printed):
            outputs = [flat(call(**given, return_dict=False)) for _ in range(2)][-1]
        last = body.ranks.last
        results[kind] = error(outputs, truth), last.padding, bool(last.masks)
    call.release()
    return results, printed.getvalue()


WAYS = [
    (world, strategy, world != 2 or strategy == "ulysses")
    for world, strategy in [(1, "kv_gather"), *((world, name) for world in (2, 3) for name in LAYOUTS)]
    if refused(strategy, world, 5, 5) is None
]


@pytest.mark.parametrize(("world", "strategy", "fused"), WAYS)
def test_padding_is_weighed_or_masked_as_torch_adds_a_mask(ranks: Pool, world: int, strategy: str, fused: bool) -> None:
    """Strategies that merge the results of ranks always get a mask. Rank 0 says so once."""
    merges = strategy in ("ring", "usp")
    answers = ranks.run(world, called, strategy, tuple(KINDS), fused)
    for results, _ in answers:
        for kind, (wrong, padding, masked) in results.items():
            assert wrong < TOLERANCE, kind
            assert padding == (0 if merges else KINDS[kind]), kind
            assert masked == (not padding), kind
    reason = f"{strategy} merges the results of ranks" if merges else UNLIKE
    assert [printed.count(f"a second attention in each block, because {reason}") for _, printed in answers] == [
        int(rank == 0) for rank in range(world)
    ]


def test_negative_controls_other_masks_give_other_results() -> None:
    device = torch.device("cpu")
    given = arguments("alike", device)
    truth = MODELS["chroma"].whole(None, given, device)
    for mask in (None, given["attention_mask"].bool(), mask_of("one", 2)):
        assert error(MODELS["chroma"].whole(None, {**given, "attention_mask": mask}, device), truth) > VISIBLE


def one_call(world: int, device: torch.device) -> tuple[Any, Any]:
    module = MODELS["chroma"].build().to(device)
    body = body_of(module, world, device, "kv_gather", fused=True)
    within: Any = InDouble(body)
    return Call(module, mesh_for("kv_gather", world, device), within, Captures(), cuts_of(module)), body


def test_a_mask_that_was_written_or_belongs_to_another_text_is_read_again() -> None:
    """Of what was read before, nothing counts: neither where the padding begins nor that it ends with the text."""
    device = torch.device("cpu")
    (call, body), given = one_call(1, device), arguments("alike", device)
    shorter = {name: given[name][:, :6] for name in ("encoder_hidden_states",)} | {"txt_ids": given["txt_ids"][:6]}
    longer = {"hidden_states": torch.cat([given["hidden_states"], given["hidden_states"][:, :1]], dim=1)}
    longer |= {"img_ids": torch.cat([given["img_ids"], given["img_ids"][:1]])}
    for padding, change in ((3, {}), (1, {}), (0, shorter | longer), (1, {})):
        given["attention_mask"].copy_(mask_of("one", 2)) if padding == 1 else None
        now = {**given, **change}
        outputs = flat(call(**now, return_dict=False))
        assert error(outputs, MODELS["chroma"].whole(None, now, device)) < TOLERANCE
        assert body.ranks.last.padding == padding
    call.release()


def verified(rank: int, world: int, device: torch.device, fault: bool) -> str:
    """Return what verifying a call in fp32 finds."""
    module = MODELS["chroma"].build().float().to(device)
    given = cast(arguments("alike", device), torch.float64, torch.float32)
    seqpar.parallelize(module, mesh_for("ulysses", world, device), strategy="ulysses")
    with pytest.MonkeyPatch.context() as patch:
        if fault:
            patch.setattr(ByPadding, "_added_to", lambda core, q: torch.zeros((), device=q.device))
        try:
            return str(seqpar.verify(module, **given).finding)
        except VerificationError as error:
            return str(error)
        finally:
            seqpar.release(module)


@pytest.mark.parametrize("fault", [False, True])
def test_verifying_compares_attention_that_weighs_padding(ranks: Pool, fault: bool) -> None:
    for finding in ranks.run(2, verified, fault):
        assert ("transformer_blocks.0, output" in finding) if fault else (finding == "None")
