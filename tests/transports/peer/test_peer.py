"""Tests that exchanges by peer memory put every element in its place, with only flags to synchronise the ranks."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor

from seqpar import DistributedDiT, Guidance, sample
from seqpar.kernels import flags, prepare, push
from seqpar.loop.loop import draw_noise
from seqpar.mesh.inputs import collect_on_axis
from seqpar.mesh.mesh import Axis
from seqpar.mesh.shard import Shard
from seqpar.transports import peer
from seqpar.transports._layout import HeadLayout
from seqpar.types.outboxes import Outboxes
from seqpar.types.protocols import Prepare
from tests.conftest import DEVICE
from tests.graphs.test_distributed import local
from tests.loop.test_sampling import scheduler
from tests.support.meshes import coded, counted_calls, mesh_for
from tests.support.meshes import mesh as make_mesh
from tests.support.pool import Pool
from tests.support.tiny import diffusers_dit
from tests.transports.test_exchange_moves import late

CASES = [(1, 8, 4, 4), (2, 7, 3, 3), (3, 11, 8, 2), (1, 9, 2, 1)]  # batch, tokens, heads, kv heads
DIM, REPLAYS = 2, 500


def layout_of(axis: Axis, case: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> HeadLayout:
    batch, tokens, heads, kv = case
    return HeadLayout(batch, Shard(tokens, axis.size).sizes, heads, kv, DIM, dtype, device)


def payload(case: tuple[int, ...], round_: int, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Return q, k, v of all tokens, with different numbers in each round that fp32 holds exactly."""
    batch, tokens, heads, kv = case
    numbers = (coded(batch, tokens, n, DIM, 0) + 1000 * (name + 3 * round_) for name, n in enumerate((heads, kv, kv)))
    return [x.to(device, dtype) for x in numbers]


def settle(device: torch.device) -> None:
    """Wait until all queued work is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def write(whole: list[Tensor], mine: slice, outboxes: Outboxes) -> None:
    q, k, v = (x[:, mine] for x in whole)
    prepare.prepare_into(q, k, v, Prepare(), outboxes)


def there_and_back(
    rank: int, world: int, device: torch.device, case: tuple[int, ...], rounds: int, poison: bool
) -> None:
    axis = make_mesh(device, cfg=1).ulysses
    layout = layout_of(axis, case, device, torch.float64)
    transport, shard = peer.Transport(), Shard(case[1], world)
    into, back = transport.heads(axis, layout)
    mine, q_heads, kv_heads = shard.slice(axis.rank), layout.q_slice(axis.rank), layout.kv_slice(axis.rank)
    for round_ in range(rounds):
        whole = payload(case, round_, device, torch.float64)
        if poison:
            exchange: Any = transport._made[0][2]
            for mine_ in (exchange._slabs[axis.rank], exchange.outs[axis.rank]):
                mine_.fill_(float("nan"))
            settle(device)
            collect_on_axis(axis, None, None)  # other ranks may write from here on
        if round_ < 20 or round_ % 25 == 0:
            late(rank, round_)
        write(whole, mine, into.outboxes())
        received = into.deliver()
        for got, x, which in zip(received, whole, (q_heads, kv_heads, kv_heads), strict=True):
            assert torch.equal(got, x[:, :, which])
        boxes = back.outboxes()
        if received[0].shape[2]:
            push.push(received[0], boxes)
        assert torch.equal(back.deliver(), whole[0][:, mine])
    transport.check()


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_ulysses_peer_moves_every_element_to_its_place(ranks: Pool, world: int, case: tuple[int, ...]) -> None:
    ranks.run(world, there_and_back, case, 3, True)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_ulysses_peer_keeps_its_places_through_many_exchanges(ranks: Pool, world: int) -> None:
    """Only flags synchronise the ranks, and some are late: no rank may read or write too early."""
    ranks.run(world, there_and_back, CASES[1], REPLAYS, False)


def around(rank: int, world: int, device: torch.device, tokens: int, rounds: int) -> None:
    axis, shard = make_mesh(device, ring=world, cfg=1).ring, Shard(tokens, world)
    whole = coded(2, tokens, 3, DIM, 1).transpose(0, 1).to(device)
    transport = peer.Transport()
    rotation = transport.ring(axis, shard.sizes, (2, 3, DIM), whole)
    for round_ in range(rounds):
        rotation.outbox().copy_(whole[shard.slice(axis.rank)] + round_)
        for step, (owner, block) in enumerate(rotation.rotate()):
            if round_ < 20:
                late(rank, step + 7 * round_)
            assert owner == (axis.rank - step) % world
            assert torch.equal(block, whole[shard.slice(owner)] + round_)
    transport.check()


@pytest.mark.parametrize("tokens", [8, 11])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_ring_peer_shows_every_block_once(ranks: Pool, world: int, tokens: int) -> None:
    ranks.run(world, around, tokens, 100)


def by_kernels(rank: int, world: int, device: torch.device, case: tuple[int, ...], rounds: int) -> None:
    """Do what `there_and_back` does with the kernels themselves, on CPUs in Triton's interpreter.

    In odd rounds the kernels that write also raise the flags and wait, in even rounds a separate kernel does.
    """
    axis = make_mesh(device, cfg=1).ulysses
    layout = layout_of(axis, case, device, torch.float32)
    exchange: Any = peer.Transport()
    exchange.heads(axis, layout)
    made, mine = exchange._made[0][2], Shard(case[1], world).slice(axis.rank)
    into, back = made.outboxes(), made.destinations()
    for round_ in range(rounds):
        late(rank, round_)
        q, k, v = (x[:, mine] for x in payload(case, round_, device, torch.float32))
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
def test_ulysses_peer_by_the_kernels_themselves(ranks: Pool, world: int, case: tuple[int, ...]) -> None:
    pytest.importorskip("triton")
    ranks.run(world, by_kernels, case, 4 if DEVICE == "cuda" else 2)


def two_engines(rank: int, world: int, device: torch.device) -> None:
    """Use exchanges of two transports alternately on one axis: neither sees the other's flags or memory."""
    axis, case = make_mesh(device, cfg=1).sequence, CASES[1]
    layout = layout_of(axis, case, device, torch.float64)
    transports = [peer.Transport(), peer.Transport()]
    exchanges = [transport.key_values(axis, layout) for transport in transports]
    mine = Shard(case[1], world).slice(axis.rank)
    for round_ in range(8):
        for which, exchange in enumerate(exchanges):
            whole = payload(case, 2 * round_ + which, device, torch.float64)
            late(rank, round_)
            write(whole, mine, exchange.outboxes())
            assert torch.equal(exchange.deliver()[1], whole[1])
    for transport in transports:
        transport.release()


