"""Tests that a new transport is one file: once it is in the folder, all checks pass without an edit elsewhere."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import seqpar.transports
from seqpar.mesh import Mesh
from seqpar.planner.machine import curve_of
from seqpar.planner.plan import Choice, choose_transport, transport_between
from seqpar.transports import _folder
from tests.attention import test_streams
from tests.attention.test_strategies import CASES, TOLERANCE, moved, sharded, whole
from tests.support.meshes import LAYOUTS
from tests.support.meshes import mesh as make_mesh
from tests.support.pool import Pool
from tests.transports.peer.test_peer import sampled
from tests.transports.test_contract import KINDS, check_told, dropped, equal_gathers, failed, misused

NAME = "delayed"
FOLDER = Path(__file__).parents[1] / "support" / "transports"


@contextmanager
def added() -> Iterator[None]:
    """Make the new transport importable as if its file were in the folder of transports."""
    seqpar.transports.__path__.append(str(FOLDER))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        seqpar.transports.__path__.remove(str(FOLDER))
        sys.modules.pop(f"seqpar.transports.{NAME}", None)


def with_it(rank: int, world: int, device: torch.device, check: Callable[..., Any], *args: Any) -> Any:
    """Run a check on this rank with the new transport in the folder."""
    with added():
        return check(rank, world, device, *args)


@pytest.mark.parametrize("case", [CASES[1], CASES[4]], ids=str)
@pytest.mark.parametrize("strategy", LAYOUTS)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_strategies_are_right_by_a_new_transport(ranks: Pool, world: int, strategy: str, case: tuple[int, ...]) -> None:
    got = torch.cat(ranks.run(world, with_it, sharded, strategy, NAME, case), dim=1)
    assert (got - whole(case, ranks.device)).abs().max() < TOLERANCE


@pytest.mark.parametrize("strategy", ["ulysses", "kv_gather", "kv_first"])
def test_strategies_that_move_data_keep_its_bits_by_a_new_transport(ranks: Pool, strategy: str) -> None:
    one = ranks.run(1, moved, strategy, "collective", CASES[2])[0]
    assert torch.equal(torch.cat(ranks.run(3, with_it, moved, strategy, NAME, CASES[2]), dim=1), one)


@pytest.mark.parametrize("strategy", LAYOUTS)
def test_two_streams_are_right_by_a_new_transport(ranks: Pool, strategy: str) -> None:
    got = ranks.run(3, with_it, test_streams.all_cases, strategy, NAME)
    for index, case in enumerate(test_streams.CASES):
        pieces = test_streams.joined([outs[index] for outs in got])
        assert test_streams.error(pieces, test_streams.truth(case)) < TOLERANCE, case


def test_a_new_transport_is_held_to_the_contract(ranks: Pool) -> None:
    check_told(ranks.run(3, with_it, misused, NAME))
    assert ranks.run(3, with_it, failed, "ulysses", NAME, (1,)) == [0] * 3
    assert ranks.run(2, with_it, dropped, NAME) == [[(True,) * 4] * len(KINDS)] * 2
    for first, second in ranks.run(2, with_it, equal_gathers, NAME):
        assert (first[:, 0].tolist(), second[:, 0].tolist()) == ([0, 1], [10, 11])


def named(rank: int, world: int, device: torch.device) -> tuple[Choice, str, str, bool]:
    """Return what the planner says: the choice by name, its rates, the choice of "auto", whether it is listed."""
    mesh = make_mesh(device, cfg=1)
    rates, auto = curve_of(NAME, device.type), transport_between(mesh.world, device).name
    return choose_transport(NAME, mesh), rates, auto, NAME in _folder.names()


def test_the_planner_takes_a_new_transport_by_name_only(ranks: Pool) -> None:
    for chosen, rates, auto, listed in ranks.run(2, with_it, named):
        assert chosen == Choice(NAME, "as asked")
        assert rates == ("nccl" if ranks.device == "cuda" else "gloo")
        assert auto in ("collective", "peer")
        assert listed
    with pytest.raises(ValueError, match=f"got transport '{NAME}', expected one of collective, peer"):
        choose_transport(NAME, Mesh.single())


@pytest.mark.parametrize(("world", "strategy", "cfg"), [(2, "ulysses", 2), (3, "ring", 1), (4, "kv_first", 2)])
def test_latents_have_the_same_bits_by_a_new_transport(ranks: Pool, world: int, strategy: str, cfg: int) -> None:
    truth = ranks.run(world, sampled, strategy, cfg, "collective")
    got = ranks.run(world, with_it, sampled, strategy, cfg, NAME)
    assert all(torch.equal(a, truth[0]) for a in (*truth, *got))


def stale(rank: int, world: int, device: torch.device) -> bool:
    """Return whether delivered data is still right after the next use of the exchange has begun."""
    axis, transport = make_mesh(device, cfg=1).sequence, _folder.load(NAME).Transport()
    exchange = transport.gather(axis, (1,) * world, (), torch.zeros((), device=device))
    exchange.outbox().fill_(rank)
    got = exchange.deliver()
    assert got.tolist() == list(range(world))
    exchange.outbox()
    return bool(got.isfinite().any())


def test_negative_control_the_new_transport_poisons_what_is_not_valid_any_more(ranks: Pool) -> None:
    assert ranks.run(2, with_it, stale) == [False, False]
