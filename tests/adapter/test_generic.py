"""Tests that diffusers' transformers with their tokens split over ranks equal the same transformers in one process.

The truth is the unchanged module with its own attention processors; only its roundings to fp32 are left out on both
sides (`StayDouble`). What remains is the order of sums, 1e-15 of the largest value, so 1e-12 leaves no room for errors.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from seqpar.adapter import generic
from seqpar.planner.plan import Choice
from tests.support.foreign import StayDouble
from tests.support.meshes import mesh_for
from tests.support.models.diffusers_tiny import MODELS, flat
from tests.support.pool import Pool

TOLERANCE = 1e-12
VISIBLE = 1e-3
CASES = [(2, "ulysses"), (3, "kv_gather"), (3, "ulysses"), (4, "usp"), (2, "ring")]


def body_of(module: Any, world: int, device: torch.device, strategy: str, transport: str, cuts: Any = None) -> Any:
    """Return a generic body on the mesh on which a strategy is tested."""
    choices = {"strategy": strategy, "transport": transport, "local": "sdpa" if device.type == "cpu" else "reference"}
    plan: Any = SimpleNamespace(**{name: Choice(choice, "test") for name, choice in choices.items()})
    return generic.build(module, mesh_for(strategy, world, device), plan, cuts)


def split(
    rank: int, world: int, device: torch.device, name: str, strategy: str, transport: str = "collective"
) -> tuple[Tensor, ...]:
    """Return the outputs of a split transformer on this rank, of its second call."""
    tiny = MODELS[name]
    body = body_of(tiny.build().to(device), world, device, strategy, transport)
    with StayDouble():
        body(tiny.arguments(device))
        return tuple(x.clone() for x in flat(body(tiny.arguments(device))))


def error(got: tuple[Tensor, ...], truth: tuple[Tensor, ...]) -> float:
    """Return the largest difference relative to the largest value."""
    errors = [(mine - other).abs().max() / other.abs().max() for mine, other in zip(got, truth, strict=True)]
    return torch.stack(errors).max().item()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("world", "strategy"), CASES)
def test_a_split_transformer_equals_the_whole_one(ranks: Pool, world: int, strategy: str, name: str) -> None:
    truth = MODELS[name].whole()
    for got in ranks.run(world, split, name, strategy):
        assert error(got, truth) < TOLERANCE
