"""Tests of what all benches share: the list, flags that are refused, the command line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from launch import bench as entry
from launch.benches import timing
from launch.benches.calls import Calls
from launch.benches.compare import Compare
from launch.benches.decode import Decode
from launch.benches.exchange import Exchange
from launch.benches.faults import Faults
from launch.benches.steps import Steps, fitting
from tests.support.meshes import mesh as make_mesh
from tests.support.pool import Pool

pytestmark = pytest.mark.bench


def test_the_docstring_lists_what_exists() -> None:
    listed = [
        line.split("launch/bench.py ")[1].split()[0] for line in str(entry.__doc__).splitlines() if ".py " in line
    ]
    assert listed == [kind.__name__.lower() for kind in entry.BENCHES]


@pytest.mark.parametrize(("world", "count"), [(1, 1), (2, 5), (3, 4), (4, 9)])
def test_layouts_use_all_ranks_once(world: int, count: int) -> None:
    layouts = fitting((), world)
    assert len(set(layouts)) == len(layouts) == count
    assert all(x.cfg * x.ring * x.ulysses == world for x in layouts)
    assert fitting((layouts[0].name,), world) == layouts[:1]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (Steps(tokens=(16, 20)), "got --tokens 20, expected squares: 16 or 25"),
        (Steps(layouts=("foo",)), "got --layouts foo, expected some of ulysses:1:1"),
        (Steps(rounds=0), "got --rounds 0"),
        (Calls(model="flux"), "got --model flux, expected one of flux.1-dev"),
        (Calls(masked=True), "got --masked for flux.1-dev, whose calls take no mask of padding"),
        (Exchange(), "got 1 process, expected at least 2"),
        (Compare(works=("sleep",)), "got --works sleep, expected works that begin with call"),
        (Compare(trees=(Path("/nowhere"),)), "got --trees /nowhere, expected a checkout"),
        (Faults(side_by_side=0), "expected jobs, and 0 < --stopped-s"),
        (Decode(vae=("sd",)), "got the decoder sd, expected one of kl"),
        (Decode(size=("1x2x3",)), "got --size 1x2x3"),
        (Steps(seconds=float("nan")), "got --seconds nan, expected a number"),
        (Steps(out=Path("/")), "got --out /, which is a folder"),
    ],
    ids=str,
)
def test_what_cannot_be_measured_is_refused(args: Any, message: str) -> None:
    def start(flags: Any) -> None:
        entry.check(flags)
        entry.BENCHES[type(flags)](flags)

    entry.check(Steps(out=Path("lines.jsonl")))  # a negative control
    with pytest.raises(ValueError, match=message):
        start(args)


def test_a_command_is_told_without_where_its_lines_went(monkeypatch: pytest.MonkeyPatch) -> None:
    for flags in (["steps", "--out", "x.jsonl", "--tokens", "16"], ["steps", "--tokens", "16", "--out=x.jsonl"]):
        monkeypatch.setattr(sys, "argv", ["bench.py", *flags])
        assert timing.command() == "launch/bench.py steps --tokens 16"


def failing(rank: int, world: int, device: torch.device) -> list[Any]:
    """Return what ranks agree on where one of them fails, and whose times count."""
    mesh = make_mesh(device, cfg=1)

    def work() -> int:
        if rank == 1:
            raise RuntimeError("cannot\nhere")
        return rank

    slow = timing.slowest({"a": [1.0 + rank, 5.0 - rank], "b": [2.0, 2.0]}, mesh)
    return [timing.attempt(work, mesh, RuntimeError), timing.attempt(lambda: rank, mesh, RuntimeError), slow]


def test_ranks_agree_on_what_failed_and_who_was_slowest(ranks: Pool) -> None:
    slow = {"a": {"median": 3.5, "min": 2.0, "max": 5.0}, "b": {"median": 2.0, "min": 2.0, "max": 2.0}}
    for rank, result in enumerate(ranks.run(2, failing)):
        assert result == [(None, "RuntimeError: cannot"), (rank, None), slow]
