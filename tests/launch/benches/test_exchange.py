"""Tests of the exchange bench: every way moves every element, wrong moves are detected, lines make table and plot."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from launch.baselines.plain_ulysses import ulysses
from launch.benches import exchange, table, timing
from launch.benches.exchange import Exchange, check, check_arrivals, measure
from launch.benches.moves import CODED_BYTES, MOVES, bare, bytes_of, coded, ours, permuted, tokens_for
from seqpar.planner.plan import load_transport
from seqpar.transports._layout import HeadLayout
from tests.support.meshes import TRANSPORTS, local_for, random
from tests.support.meshes import mesh as make_mesh
from tests.support.pool import Pool

TINY = Exchange(megabytes=(0.001,), heads=4, head_dim=2, rounds=2, seconds=1e-3)
WAYS = [f"ours, {name}" for name in TRANSPORTS] + ["bare", "with permutes"]


def layout_for(world: int, heads: int, device: torch.device, batch: int = 2) -> HeadLayout:
    return HeadLayout(batch, (3,) * world, heads, heads, 2, torch.float32, device)


def moved(rank: int, world: int, device: torch.device, heads: int) -> None:
    mesh = make_mesh(device, cfg=1)
    layout, axis = layout_for(world, heads, device), mesh.sequence
    for move in MOVES:
        for name in TRANSPORTS:
            transport = load_transport(name)
            check_arrivals(name, ours(move, transport, axis, layout), mesh)
            transport.check()
            mesh.collect(None, None)
            transport.release()
        check_arrivals("bare", bare(move, axis, layout), mesh)
        if heads % world == 0 or move in ("kv gather", "halo"):
            check_arrivals("permuted", permuted(move, axis, layout), mesh)
        else:
            with pytest.raises(ValueError, match=f"{heads} heads do not divide by {world} ranks"):
                permuted(move, axis, layout)


@pytest.mark.parametrize("heads", [4, 6])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_way_of_every_move_moves_every_element(ranks: Pool, world: int, heads: int) -> None:
    ranks.run(world, moved, heads)


def swapped(rank: int, world: int, device: torch.device) -> str:
    mesh = make_mesh(device, cfg=1)
    way = permuted("ulysses in", mesh.sequence, layout_for(world, 4, device))
    wrong = replace(way, run=lambda: [x.flip(2) for x in way.run()])
    with pytest.raises(RuntimeError) as error:
        check_arrivals("flipped", wrong, mesh)
    return str(error.value)


def test_negative_control_a_way_that_swaps_heads_is_not_timed(ranks: Pool) -> None:
    assert ranks.run(2, swapped) == ["flipped: ranks [0, 1] did not get what was sent to them"] * 2


def test_codes_tell_every_element_of_all_tensors_apart() -> None:
    layout = HeadLayout(2, (700,), 8, 8, 16, torch.bfloat16, torch.device("cpu"))
    whole = slice(None)
    found = [
        torch.stack([coded(layout, name, whole, whole, n).long() << 8 * n for n in range(CODED_BYTES)]).sum(0)
        for name in range(3)
    ]
    assert torch.equal(torch.stack(found).flatten(), torch.arange(3 * 2 * 700 * 8 * 16))
    part = coded(layout, 1, slice(5, 9), slice(2, 4), 1)
    assert torch.equal(part, coded(layout, 1, whole, whole, 1)[:, 5:9, 2:4])


@pytest.mark.parametrize("move", MOVES)
def test_sizes_are_those_asked_for(move: str) -> None:
    tokens = tokens_for(move, 16, 4, 1, 4096, 2)
    layout = HeadLayout(1, (tokens,) * 4, 32, 32, 128, torch.bfloat16, torch.device("cpu"))
    assert bytes_of(move, layout) == pytest.approx(16 * 2**20, rel=1e-3)
    assert tokens_for(move, 1e-6, 4, 1, 4096, 2) == 1


def attended(rank: int, world: int, device: torch.device) -> None:
    """Check that the benches' plain Ulysses computes attention over all tokens."""
    axis, local = make_mesh(device, cfg=1).sequence, local_for(device)
    q, k, v = (random((2, 4 * world, 2 * world, 8), seed, device) for seed in range(3))
    mine = slice(4 * rank, 4 * rank + 4)
    core = ulysses(lambda *qkv: local(*qkv)[0], axis)
    assert torch.allclose(core(*(x[:, mine] for x in (q, k, v))), local(q, k, v)[0][:, mine], rtol=0, atol=1e-12)


