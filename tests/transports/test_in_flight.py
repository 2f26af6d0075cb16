"""Tests that several exchanges of one transport may be unfinished at once, if all ranks begin and end them alike."""

from __future__ import annotations

import pytest
import torch

from seqpar.kernels.prepare import prepare_into
from seqpar.kernels.push import push
from seqpar.mesh.shard import Shard
from seqpar.transports import _folder
from seqpar.transports._layout import HeadLayout
from seqpar.types.protocols import Prepare
from tests.support.meshes import TRANSPORTS, coded
from tests.support.meshes import mesh as make_mesh
from tests.support.pool import Pool

TOKENS, HEADS, DIM, ROUNDS = 7, 3, 2, 4


def in_flight(rank: int, world: int, device: torch.device, name: str, first_in_first_out: bool) -> list[bool]:
    """Return for each round whether three exchanges, all begun before one has ended, delivered what was sent.

    In every other round one of them is given up; `abandon` ends all that are unfinished, and the next round is right.
    """
    axis, transport = make_mesh(device, ring=world, cfg=1).ring, _folder.load(name).Transport()
    shard, mine = Shard(TOKENS, world), Shard(TOKENS, world).slice(axis.rank)
    layout = HeadLayout(1, shard.sizes, HEADS, HEADS, DIM, torch.float32, device)
    keys, (there, back) = transport.key_values(axis, layout), transport.heads(axis, layout)
    blocks = transport.gather(axis, shard.sizes, (DIM,), torch.zeros((), device=device))
    right = []
    for round_ in range(ROUNDS):
        q, k, v = (
            coded(1, TOKENS, HEADS, DIM, 0).to(device, torch.float32) + 1000 * (3 * round_ + i) for i in range(3)
        )
        here = q[:, mine], k[:, mine], v[:, mine]
        prepare_into(*here, Prepare(), keys.outboxes(), None)
        keys.start()
        blocks.outbox().copy_(q[0, mine, 0])
        prepare_into(*here, Prepare(), there.outboxes(), None)
        there.start()
        if round_ % 2:
            transport.abandon()
            continue
        ends = [
            lambda k=k, v=v, here=here: all(map(torch.equal, keys.deliver(), (here[0], k, v))),
            lambda q=q: torch.equal(blocks.deliver(), q[0, :, 0]),
        ]
        right += [end() for end in (ends if first_in_first_out else ends[::-1])]
        heads = there.deliver()[0]
        boxes = back.outboxes()
        met = bool(heads.shape[2]) and push(heads, boxes, back.flags)
        right.append(torch.equal(back.deliver(met), here[0]))
    transport.check()
    transport.release()
    return right


@pytest.mark.parametrize("first_in_first_out", [True, False])
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("world", [2, 3])
def test_exchanges_in_flight_do_not_disturb_each_other(
    ranks: Pool, world: int, transport: str, first_in_first_out: bool
) -> None:
    assert ranks.run(world, in_flight, transport, first_in_first_out) == [[True] * 6] * world
