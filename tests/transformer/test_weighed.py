"""Tests Chroma's mask of floating numbers, as its pipeline makes it: padding that attention weighs, without a mask."""

from __future__ import annotations

import math
from contextlib import redirect_stdout
from dataclasses import replace
from functools import cache
from io import StringIO
from typing import Any

import pytest
import torch
from torch import Tensor

import seqpar
from seqpar.attention._by_padding import ByPadding
from seqpar.graphs.graphs import Graphs
from seqpar.transformer.attention import UNLIKE
from seqpar.verifying.verify import VerificationError
from tests.families.test_blocks import cast
from tests.support.calls import Captures
from tests.support.diffusers_tiny import MODELS, flat
from tests.support.foreign import StayDouble, in_double
from tests.support.meshes import EXACT, LAYOUTS, mesh_for, random
from tests.support.meshes import mesh as make_mesh
from tests.support.meshes import refused as why_refused
from tests.support.pool import Pool
from tests.support.sharded import TOLERANCE, VISIBLE, Outputs, body_of, captured, error

TEXT, IMAGE = 7, 15  # tokens of the tiny Chroma
# kind of mask -> the tokens that are zeros in it, in all rows or in the first one
ZEROS: dict[str, tuple[int, ...]] = {
    "alike": (4, 5, 6),
    "all": tuple(range(TEXT)),
    "two": (5, 6),
    "one": (6,),  # not every kernel attends to one key
    "unlike": (5, 6),
    "in the middle": (3, 4),
    "in the image": (-2, -1),
    "in both": (5, 6, 7),
    "apart": (5, 10),
    "bool": (5, 6),
}
WEIGHED = {"alike": 3, "all": 7, "two": 2}  # how many tokens of padding attention weighs; others get masks


def mask_of(kind: str, batch: int) -> Tensor:
    mask = torch.ones(batch, TEXT + IMAGE).double()
    mask[: 1 if kind == "unlike" else batch, list(ZEROS[kind])] = 0
    return mask.bool() if kind == "bool" else mask


def arguments(kind: str, device: torch.device | str, batch: int = 2) -> dict[str, Any]:
    tiny = replace(MODELS["chroma"], batch=batch)
    return {**tiny.arguments(device), "attention_mask": mask_of(kind, batch).to(device)}


@cache
def truth(kind: str, batch: int, device: str) -> Outputs:
    return MODELS["chroma"].whole(None, arguments(kind, device, batch), device)


