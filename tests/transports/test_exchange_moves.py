"""Tests that collectives move data exactly: elements are unique, destinations are poisoned, ranks arrive at random."""

from __future__ import annotations

import random as rng
import time

import pytest
import torch
from torch import Tensor

from seqpar.kernels.prepare import prepare_into
from seqpar.mesh.shard import Shard
from seqpar.transports._layout import HeadLayout
from seqpar.transports.collective import (
    CollectiveGather,
    CollectiveRotation,
    CollectiveToHeads,
    CollectiveToTokens,
    gather,
)
from seqpar.types.protocols import Prepare
from tests.support.meshes import coded
from tests.support.meshes import mesh as make_mesh
from tests.support.pool import Pool

ROUNDS = 3
CASES = [(1, 8, 4, 4), (2, 7, 3, 3), (3, 11, 8, 2), (1, 9, 2, 1), (2, 6, 5, 5)]  # batch, tokens, heads, kv heads


def late(rank: int, round_: int) -> None:
    time.sleep(rng.Random(rank * 100 + round_).random() * 0.01)


def poison(tensor: Tensor) -> None:
    tensor.fill_(float("nan"))


def there_and_back(rank: int, world: int, device: torch.device, batch: int, tokens: int, heads: int, kv: int) -> None:
    axis, shard, dim = make_mesh(device, cfg=1).ulysses, Shard(tokens, world), 2
    layout = HeadLayout(batch, shard.sizes, heads, kv, dim, torch.float32, device)  # fp32: on GPUs kernels move it
    into, back = CollectiveToHeads(axis, layout), CollectiveToTokens(axis, layout)
    mine, q_heads, kv_heads = shard.slice(axis.rank), layout.q_slice(axis.rank), layout.kv_slice(axis.rank)
    for round_ in range(ROUNDS):
        whole = [
            coded(batch, tokens, n, dim, 7 * round_ + name).to(device, torch.float32)
            for name, n in enumerate((heads, kv, kv))
        ]
        for box in into.outboxes():
            for view in (box.q, box.k, box.v):
                assert view is not None
                poison(view)
        poison(into._move._recv)
        late(rank, round_)
        q, k, v = (x[:, mine] for x in whole)
        prepare_into(q, k, v, Prepare(), into.outboxes())
        received = into.deliver()
        for got, x, which in zip(received, whole, (q_heads, kv_heads, kv_heads), strict=True):
            assert torch.equal(got, x[:, :, which])
        poison(back._move._recv)
        poison(back._out)
        for box, part in zip(back.outboxes(), received[0].transpose(0, 1).split(shard.sizes), strict=True):
            box.copy_(part)
        assert torch.equal(back.deliver(), whole[0][:, mine])


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_ulysses_exchange_moves_every_element_to_its_place(ranks: Pool, world: int, case: tuple[int, ...]) -> None:
    if min(Shard(case[1], world).sizes) < 1:
        pytest.fail("a case needs a token for every rank")
    ranks.run(world, there_and_back, *case)


@pytest.mark.parametrize("world", [6, 8])
def test_ulysses_exchange_with_more_ranks_than_heads(ranks: Pool, world: int) -> None:
    ranks.run(world, there_and_back, 2, 13, 5, 5)


def around(rank: int, world: int, device: torch.device, tokens: int) -> None:
    axis, shard = make_mesh(device, ring=world, cfg=1).ring, Shard(tokens, world)
    whole = coded(2, tokens, 3, 2, 1).transpose(0, 1).to(device)
    rotation = CollectiveRotation(axis, shard.sizes, (2, 3, 2), whole)
    for round_ in range(ROUNDS):
        for block in rotation._blocks:
            poison(block)
        rotation.outbox().copy_(whole[shard.slice(axis.rank)] + round_)
        for step, (owner, block) in enumerate(rotation.rotate()):
            late(rank, step)
            assert owner == (axis.rank - step) % world
            assert torch.equal(block, whole[shard.slice(owner)] + round_)


@pytest.mark.parametrize("tokens", [8, 11])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_ring_rotation_shows_every_block_once(ranks: Pool, world: int, tokens: int) -> None:
    ranks.run(world, around, tokens)


def collected(rank: int, world: int, device: torch.device, tokens: int) -> None:
    axis, shard = make_mesh(device, cfg=1).sequence, Shard(tokens, world)
    whole = coded(2, tokens, 3, 2, 1).transpose(0, 1).to(device)
    exchange = CollectiveGather(axis, shard.sizes, (2, 3, 2), whole)
    for round_ in range(ROUNDS):
        poison(exchange._whole)
        late(rank, round_)
        exchange.outbox().copy_(whole[shard.slice(axis.rank)] + round_)
        assert torch.equal(exchange.deliver(), whole + round_)
    turned = whole.transpose(0, 1)
    assert torch.equal(gather(turned[:, shard.slice(axis.rank)], axis, shard.sizes, dim=1), turned)


@pytest.mark.parametrize("tokens", [8, 3, 2])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_gather_of_uneven_and_empty_blocks(ranks: Pool, world: int, tokens: int) -> None:
    ranks.run(world, collected, tokens)


def wrong_order(rank: int, world: int, device: torch.device) -> bool:
    axis, shard = make_mesh(device, cfg=1).ulysses, Shard(8, world)
    layout = HeadLayout(1, shard.sizes, 4, 4, 2, torch.float64, device)
    whole, into = coded(1, 8, 4, 2, 0).to(device), CollectiveToHeads(axis, layout)
    mine = whole[:, shard.slice(axis.rank)].flip(2)  # heads permuted before the exchange
    prepare_into(mine, mine, mine, Prepare(), into.outboxes())
    return torch.equal(into.deliver()[0], whole[:, :, layout.q_slice(axis.rank)])


def test_ulysses_negative_control_permuted_heads_are_noticed(ranks: Pool) -> None:
    assert ranks.run(2, wrong_order) == [False, False]
