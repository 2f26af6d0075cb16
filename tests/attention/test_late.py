"""Tests of late ranks and of errors in the middle of a call: what is sent early, and that later calls are right."""

from __future__ import annotations

import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from seqpar.local import reference
from seqpar.mesh.shard import Shard
from seqpar.planner.costs import facts_of
from seqpar.types.protocols import Given, Prepare
from tests.support.meshes import LAYOUTS, TRANSPORTS, Noted, build, comes, mesh_for, random
from tests.support.pool import Pool

SOON_S, DIM = 0.25, 8
SENDS_ALL = ("kv_gather", "kv_first")  # nothing of these strategies is left to send after attention


def settle(device: torch.device) -> None:
    """Wait for a GPU, which computes what the host has only queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def early(
    rank: int, world: int, device: torch.device, strategy: str, transport: str, folder: Path, place: str
) -> list[bool]:
    """Let rank 0 work at a place of its call, while rank 1 comes late.

    Returns on rank 1 whether the work began before it came; on rank 0 whether its attention ended after that, and, if
    all of it is sent by then, whether rank 1's attention ended during the work. place: "beside" attention, after the
    "values" of kv_first are sent, or, as a wrong strategy would run it, "before" or "after" the call.
    """
    begun, came, ended = (folder / name for name in ("begun", "came", "ended"))
    limit_s, found = SOON_S if place in ("before", "after") else 20.0, []
    mesh, shard, moves = mesh_for(strategy, world, device), Shard(13, world), Noted(transport)

    def core(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, /) -> tuple[Tensor, Tensor]:
        if rank == 0:
            settle(device)
            waited.append(came.exists())
        return reference.attend(q, k, v)

    def work() -> None:
        begun.touch()
        if strategy in SENDS_ALL and place != "after":
            found.append(comes(ended, limit_s))

    waited = list[bool]()
    attend = build(strategy, mesh, shard, core, moves.transport)
    x = random((1, shard.sizes[mesh.sequence.rank], 4, DIM), rank, device)
    stream = Given(x, x, x, Prepare())
    attend((stream,))  # makes the buffers
    moves.as_in_a_graph()
    settle(device)  # nothing of the first call is left to wait for
    mesh.collect(rank, int)
    if rank == 1:
        is_early = comes(begun, limit_s)
        came.touch()
        attend((stream,))
        settle(device)
        ended.touch()
        return [is_early]
    if place == "values":
        # on a GPU values are sent when the current stream, on which the queries come next, has reached that point:
        # copies and NCCL work on separate streams, so that nothing waits for them here
        (exchange,) = moves.made
        start_values = exchange.start_values

        def noted() -> None:
            start_values()
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
            work()

        exchange.start_values = noted
    if place == "before":
        work()
    waited.clear()
    attend((stream,), None, beside=work if place == "beside" else None)
    settle(device)
    if place == "after":
        work()
    return [waited[-1], *found]


@pytest.mark.parametrize("strategy", LAYOUTS)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_work_beside_attention_waits_for_no_rank_and_data_is_sent_before_it(
    ranks: Pool, transport: str, strategy: str, tmp_path: Path
) -> None:
    if transport == "peer" and "ring" in facts_of(strategy).axes and ranks.device == "cpu":
        pytest.skip("a CPU has no stream aside, on which a block waits for room at the next rank")
    places = ("beside", "values") if strategy == "kv_first" else ("beside",)
    for place in places:
        (folder := tmp_path / place).mkdir()
        first, second = ranks.run(2, early, strategy, transport, folder, place)
        assert first == [True] * (1 + (strategy in SENDS_ALL))
        assert second == [True]


@pytest.mark.parametrize(("strategy", "place"), [("ulysses", "after"), ("kv_gather", "before"), ("kv_first", "before")])
def test_negative_control_work_at_another_place_is_noticed(
    ranks: Pool, strategy: str, place: str, tmp_path: Path
) -> None:
    first, second = ranks.run(2, early, strategy, "collective", tmp_path, place)
    assert (second == [False]) if place == "after" else (first[1:] == [False])


class MistakeError(Exception):
    """An error in the middle of a call."""


def failed(
    rank: int, world: int, device: torch.device, strategy: str, transport: str, places: tuple[str | None, ...]
) -> int:
    """Return how often attention was wrong around a call that failed. places: where it failed, by rank."""
    mesh, shard, wrong, fails = mesh_for(strategy, world, device), Shard(13, world), 0, False

    def fail(*_: object) -> Any:
        raise MistakeError

    def core(*tensors: Any) -> tuple[Tensor, Tensor]:
        return fail() if fails and places[rank] == "core" else reference.attend(*tensors)

    attend, mine = build(strategy, mesh, shard, core, transport), shard.slice(rank)
    for round_ in range(6):
        q, k, v = (random((1, 13, 4, DIM), 3 * round_ + seed, device) for seed in range(3))
        stream = Given(q[:, mine], k[:, mine], v[:, mine], Prepare())
        fails = round_ == 2 and places[rank] is not None
        with pytest.MonkeyPatch.context() as patch, pytest.raises(MistakeError) if fails else nullcontext():
            if fails and places[rank] in ("query", "value"):
                patch.setattr(f"seqpar.attention.kv_first.{places[rank]}", fail)
            elif round_ % 2 and rank:
                time.sleep(0.02 * rank)  # all ranks but one are late
            (got,) = attend((stream,), None, beside=fail if fails and places[rank] == "beside" else None)
            # in the round of the error ranks send whatever their outboxes hold, so its results are not checked
            truth = reference.attend(stream.q, k, v)[0]
            wrong += round_ != 2 and not torch.allclose(got, truth, rtol=0, atol=1e-12)
    return wrong


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("strategy", "places"),
    [
        ("ulysses", ("core",) * 3),
        ("ulysses", (None, "core")),
        ("ring", ("core",) * 2),
        ("ring", (None, "core", None)),
        ("usp", ("core", None, None, None)),
        ("kv_gather", (None, "core")),
        ("kv_first", ("core",) * 2),
        *((strategy, ("beside",) * 2) for strategy in LAYOUTS),
        ("kv_first", ("query",) * 3),  # after keys and values were sent
        ("kv_first", ("value",) * 3),  # after keys were sent
        ("kv_first", ("query", "value", "value")),
    ],
    ids=str,
)
def test_an_error_in_a_call_leaves_later_calls_right(
    ranks: Pool, strategy: str, places: tuple[str | None, ...], transport: str
) -> None:
    assert ranks.run(len(places), failed, strategy, transport, places) == [0] * len(places)
