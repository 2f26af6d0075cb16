"""Tests that exchanges of every kind move every element to its place, by every transport.

Elements are unique, also from round to round, and ranks write and read at random times, so that data that is read too
early or overwritten too early is wrong. Halos, whose blocks change from swap to swap, are in `test_halo.py`.
"""

from __future__ import annotations

import random as rng
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from seqpar.attention._streams import into as into_outboxes
from seqpar.kernels import flags, prepare, push
from seqpar.mesh.inputs import collect_on_axis
from seqpar.mesh.mesh import Axis
from seqpar.mesh.shard import Shard
from seqpar.transports import peer
from seqpar.transports._contract import Transport, load
from seqpar.transports._exchanges import HeadLayout
from seqpar.transports.collective import gather
from seqpar.types.protocols import Prepare
from tests.conftest import DEVICE
from tests.support.meshes import TRANSPORTS, coded
from tests.support.meshes import mesh as make_mesh
from tests.support.pairs import covering
from tests.support.pool import Pool

Case = tuple[int, int, int, int]
CASES: list[Case] = [(1, 8, 4, 4), (2, 7, 3, 3), (3, 11, 8, 2), (1, 9, 2, 1), (2, 6, 5, 5)]  # batch, tokens, heads, kv
KINDS = ("heads", "key_values", "overlap", "ring", "gather", "halo")
ROUNDS, DIM = {"peer": 100}, 2  # only flags synchronise ranks with peer memory
LATE_S = 0.004


def late(rank: int, round_: int) -> None:
    time.sleep(rng.Random(rank * 100 + round_).random() * LATE_S)


def layout_of(axis: Axis, case: Case, device: torch.device, dtype: torch.dtype = torch.float32) -> HeadLayout:
    batch, tokens, heads, kv = case
    return HeadLayout(batch, Shard(tokens, axis.size).sizes, heads, kv, DIM, dtype, device)


