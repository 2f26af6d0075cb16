"""Tests of keys and values gathered by peer memory, with and without overlap: slots, slow readers, CUDA graphs."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor

from seqpar.kernels import prepare
from seqpar.mesh.inputs import collect_on_axis
from seqpar.mesh.shard import Shard
from seqpar.transports import peer
from seqpar.types.outboxes import Outboxes
from seqpar.types.protocols import Prepare
from tests.support.meshes import mesh as make_mesh
from tests.support.pairs import covering
from tests.support.pool import Pool
from tests.transports.peer.test_peer import CASES, layout_of, payload, write
from tests.transports.test_exchange_moves import late


def write_first(whole: list[Tensor], mine: slice, exchange: Any, outboxes: Outboxes, turn: int | None = None) -> None:
    """Write and send k before v exists, and both before q exists; each comes late at some turns."""
    q, k, v = (x[:, mine] for x in whole)
    prepare.prepare_into(None, k, None, Prepare(), outboxes)
    exchange.start_keys()
    if turn is not None:
        late(int(mine.start), turn + 2)
    prepare.prepare_into(None, None, v, Prepare(), outboxes)
    exchange.start_values()
    if turn is not None:
        late(int(mine.start), turn + 3)
    prepare.prepare_into(q, None, None, Prepare(), outboxes)


def key_values(rank: int, world: int, device: torch.device, case: tuple[int, ...], rounds: int, overlap: bool) -> None:
    axis = make_mesh(device, cfg=1).sequence
    layout = layout_of(axis, case, device, torch.float64)
    transport, mine = peer.Transport(), Shard(case[1], world).slice(axis.rank)
    exchange: Any = transport.key_values(axis, layout, overlap)
    for round_ in range(rounds):
        whole = payload(case, round_, device, torch.float64)
        if round_ < 20 or round_ % 25 == 0:
            late(rank, round_)
        boxes = exchange.outboxes()
        if overlap:
            write_first(whole, mine, exchange, boxes, round_ if round_ < 20 else None)
        else:
            write(whole, mine, boxes)
        q, k, v = exchange.deliver()
        if round_ < 20 or round_ % 25 == 0:
            late(rank, round_ + 1)  # reads slowly
        assert torch.equal(q, whole[0][:, mine])
        assert torch.equal(k, whole[1])
        assert torch.equal(v, whole[2])
    transport.check()


@pytest.mark.parametrize(("case", "world", "overlap"), covering(CASES, (2, 3, 4), turns=(False, True)), ids=str)
def test_kv_gather_peer_shows_all_keys_and_values_to_all(
    ranks: Pool, world: int, case: tuple[int, ...], overlap: bool
) -> None:
    ranks.run(world, key_values, case, 60, overlap)


def replayed(
    rank: int, world: int, device: torch.device, turns: list[tuple[int, bool]], rounds: int, overlap: bool = False
) -> int:
    """Replay a graph of these calls; return how often a slow reader did not read what was sent to it."""
    axis, case = make_mesh(device, cfg=1).sequence, CASES[1]
    layout = layout_of(axis, case, device, torch.float64)
    transport, mine = peer.Transport(), Shard(case[1], world).slice(axis.rank)
    exchange: Any = transport._key_values(axis, layout, overlap)  # unchecked, to open slots as a graph does
    assert all("places" in boxes.__dict__ for boxes in exchange._boxes)  # made before any capture
    wrong = 0
    for round_ in range(rounds):
        for call, (slot, first) in enumerate(turns):
            whole = payload(case, round_ * len(turns) + call, device, torch.float64)
            boxes = exchange.open(slot, first)
            if overlap:
                write_first(whole, mine, exchange, boxes)
            else:
                write(whole, mine, boxes)
            _, k, v = exchange.deliver()
            if rank == 0:
                time.sleep(0.003)
            wrong += not (torch.equal(k, whole[1]) and torch.equal(v, whole[2]))
    collect_on_axis(axis, None, None)  # wait, because a fast rank may be one call ahead
    transport.check()
    return wrong


@pytest.mark.parametrize("calls", [1, 2, 3])
@pytest.mark.parametrize("overlap", [False, True])
def test_kv_gather_peer_in_graphs_of_any_number_of_layers(ranks: Pool, calls: int, overlap: bool) -> None:
    """Use slots as a captured graph does: they alternate, and only the first call waits until both were read."""
    turns = [(call % 2, call == 0) for call in range(calls)]
    assert ranks.run(3, replayed, turns, 30, overlap) == [0, 0, 0]


def test_kv_gather_peer_negative_control_an_odd_graph_that_does_not_ask_is_noticed(ranks: Pool) -> None:
    if ranks.device == "cuda":
        pytest.skip("a GPU's reader is not slowed down by its host")
    wrong = ranks.run(3, replayed, [(0, False), (1, False), (0, False)], 30)
    assert wrong[0] > 0


def told_early(rank: int, world: int, device: torch.device) -> tuple[bool, bool]:
    """Return whether keys and values were right if a rank with late values told the others after its keys."""
    axis, case = make_mesh(device, cfg=1).sequence, CASES[1]
    exchange: Any = peer.Transport()._key_values(axis, layout_of(axis, case, device, torch.float64), overlap=True)
    whole, mine = payload(case, 1, device, torch.float64), Shard(case[1], world).slice(axis.rank)
    boxes = exchange.outboxes()
    prepare.prepare_into(None, whole[1][:, mine], None, Prepare(), boxes)
    exchange.start_keys()
    with exchange._aside.begun():
        exchange.arrived.tell()
    time.sleep(0.3 * rank)
    prepare.prepare_into(None, None, whole[2][:, mine], Prepare(), boxes)
    with exchange._aside.begun():
        exchange._spread(1)
    got = [x.clone() for x in exchange.deliver()[1:]]
    collect_on_axis(axis, None, None)
    return torch.equal(got[0], whole[1]), torch.equal(got[1], whole[2])


def test_kv_gather_peer_negative_control_telling_before_values_left_is_noticed(ranks: Pool) -> None:
    assert ranks.run(2, told_early)[0] == (True, False)