@pytest.mark.parametrize("world", [2, 3])
def test_plain_ulysses_is_attention_over_all_tokens(ranks: Pool, world: int) -> None:
    ranks.run(world, attended)


def measured(rank: int, world: int, device: torch.device) -> list[dict[str, Any]]:
    mesh = make_mesh(device, cfg=1)
    return [line for move in MOVES for line in measure(TINY, mesh, move, 0.001)]


def test_every_way_has_a_line_and_they_make_a_table_and_a_picture(ranks: Pool, tmp_path: Path) -> None:
    lines, same = ranks.run(2, measured)
    assert [line["case"] for line in lines] == [line["case"] for line in same]
    modes = list(dict.fromkeys(line["case"]["mode"] for line in lines))
    assert len(lines) == len(MOVES) * len(WAYS) * len(modes)
    assert {line["case"]["way"] for line in lines} == set(WAYS)
    for line in lines:
        us = line["us"]
        assert us["min"] <= us["median"] <= us["max"]
        assert line["gb_per_s"] == pytest.approx(line["bytes"] / 2 / us["median"] / 1e3)
        assert line["share_of_links"] == pytest.approx(line["gb_per_s"] / 478)
    (made,) = table.tables(lines)
    assert len(made.splitlines()) == 2 + len(MOVES) * len(modes)
    assert all(exchange.row(line) for line in lines)
    pytest.importorskip("matplotlib")  # the assertions above need no matplotlib
    from launch.benches import plot

    plot.exchange(lines).savefig(tmp_path / "exchange.png")


def refused(rank: int, world: int, device: torch.device) -> list[dict[str, Any]]:
    return measure(TINY, make_mesh(device, cfg=1), "ulysses in", 0.001)


def test_a_way_that_is_not_possible_says_why(ranks: Pool) -> None:
    lines = ranks.run(3, refused)[0]
    (line,) = (line for line in lines if line["case"]["way"] == "with permutes" and line["case"]["mode"] == "eager")
    assert (line["us"], line["refused"]) == (None, "4 heads do not divide by 3 ranks")
    assert line["refused"] in exchange.row(line)
    assert "| - |" in table.exchange(lines)


def line_of(way: str, us: float) -> dict[str, Any]:
    case = {"move": "kv gather", "mb": 4, "way": way, "mode": "graph"}
    return {"bench": "exchange", "case": case, "gpus": 4, "us": {"median": us}, "gb_per_s": 7.0}


def test_the_table_holds_collectives_against_peer_memory() -> None:
    lines = [line_of(way, us) for way, us in zip(WAYS, (40.0, 10.0, 20.0, 50.0), strict=True)]
    row = "| 4 | kv gather | graph | 4 | 40.0 (7) | 10.0 (7) | 20.0 (7) | 50.0 (7) | 2.00 | 5.00 |"
    assert table.exchange(lines).splitlines()[2:] == [row]


def failing(rank: int, world: int, device: torch.device) -> list[Any]:
    mesh = make_mesh(device, cfg=1)

    def work() -> int:
        if rank == 1:
            raise RuntimeError("cannot\nhere")
        return rank

    slow = timing.slowest({"a": [1.0 + rank, 5.0 - rank], "b": [2.0, 2.0]}, mesh)
    return [timing.attempt(work, mesh, RuntimeError), timing.attempt(lambda: rank, mesh, RuntimeError), slow]


def test_ranks_agree_on_what_failed_and_who_was_slowest(ranks: Pool) -> None:
    slow = {"a": {"median": 3.5, "min": 2.0, "max": 5.0}, "b": {"median": 2.0, "min": 2.0, "max": 2.0}}
    for rank, found in enumerate(ranks.run(2, failing)):
        assert found == [(None, "RuntimeError: cannot"), (rank, None), slow]


@pytest.mark.parametrize(
    ("args", "world", "message"),
    [
        (Exchange(), 1, "got 1 process, expected at least 2"),
        (Exchange(rounds=0), 2, "--rounds 0 .*expected at least 1"),
        (Exchange(heads=0), 2, "--heads 0 .*expected at least 1"),
        (Exchange(seconds=0.0), 2, "--seconds 0, expected"),
        (Exchange(megabytes=(1, -4)), 2, r"got --megabytes \(1, -4\), expected sizes over 0"),
        (Exchange(megabytes=()), 2, "got --megabytes"),
    ],
    ids=str,
)
def test_what_cannot_be_measured_is_refused(args: Exchange, world: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(args, world)
