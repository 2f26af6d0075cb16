# pyright cannot infer the types of diffusers' modules
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
"""Tests that no attention of a split transformer sees the tokens of one rank alone: it joins the ranks or is refused.

Users wrap, insert, remove and swap blocks, before and after `parallelize`. The truth is the changed transformer in one
process.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from typing import Any

import diffusers
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import seqpar
from seqpar.families._cuts import block_lists
from seqpar.families._find import cuts_of
from seqpar.transformer.attention import parts_of_users
from seqpar.transformer.foreign import look
from seqpar.transformer.parallelize import cfg_by_default
from tests.support.diffusers_tiny import MODELS, flat
from tests.support.foreign import StayDouble
from tests.support.meshes import mesh_for
from tests.support.pool import Pool
from tests.transformer.test_body import TOLERANCE, error

LISTS = {
    "flux": "transformer_blocks",
    "sd3_dual": "transformer_blocks",
    "wan": "blocks",
    "qwen": "transformer_blocks",
    "pixart": "transformer_blocks",
    "h3": "transformer_blocks",
}


class Held(nn.Module):
    """A user's wrapper that holds its block as torch's wrappers do, and scales what it returns."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return scaled(self.module(*args, **kwargs))


class Hidden(nn.Module):
    """A wrapper that holds its block by another name."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return scaled(self.block(*args, **kwargs))


class Alone(nn.Module):
    """A block of a user that attends by hand, without a module for it."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        weights = (hidden_states @ hidden_states.mT).softmax(-1)
        return weights @ hidden_states

    @staticmethod
    def by_torch(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        x = hidden_states[:, None]
        return F.scaled_dot_product_attention(x, x, x)[:, 0]


def scaled(out: Any) -> Any:
    if isinstance(out, tuple):
        return tuple(map(scaled, out))
    return None if out is None else 0.5 * out  # SD3's last block returns no text


def by_partial(block: Any) -> None:
    theirs = block.forward

    def halved(theirs: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return scaled(theirs(*args, **kwargs))

    block.forward = partial(halved, theirs)


def wrapped(kind: type, indices: slice) -> Callable[[nn.ModuleList], None]:
    def change(blocks: nn.ModuleList) -> None:
        for index in range(len(blocks))[indices]:
            blocks[index] = kind(blocks[index])

    return change


def inserted(blocks: nn.ModuleList) -> None:
    """Insert a block of another model of the same class."""
    name = next(name for name in LISTS if type(blocks[0]) is type(getattr(MODELS[name].build(), LISTS[name])[0]))
    donor = MODELS[name].build(1).to(next(blocks.parameters()).device)
    blocks.insert(1, getattr(donor, LISTS[name])[0])


def removed(blocks: nn.ModuleList) -> None:
    del blocks[0]


def swapped(blocks: nn.ModuleList) -> None:
    blocks[0], blocks[1] = blocks[1], blocks[0]


# what is done to the list of blocks
RIGHT: dict[str, Callable[[Any], None]] = {
    "a wrapper with .module": wrapped(Held, slice(1, 2)),
    "all in wrappers with .module": wrapped(Held, slice(None)),
    "a partial on a forward": lambda blocks: by_partial(blocks[1]),
    "inserted": inserted,
    "removed": removed,
    "swapped": swapped,
}
REFUSED: dict[str, tuple[Callable[[Any], None], str]] = {
    "one hidden": (wrapped(Hidden, slice(1, 2)), "inside Hidden at"),
    "all hidden": (wrapped(Hidden, slice(None)), "inside Hidden at"),
    "compiled": (lambda blocks: blocks[1].compile(backend="eager"), "Compiled modules are not supported"),
    "compiled by a wrapper": (wrapped(torch.compile, slice(1, 2)), "Compiled modules are not supported"),
    "a compiled forward": (
        lambda blocks: setattr(blocks[1], "forward", torch.compile(blocks[1].forward, backend="eager")),
        "Compiled modules are not supported",
    ),
}


def changed_truth(name: str, change: Callable[[Any], None], device: torch.device) -> tuple[Tensor, ...]:
    module = MODELS[name].build().to(device)
    change(getattr(module, LISTS[name]))
    return MODELS[name].whole(module, MODELS[name].arguments(device))


def outputs(module: Any, name: str, device: torch.device) -> tuple[Tensor, ...]:
    with StayDouble(), torch.no_grad():
        return tuple(x.clone() for x in flat(module(**MODELS[name].arguments(device), return_dict=False)))


def message(function: Callable[[], object]) -> str:
    try:
        function()
    except ValueError as error:
        return str(error)
    return ""


def with_changes(rank: int, world: int, device: torch.device, name: str, cases: list[str]) -> dict[str, float]:
    """Return the errors of calls by case, of a transformer that is changed before `parallelize`, or between calls."""
    found, mesh = {}, mesh_for("ulysses", world, device)
    for case in cases:
        truth = changed_truth(name, RIGHT[case], device)
        for when in ("before", "after"):
            module = MODELS[name].build().to(device)
            if when == "before":
                RIGHT[case](getattr(module, LISTS[name]))
            seqpar.parallelize(module, mesh)
            if when == "after":
                outputs(module, name, device)
                RIGHT[case](getattr(module, LISTS[name]))
            found[f"{case}, {when}"] = error(outputs(module, name, device), truth)
            seqpar.release(module)
    return found


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", LISTS)
def test_changed_blocks_are_right(ranks: Pool, name: str, world: int) -> None:
    cases = [case for index, case in enumerate(RIGHT) if name in ("flux", "h3") or index % 2 == world % 2]
    cases = [case for case in cases if name != "sd3_dual" or case != "swapped"]  # its last block is another one
    for found in ranks.run(world, with_changes, name, cases):
        assert {case: value for case, value in found.items() if not value < TOLERANCE} == {}


def refusals(rank: int, world: int, device: torch.device, name: str) -> dict[str, str]:
    """Return the messages by case, of `parallelize` after a change, and of the call after a change."""
    found, mesh = {}, mesh_for("ulysses", world, device)
    for case, (change, _) in REFUSED.items():
        module = MODELS[name].build().to(device)
        change(getattr(module, LISTS[name]))
        found[f"{case}, before"] = message(lambda module=module: seqpar.parallelize(module, mesh))
        module = seqpar.parallelize(MODELS[name].build().to(device), mesh)
        outputs(module, name, device)
        change(getattr(module, LISTS[name]))
        found[f"{case}, after"] = message(lambda module=module: outputs(module, name, device))
        seqpar.release(module)
    return found


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", LISTS)
def test_attention_that_is_not_joined_is_refused(ranks: Pool, name: str, world: int) -> None:
    first, *others = ranks.run(world, refusals, name)
    assert all(other == first for other in others)
    for case, text in first.items():
        expected = REFUSED[case.split(", ")[0]][1]
        assert expected in text or "a wrapper must hold its block as .module" in text, (case, text)


def own_blocks(rank: int, world: int, device: torch.device) -> list[str]:
    """Return the messages of calls with users' blocks that attend by hand, and by torch, and with torch's module."""
    found = []
    mesh = mesh_for("ulysses", world, device)
    for case in ("by hand", "by torch", "torch's module", "replaced forward"):
        module = MODELS["wan"].build().to(device)
        if case == "torch's module":
            module.blocks[1].add_module("mine", nn.MultiheadAttention(4, 2))
        elif case == "replaced forward":
            module.blocks[1].forward = Alone.by_torch
        else:
            block = Alone()
            if case == "by torch":
                block.forward = Alone.by_torch
            module.blocks.insert(1, block)
        found.append(message(lambda module=module: outputs(seqpar.parallelize(module, mesh), "wan", device)))
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_attention_of_users_blocks_is_refused(ranks: Pool, world: int) -> None:
    for hand, torchs, module, forward in ranks.run(world, own_blocks):
        assert hand.startswith("Alone at blocks.1 computes attention itself, to the tokens of one rank only")
        assert torchs.startswith("Alone at blocks.1 computes attention itself")
        assert module.startswith("MultiheadAttention at blocks.1.mine of WanTransformer3DModel would attend")
        assert forward.startswith("WanTransformerBlock at blocks.1 computes attention itself")
    for texts in ranks.run(1, own_blocks):
        assert texts == [""] * 4


class Quantised(nn.Linear):
    """A layer of another package, as bitsandbytes and quanto have them."""


def test_layers_of_other_packages_are_no_blocks_of_users() -> None:
    module = MODELS["wan"].build()
    assert block_lists(module)
    for block in module.blocks:
        block.attn1.to_out[0].__class__ = Quantised
    assert look(module).coupled is None
    assert parts_of_users(module) == {}
    module.blocks.append(Alone())
    assert look(module).coupled is not None
    assert [*parts_of_users(module)] == ["blocks.2"]


def test_a_forward_of_a_mixin_is_not_split() -> None:
    class Mixin:
        """A step cache of a user."""

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            """Decide by the tokens that are given."""

    tiny = MODELS["wan"]
    plain: Any = tiny.build()
    plain.__class__ = type("Cached", (Mixin, type(plain)), {})
    assert "overrides forward" in str(cuts_of(plain).why_not(plain))
    assert cuts_of(tiny.build()).why_not(plain) is None


def test_a_wrapped_block_is_not_fused_and_named(cpu_ranks: Pool) -> None:
    (lines,) = {tuple(lines) for lines in cpu_ranks.run(2, said)[:1]}
    assert any("2 of 4 blocks are diffusers' own" in line or "1 of 4 blocks" in line for line in lines)
    assert any("each rank's tokens alone pass class Held on transformer_blocks.1" in line for line in lines)


def said(rank: int, world: int, device: torch.device) -> list[str]:
    out = io.StringIO()
    with redirect_stdout(out):
        module = MODELS["flux"].build()
        wrapped(Held, slice(1, 2))(module.transformer_blocks)
        seqpar.release(seqpar.parallelize(module, mesh_for("ulysses", world, device)))
    return out.getvalue().splitlines()


@pytest.mark.parametrize(("name", "splits"), [("flux", False), ("wan", True), ("h3", False), ("sd3", True)])
def test_only_families_that_call_twice_get_a_cfg_axis(name: str, splits: bool) -> None:
    module = MODELS[name].build()
    assert cfg_by_default(module, module) is splits


def test_pipelines_that_nobody_knows_get_no_cfg_axis() -> None:
    class Own:
        """A user's pipeline."""

    class Derived(diffusers.WanPipeline):  # pyright: ignore[reportPrivateImportUsage]
        """A user's variant of a known one."""

    module = MODELS["wan"].build()
    assert cfg_by_default(Own.__new__(Own), module) is False
    assert cfg_by_default(Derived.__new__(Derived), module) is True