def test_peer_engines_side_by_side(ranks: Pool) -> None:
    ranks.run(3, two_engines)


def no_talk(rank: int, world: int, device: torch.device) -> dict[str, int]:
    axis = make_mesh(device, cfg=1).sequence
    exchange = peer.Transport().key_values(axis, layout_of(axis, CASES[0], device, torch.float64))
    return counted_calls(lambda: (exchange.outboxes(), exchange.deliver()))


def test_a_peer_exchange_calls_no_collective(ranks: Pool) -> None:
    assert ranks.run(2, no_talk) == [{}, {}]


def too_early(rank: int, world: int, device: torch.device) -> bool:
    """Return whether data read without waiting for the flags was already right."""
    axis, case = make_mesh(device, cfg=1).ulysses, CASES[0]
    transport: Any = peer.Transport()
    into, _ = transport.heads(axis, layout_of(axis, case, device, torch.float64))
    whole, mine = payload(case, 1, device, torch.float64), Shard(case[1], world).slice(axis.rank)
    if rank == 1:
        time.sleep(0.3)
    write(whole, mine, into.outboxes())
    early = transport._made[0][2].heads()[1].clone()
    late_k = into.deliver()[1]
    kv_heads = slice(2 * axis.rank, 2 * axis.rank + 2)
    assert torch.equal(late_k, whole[1][:, :, kv_heads])
    return torch.equal(early, late_k)


def test_peer_negative_control_reading_before_the_flags_is_noticed(ranks: Pool) -> None:
    assert ranks.run(2, too_early)[0] is False


def gathered(rank: int, world: int, device: torch.device, rounds: int) -> None:
    """Gather blocks with slow readers, where only this exchange synchronises the ranks."""
    axis, sizes = make_mesh(device, cfg=1).sequence, tuple(range(1, world + 1))
    like = torch.zeros((), dtype=torch.float32, device=device)
    exchange = peer.Transport().gather(axis, sizes, (2, 3), like)
    whole = coded(1, sum(sizes), 2, 3, 0)[0].to(device, torch.float32)
    for round_ in range(rounds):
        late(rank, round_)
        exchange.outbox().copy_((whole + round_)[_own(sizes, rank)])
        got = exchange.deliver()
        late(rank, round_ + 1)
        assert torch.equal(got, whole + round_)


def _own(sizes: tuple[int, ...], rank: int) -> slice:
    return slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))


@pytest.mark.parametrize("world", [2, 3])
def test_gather_peer_of_uneven_blocks(ranks: Pool, world: int) -> None:
    ranks.run(world, gathered, 40)


def sampled(rank: int, world: int, device: torch.device, strategy: str, cfg: int, transport: str) -> Tensor:
    model = diffusers_dit().to(device, torch.bfloat16 if device.type == "cuda" else torch.float64)
    dit = DistributedDiT(model, mesh_for(strategy, world, device, cfg), strategy, local(device), transport)
    noise = draw_noise((2, 4, 6, 10), torch.Generator().manual_seed(0))
    labels = {"class_labels": torch.tensor([3, 4])}
    latents = sample(dit, scheduler(), noise, labels, steps=3, guidance=Guidance(3.0))
    assert dit.transport.name == transport
    dit.release()
    return latents


@pytest.mark.parametrize(
    ("world", "strategy", "cfg"),
    [(2, "ulysses", 2), (3, "ulysses", 1), (3, "ring", 1), (4, "usp", 1), (4, "kv_gather", 2), (2, "kv_first", 1)],
)
def test_latents_have_the_same_bits_by_either_transport(ranks: Pool, world: int, strategy: str, cfg: int) -> None:
    truth = ranks.run(world, sampled, strategy, cfg, "collective")
    got = ranks.run(world, sampled, strategy, cfg, "peer")
    assert all(torch.equal(a, truth[0]) for a in (*truth, *got))