def called(
    rank: int, world: int, device: torch.device, strategy: str, kinds: tuple[str, ...], fused: bool
) -> tuple[dict[str, tuple[float, int, bool]], str]:
    """Return, for each kind, the error of a second call, the padding that was weighed, and whether keys were masked.

    Besides return what this rank has printed.
    """
    module = MODELS["chroma"].build().to(device)
    call, _ = captured(body_of(module, world, device, strategy, fused=fused))
    results, printed = {}, StringIO()
    for number, kind in enumerate(kinds):
        given = arguments(kind, device, 2 if kind == "unlike" else 1 + number // 3 % 3)
        with redirect_stdout(printed):
            outputs = [flat(call(**given, return_dict=False)) for _ in range(2)][-1]
        last = call.state
        results[kind] = (
            error(outputs, truth(kind, len(given["hidden_states"]), str(device))),
            last.padding,
            bool(last.masks),
        )
    call.release()
    return results, printed.getvalue()


WAYS = [
    (world, strategy, world != 2 or strategy == "ulysses")
    for world, strategy in [(1, "kv_gather"), *((world, name) for world in (2, 3) for name in LAYOUTS)]
    if why_refused(strategy, world, 5, 5) is None
]


@pytest.mark.parametrize(("world", "strategy", "fused"), WAYS)
def test_padding_is_weighed_or_masked_as_torch_adds_a_mask(ranks: Pool, world: int, strategy: str, fused: bool) -> None:
    """Strategies that merge the results of ranks always get a mask. Rank 0 says so once.

    Kinds follow each other whose tensors have the same shapes, so that a call is not taken for one of another kind.
    """
    merges = strategy not in EXACT
    answers = ranks.run(world, called, strategy, tuple(ZEROS), fused)
    for results, _ in answers:
        for kind, (wrong, padding, masked) in results.items():
            assert wrong < TOLERANCE, kind
            assert padding == (0 if merges else WEIGHED.get(kind, 0)), kind
            assert masked == (not padding), kind
    reason = f"{strategy} merges the results of ranks" if merges else UNLIKE
    assert [printed.count(f"a second attention in each block, because {reason}") for _, printed in answers] == [
        int(rank == 0) for rank in range(world)
    ]


def test_negative_controls_other_masks_give_other_results() -> None:
    device = torch.device("cpu")
    given = arguments("alike", device)
    wanted = MODELS["chroma"].whole(None, given, device)
    for mask in (None, given["attention_mask"].bool(), mask_of("two", 2)):
        assert error(MODELS["chroma"].whole(None, {**given, "attention_mask": mask}, device), wanted) > VISIBLE


def one_call(world: int, device: torch.device) -> Any:
    return captured(body_of(MODELS["chroma"].build().to(device), world, device, "kv_gather", fused=True))[0]


def test_what_was_read_of_a_mask_counts_until_it_is_written_and_for_texts_of_its_length() -> None:
    device = torch.device("cpu")
    call, given = one_call(1, device), arguments("alike", device)
    shorter = {"encoder_hidden_states": given["encoder_hidden_states"][:, :6], "txt_ids": given["txt_ids"][:6]}
    longer = {"hidden_states": torch.cat([given["hidden_states"], given["hidden_states"][:, :1]], dim=1)}
    longer |= {"img_ids": torch.cat([given["img_ids"], given["img_ids"][:1]])}
    for padding, change in ((3, {}), (2, {}), (0, shorter | longer), (2, {})):
        given["attention_mask"].copy_(mask_of("two", 2)) if padding == 2 else None
        now = {**given, **change}
        outputs = flat(call(**now, return_dict=False))
        assert error(outputs, MODELS["chroma"].whole(None, now, device)) < TOLERANCE
        assert call.state.padding == padding
    call.release()


def verified(rank: int, world: int, device: torch.device, fault: bool) -> str:
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


def refused(rank: int, world: int, device: torch.device) -> list[str]:
    """Return the messages for masks of other tokens or rows than the call has; each is refused in the first call."""
    call, messages, whole = one_call(world, device), [], mask_of("alike", 3).to(device)
    for mask in (whole[:2, :TEXT], torch.cat([whole, whole[:, -4:]], dim=1)[:2], whole, whole[0]):
        with pytest.raises(ValueError, match=r"got .*mask") as caught:
            call(**{**arguments("alike", device), "attention_mask": mask}, return_dict=False)
        messages.append(str(caught.value))
    call.release()
    return messages


def test_masks_of_other_tokens_or_rows_are_refused_on_all_ranks_alike(ranks: Pool) -> None:
    words = ("mask for 7 keys, expected 22", "mask for 26 keys, expected 22", "masks of 3 rows for 2", "of shape (22,)")
    first, second = ranks.run(2, refused)
    assert first == second
    assert all(word in message for word, message in zip(words, first, strict=True)), first


def guided(rank: int, world: int, device: torch.device, axes: dict[str, int]) -> tuple[list[Tensor], int]:
    module, strategy = MODELS["chroma"].build().to(device), "ulysses"
    seqpar.parallelize(module, make_mesh(device, **axes), strategy=strategy)
    in_double(module)
    call: Any = vars(module)["forward"]
    call.graphs = Graphs(call.mesh, Captures(), call.check_delivered)
    outs = [x.clone() for x in steps(module, device)]
    count = len(call.graphs)
    seqpar.release(module)
    return outs, count


def steps(module: Any, device: torch.device) -> list[Tensor]:
    results = []
    with torch.no_grad(), StayDouble():
        for step in range(4):
            latents = random((1, IMAGE, 8), 77 + step, device)
            both = [
                module(**{**arguments(kind, device, 1), "hidden_states": latents}, return_dict=False)[0]
                for kind in ("alike", "two")
            ]
            results += [one + 0 for one in both]
    return results


@pytest.mark.parametrize("axes", [{}, {"cfg": 2}, {"cfg": 2, "ulysses": 2}], ids=str)
def test_branches_whose_texts_have_other_padding_are_calls_of_other_kinds(ranks: Pool, axes: dict[str, int]) -> None:
    wanted = steps(MODELS["chroma"].build().to(ranks.device), torch.device(ranks.device))
    for outs, count in ranks.run(math.prod(axes.values()), guided, axes):
        assert error(tuple(x.cpu() for x in outs), tuple(x.cpu() for x in wanted)) < TOLERANCE
        assert count == (1 if "cfg" in axes else 2)