def payload(case: Case, round_: int, device: torch.device, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return q, k, v of all tokens, with different numbers in each round that fp32 holds exactly."""
    batch, tokens, heads, kv = case
    numbers = (coded(batch, tokens, n, DIM, 0) + 1000 * (name + 3 * round_) for name, n in enumerate((heads, kv, kv)))
    return [x.to(device, dtype) for x in numbers]


def nothing() -> None: ...


class Exchange:
    """An exchange of a kind, used in two parts: `begin` writes and may send, `end` reads and checks all data.

    pause: called before each time that this rank writes or reads.
    """

    def __init__(
        self,
        transport: Transport,
        kind: str,
        axis: Axis,
        device: torch.device,
        case: Case = CASES[1],
        pause: Callable[[], object] = nothing,
    ) -> None:
        self._kind, self._case, self._axis, self._device, self._pause = kind, case, axis, device, pause
        shard = Shard(case[1], axis.size)
        self._layout, self._mine = layout_of(axis, case, device), shard.slice(axis.rank)
        self._whole, self._met = list[Tensor](), False
        shape, like = (case[0], case[2], DIM), torch.zeros((), device=device)
        make: dict[str, Callable[[], Any]] = {
            "heads": lambda: transport.heads(axis, self._layout),
            "key_values": lambda: transport.key_values(axis, self._layout),
            "overlap": lambda: transport.key_values(axis, self._layout, True),
            "ring": lambda: transport.ring(axis, shard.sizes, shape, like),
            "gather": lambda: transport.gather(axis, shard.sizes, shape, like),
            "halo": lambda: transport.halo(axis, DIM, like),
        }
        self.made: Any = make[kind]()

    def begin(self, round_: int, starts: bool = False) -> None:
        """Write, and send without waiting if it `starts`. Otherwise a kernel that writes may raise the flags."""
        self._whole, self._met = payload(self._case, round_, self._device), False
        q, k, v = (x[:, self._mine] for x in self._whole)
        self._pause()
        if self._kind in ("ring", "gather"):
            self.made.outbox().copy_(q.transpose(0, 1))
        elif self._kind == "overlap":  # k is sent before v exists, and both before q exists
            boxes = self.made.outboxes()
            into_outboxes(None, k, None, Prepare(), boxes)
            self.made.start_keys()
            self._pause()
            into_outboxes(None, None, v, Prepare(), boxes)
            self.made.start_values()
            self._pause()
            into_outboxes(q, None, None, Prepare(), boxes)
        elif self._kind != "halo":
            first = self.made[0] if self._kind == "heads" else self.made
            self._met = into_outboxes(q, k, v, Prepare(), first.outboxes(), None if starts else first.flags)
            if starts:
                first.start()

    def end(self) -> bool:
        """Return whether every element arrived at its place."""
        (q, k, v), rank = self._whole, self._axis.rank
        if self._kind == "halo":
            return self._edges(int(q.flatten()[0]))
        if self._kind == "gather":
            got = self.made.deliver()
            self._pause()
            return torch.equal(got, q.transpose(0, 1))
        if self._kind == "ring":
            shard, right = Shard(self._case[1], self._axis.size), True
            for step, (owner, block) in enumerate(self.made.rotate()):  # read to its end
                self._pause()
                right &= owner == (rank - step) % self._axis.size
                right &= torch.equal(block, q[:, shard.slice(owner)].transpose(0, 1))
            return right
        if self._kind != "heads":
            got = self.made.deliver(self._met)
            self._pause()
            return all(map(torch.equal, got, (q[:, self._mine], k, v)))
        there, back = self.made
        got = there.deliver(self._met)
        self._pause()
        heads, groups = self._layout.q_slice(rank), self._layout.kv_slice(rank)
        right = all(map(torch.equal, got, (q[:, :, heads], k[:, :, groups], v[:, :, groups])))
        boxes = back.outboxes()
        met = bool(got[0].shape[2]) and push.push(got[0], boxes, back.flags)
        return torch.equal(back.deliver(met), q[:, self._mine]) and right

    def _edges(self, number: int) -> bool:
        axis, blocks = self._axis, torch.zeros(4, DIM, device=self._device)
        blocks[:2] = axis.rank + number
        ends = axis.rank > 0, axis.rank < axis.size - 1
        self.made.swap(*(block if ends[place % 2] else None for place, block in enumerate(blocks)))
        wanted = [axis.rank + step + number if end else 0 for step, end in zip((-1, 1), ends, strict=True)]
        return blocks[2:].tolist() == [[number] * DIM for number in wanted]

    def right(self, round_: int) -> bool:
        """Use the exchange once; return whether all of it was right."""
        self.begin(round_)
        return self.end()


def pause_at(rank: int, times: Iterator[int]) -> None:
    """Let a rank be late a number of times."""
    if (time_ := next(times, None)) is not None:
        late(rank, time_)


def moved(rank: int, world: int, device: torch.device, kind: str, name: str, rounds: int) -> list[tuple[Case, int]]:
    """Return the cases and rounds that were wrong, in few rounds of each case and in many of one."""
    axis, transport, wrong = make_mesh(device, ring=world, cfg=1).ring, load(name).Transport(), []
    for case in CASES:
        if kind != "gather" and case[1] < world:
            continue  # attention has a token for every rank
        count, times = (rounds, iter(range(40))) if case is CASES[1] else (3, iter(range(12)))
        pause = partial(pause_at, rank, times) if world > 1 else nothing
        exchange = Exchange(transport, kind, axis, device, case, pause)
        wrong += [(case, round_) for round_ in range(count) if not exchange.right(round_)]
    transport.check()
    transport.release()
    return wrong


@pytest.mark.parametrize(("world", "kind", "transport"), covering((1, 2, 3, 4, 8), KINDS[:-1], turns=TRANSPORTS))
def test_every_element_arrives_at_its_place(ranks: Pool, world: int, kind: str, transport: str) -> None:
    """Eight ranks are more than there are heads in most cases, and more than tokens in two."""
    if (world, transport, DEVICE) == (1, "peer", "cuda"):
        pytest.skip("one rank has no process group, which peer memory of GPUs needs; no plan has it")
    rounds = 3 if world == 8 else ROUNDS.get(transport, 10)
    assert ranks.run(world, moved, kind, transport, rounds) == [[]] * world


def gathered_once(rank: int, world: int, device: torch.device, tokens: int) -> bool:
    axis, shard = make_mesh(device, cfg=1).sequence, Shard(tokens, world)
    whole = coded(2, tokens, 3, DIM, 1).to(device)
    return torch.equal(gather(whole[:, shard.slice(rank)], axis, shard.sizes, dim=1), whole)


@pytest.mark.parametrize("tokens", [8, 2])
def test_a_gather_along_any_dim_of_uneven_and_empty_blocks(ranks: Pool, tokens: int) -> None:
    assert ranks.run(3, gathered_once, tokens) == [True] * 3


def in_flight(rank: int, world: int, device: torch.device, name: str, first_in_first_out: bool) -> list[bool]:
    """Return whether exchanges were right that all began before one ended: of two transports, and two equal ones.

    In every other round they are given up; `abandon` ends all that are unfinished, and the next round is right.
    """
    axis, right = make_mesh(device, ring=world, cfg=1).ring, list[bool]()
    transports: list[Transport] = [load(name).Transport() for _ in range(2)]
    exchanges = [
        Exchange(transport, kind, axis, device, case)
        for kind, case in zip((*KINDS[:-1], "gather"), (*CASES[1:3], *CASES[1:4], CASES[3]), strict=False)
        for transport in transports
    ]
    for round_ in range(4):
        for number, exchange in enumerate(exchanges):
            exchange.begin(20 * round_ + number, starts=True)
        if round_ % 2:
            for transport in transports:
                transport.abandon()
        else:
            right += [exchange.end() for exchange in (exchanges if first_in_first_out else exchanges[::-1])]
    for transport in transports:
        transport.check()
        transport.release()
    return right


@pytest.mark.parametrize(
    ("transport", "first_in_first_out", "world"), covering(TRANSPORTS, (True, False), turns=(2, 3))
)
def test_exchanges_in_flight_do_not_disturb_each_other(
    ranks: Pool, world: int, transport: str, first_in_first_out: bool
) -> None:
    for right in ranks.run(world, in_flight, transport, first_in_first_out):
        assert right == [True] * len(right)
        assert right


def by_kernels(rank: int, world: int, device: torch.device, case: Case, rounds: int) -> None:
    """Exchange heads by the kernels themselves, on CPUs in Triton's interpreter.

    In odd rounds the kernels that write also raise the flags and wait, in even rounds a separate kernel does.
    """
    axis, exchange = make_mesh(device, cfg=1).ulysses, peer.Transport()
    exchange.heads(axis, layout_of(axis, case, device))
    made, mine = exchange._made[0][2], Shard(case[1], world).slice(axis.rank)
    into, back = made.outboxes(), made.destinations()
    for round_ in range(rounds):
        late(rank, round_)
        q, k, v = (x[:, mine] for x in payload(case, round_, device))
        there, here = made.all_flags if round_ % 2 else (None, None)
        prepare.launch_into(q, k, v, Prepare(), into, there)
        if there is None:
            flags.launch(made.all_flags[0], True, True)
        heads = made.heads()[0]
        if heads.shape[2]:
            push.launch(heads.contiguous(), back, here)
        if here is None or not heads.shape[2]:
            flags.launch(made.all_flags[1], True, False)
            flags.launch(made.all_flags[1], False, True)
        assert torch.equal(made.outs[made.rank], q)
        assert made.all_flags[0].counts.tolist()[:3] == [round_ + 1, round_ + 1, 0]  # ready for the next launch
    exchange.check()


# on CPUs the cases have fewer tokens, because the interpreter needs milliseconds for each, and one world each
FEW = [(2, (2, 3, 3, 3)), (2, (1, 4, 2, 1)), (3, (1, 5, 4, 4)), (3, (3, 3, 8, 2))]
BY_KERNELS = [(world, case) for world in (2, 3) for case in CASES] if DEVICE == "cuda" else FEW


@pytest.mark.parametrize(("world", "case"), BY_KERNELS, ids=str)
def test_heads_by_peer_by_the_kernels_themselves(ranks: Pool, world: int, case: Case) -> None:
    ranks.run(world, by_kernels, case, 4 if DEVICE == "cuda" else 2)


# Keys and values in CUDA graphs --------------------------------------------------------------------------------


def replayed(
    rank: int, world: int, device: torch.device, kind: str, turns: list[tuple[int, bool]], rounds: int = 30
) -> int:
    """Replay a graph of these calls; return how often a slow reader did not read what was sent to it."""
    axis, transport, wrong = make_mesh(device, cfg=1).sequence, peer.Transport(), 0
    used = Exchange(transport, kind, axis, device)
    exchange = used.made = used.made.made  # unchecked, to open slots as a graph does
    assert all("places" in vars(boxes) and boxes.turns() for boxes in exchange._boxes)  # made before any capture
    for number in range(rounds * len(turns)):
        exchange.outboxes = partial(exchange.open, *turns[number % len(turns)])
        used.begin(number)
        _, k, v = exchange.deliver(used._met)
        if rank == 0:
            time.sleep(0.003)
        wrong += not (torch.equal(k, used._whole[1]) and torch.equal(v, used._whole[2]))
    collect_on_axis(axis, None, None)  # wait, because a fast rank may be one call ahead
    transport.check()
    return wrong


@pytest.mark.parametrize("calls", [1, 2, 3])
@pytest.mark.parametrize("kind", ["key_values", "overlap"])
def test_keys_and_values_by_peer_in_graphs_of_any_number_of_layers(ranks: Pool, calls: int, kind: str) -> None:
    """Use slots as a captured graph does: they alternate, and only the first call waits until both were read."""
    assert ranks.run(3, replayed, kind, [(call % 2, call == 0) for call in range(calls)]) == [0, 0, 0]


# Negative controls ---------------------------------------------------------------------------------------------


def test_negative_control_an_odd_graph_that_does_not_ask_is_noticed(ranks: Pool) -> None:
    if ranks.device == "cuda":
        pytest.skip("a GPU's reader is not slowed down by its host")
    assert ranks.run(3, replayed, "key_values", [(0, False), (1, False), (0, False)])[0] > 0


def mistaken(rank: int, world: int, device: torch.device) -> dict[str, bool]:
    """Return what is right although ranks send other heads, read before the flags, or signal before their values."""
    axis, right = make_mesh(device, cfg=1).sequence, dict[str, bool]()
    for name in TRANSPORTS:
        used = Exchange(load(name).Transport(), "heads", axis, device)
        used.begin(1)
        used._whole = [x.flip(2) for x in used._whole]
        right[f"other heads by {name}"] = used.end()
    transport: Any = peer.Transport()
    used = Exchange(transport, "heads", axis, device)
    time.sleep(0.3 * rank)
    used.begin(2, starts=True)
    early = transport._made[0][2].heads()[0].clone()
    right["read before the flags"] = torch.equal(early, used._whole[0][:, :, used._layout.q_slice(rank)])
    right["read after the flags"] = used.end()
    used = Exchange(transport, "overlap", axis, device)
    exchange, (_, k, v) = used.made.made, payload(CASES[1], 3, device)
    boxes = exchange.outboxes()
    into_outboxes(None, k[:, used._mine], None, Prepare(), boxes)
    exchange.start_keys()
    with exchange._aside.begun():
        exchange.arrived.tell()
    time.sleep(0.3 * rank)
    into_outboxes(None, None, v[:, used._mine], Prepare(), boxes)
    with exchange._aside.begun():
        exchange._spread(1)
    got = exchange.deliver()
    right["keys"], right["values signalled early"] = torch.equal(got[1], k), torch.equal(got[2], v)
    collect_on_axis(axis, None, None)
    return right


def test_negative_control_mistakes_are_noticed(ranks: Pool) -> None:
    right = ranks.run(2, mistaken)[0]
    assert {name for name, is_right in right.items() if is_right} == {"read after the flags", "keys"}
