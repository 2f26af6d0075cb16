"""Tests that a strategy runs the work beside attention once, after it has sent and before it waits for other ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from seqpar.local import reference
from seqpar.mesh.shard import JointShard, Shard
from seqpar.planner.costs import facts_of
from seqpar.types.protocols import Given, Prepare, Stream
from tests.attention.test_streams import Case, as_given, mine_of, moved_to, whole_stream
from tests.support.meshes import LAYOUTS, TRANSPORTS, Noted, build, comes, mesh_for, random, refused
from tests.support.pairs import covering
from tests.support.pool import Pool

SOON_S, DIM = 0.25, 8
CASES = (
    Case(2, (2, 7), 6, 2, False, (True, True)),
    Case(1, (5, 9), 5, 5, False, (False, False)),
    Case(1, (0, 13), 4, 4, False, (True, False)),  # one stream
)


def cases_of(strategy: str, world: int) -> list[Case]:
    """Return the cases with heads that the strategy takes on so many ranks."""
    return [case for case in CASES if refused(strategy, world, case.heads, case.kv_heads) is None]


def streams_of(case: Case, rank: int, world: int, device: torch.device) -> tuple[JointShard, list[Stream]]:
    """Return the shards of both streams, and a rank's tokens of them on its device."""
    shards = tuple(Shard(tokens, world) for tokens in case.tokens)
    wholes = [whole_stream(case, index) for index in range(2)]
    parts = [mine_of(x, shard.slice(rank), x, "none") for x, shard in zip(wholes, shards, strict=True)]
    mine = [moved_to(part, device) for part in parts]
    return JointShard(shards), [as_given(x) if given else x for x, given in zip(mine, case.given, strict=True)]


def attended(rank: int, world: int, device: torch.device, strategy: str, transport: str) -> list[tuple[int, bool]]:
    """Return for each case how often the work ran in two calls, and whether the output has the same bits as without."""
    found = []
    for case in cases_of(strategy, world):
        tokens, streams = streams_of(case, rank, world, device)
        attend = build(strategy, mesh_for(strategy, world, device), tokens, reference.attend, transport)
        ran, same = [], []
        alone = [out.clone() for out in attend(streams)]
        for _ in range(2):  # buffers and slots are used again, in turn with calls without such work
            with_work = [out.clone() for out in attend(streams, None, beside=lambda ran=ran: ran.append(busy(device)))]
            again = [out.clone() for out in attend(streams)]
            same += [torch.equal(x, y) for other in (with_work, again) for x, y in zip(other, alone, strict=True)]
        found.append((len(ran), all(same)))
    return found


def busy(device: torch.device) -> Tensor:
    """Return memory with other contents than the exchanges of the tests have."""
    return torch.full((50, 50), float("nan"), device=device) @ torch.ones(50, 50, device=device)


@pytest.mark.parametrize(
    ("world", "strategy", "transport"),
    [*covering((2, 3, 4), LAYOUTS, turns=TRANSPORTS), *((1, "ulysses", name) for name in TRANSPORTS)],
)
def test_work_beside_attention_runs_once_and_changes_no_bit(
    ranks: Pool, world: int, transport: str, strategy: str
) -> None:
    assert ranks.run(world, attended, strategy, transport) == [[(2, True)] * len(cases_of(strategy, world))] * world


def begun(
    rank: int, world: int, device: torch.device, strategy: str, transport: str, told: Path, mistake: bool
) -> bool:
    """Return, on the last rank, whether the work began on the first one before it came, and on the first one whether
    its attention ended after that.

    told: a file that the work makes. mistake: whether it runs where a wrong strategy would run it: after the exchange.
    """
    mesh, shard = mesh_for(strategy, world, device), Shard(13, world)
    moves = Noted(transport)
    attend = build(strategy, mesh, shard, reference.attend, moves.transport)
    x = random((1, shard.sizes[mesh.sequence.rank], 4, DIM), rank, device)
    stream = Given(x, x, x, Prepare())
    attend((stream,))  # makes the buffers
    moves.as_in_a_graph()
    settle(device)
    mesh.collect(rank, int)
    came, is_early = told.with_suffix(".came"), False
    if rank == world - 1:
        is_early = comes(told, SOON_S) if mistake else comes(told)
        came.touch()
    attend((stream,), None, beside=None if rank or mistake else told.touch)
    settle(device)
    if rank == 0 and mistake:
        told.touch()
    return is_early if rank else came.exists()


def settle(device: torch.device) -> None:
    """Wait for a GPU, which computes what the host has only queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@pytest.mark.parametrize("strategy", LAYOUTS)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_work_does_not_wait_for_a_rank_that_is_late(
    ranks: Pool, transport: str, strategy: str, tmp_path: Path
) -> None:
    if transport == "peer" and "ring" in facts_of(strategy).axes and ranks.device == "cpu":
        pytest.skip("a CPU has no stream aside, on which a block waits for room at the next rank")
    assert ranks.run(2, begun, strategy, transport, tmp_path / "told", False) == [True, True]


def test_beside_negative_control_work_after_the_exchange_is_noticed(ranks: Pool, tmp_path: Path) -> None:
    assert ranks.run(2, begun, "ulysses", "collective", tmp_path / "told", True) == [True, False]


def sent(rank: int, world: int, device: torch.device, strategy: str, transport: str, told: Path, early: bool) -> bool:
    """Return whether attention ends on the last rank while the first one still works.

    told: a file that the last rank then makes. early: whether the first rank works beside attention; otherwise it does
    the same work before attention.
    """
    mesh, shard = mesh_for(strategy, world, device), Shard(12, world)
    moves = Noted(transport)
    attend = build(strategy, mesh, shard, reference.attend, moves.transport)
    x = random((1, shard.sizes[mesh.sequence.rank], 4, DIM), rank, device)
    stream = Given(x, x, x, Prepare())
    attend((stream,))
    moves.as_in_a_graph()
    settle(device)
    mesh.collect(rank, int)
    found = list[bool]()

    def work() -> None:
        if rank == 0:
            found.append(comes(told) if early else comes(told, SOON_S))

    if not early:
        work()
    attend((stream,), None, beside=work if early else None)
    settle(device)
    if rank:
        told.touch()
    return found == [True]


@pytest.mark.parametrize("strategy", ["kv_gather", "kv_first"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_data_is_sent_before_the_work_begins(ranks: Pool, transport: str, strategy: str, tmp_path: Path) -> None:
    """Keys and values of a rank that is busy beside attention arrive, so that the other rank need not wait for it."""
    assert not ranks.run(2, sent, strategy, transport, tmp_path / "late", False)[0]
    assert ranks.run(2, sent, strategy, transport, tmp_path / "told", True)[0]


def test_an_error_in_the_work_leaves_later_calls_right(ranks: Pool) -> None:
    for strategy in LAYOUTS:
        for transport in TRANSPORTS:
            assert ranks.run(2, failed, strategy, transport) == [True, True], (strategy, transport)


class WorkError(Exception):
    """An error in the model's own work."""


def failed(rank: int, world: int, device: torch.device, strategy: str, transport: str) -> bool:
    tokens, streams = streams_of(CASES[0], rank, world, device)
    attend = build(strategy, mesh_for(strategy, world, device), tokens, reference.attend, transport)
    before = [out.clone() for out in attend(streams)]

    def fails() -> None:
        raise WorkError

    with pytest.raises(WorkError):
        attend(streams, None, beside=fails)
    return all(torch.equal(x, y) for x, y in zip(attend(streams), before, strict=True))
