"""Blocks that travel directly between ranks: the ring's `CollectiveRotation`, and `CollectiveGather` of uneven blocks.

Both are grouped sends and receives into views of buffers made once: no size exchange, no concatenation, any sizes.
(gloo's `all_gather` refuses uneven sizes.)
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from seqpar.mesh import Axis


class CollectiveRotation:
    """Passes one block per rank around an axis; two blocks in memory, one travels while the other is read."""

    def __init__(self, axis: Axis, sizes: tuple[int, ...], shape: tuple[int, ...], like: Tensor) -> None:
        """Rank r's block is (sizes[r], *shape), with dtype and device of `like`."""
        self._axis, self._sizes = axis, sizes
        count = 1 if axis.size == 1 else 2
        self._blocks = [like.new_empty((max(sizes), *shape)) for _ in range(count)]

    def outbox(self) -> Tensor:
        """Where to write my own block before `rotate`."""
        return self._blocks[0][: self._sizes[self._axis.rank]]

    def rotate(self) -> Iterator[tuple[int, Tensor]]:
        """Yield (owner, block): my block, then those of the ranks before me. Read one before asking for the next."""
        here, there = self._blocks[0], self._blocks[-1]
        for step in range(self._axis.size):
            owner = self._owner(step)
            block = here[: self._sizes[owner]]
            last = step + 1 == self._axis.size
            moves = [] if last else self._pass_on(block, there[: self._sizes[self._owner(step + 1)]])
            yield owner, block
            for move in moves:
                move.wait()
            here, there = there, here

    def _owner(self, step: int) -> int:
        return (self._axis.rank - step) % self._axis.size

    def _pass_on(self, block: Tensor, room: Tensor) -> list[dist.Work]:
        after, before = (self._axis.rank + 1) % self._axis.size, (self._axis.rank - 1) % self._axis.size
        return dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, _bytes(block), group=self._axis.group, group_peer=after),
                dist.P2POp(dist.irecv, _bytes(room), group=self._axis.group, group_peer=before),
            ]
        )


class CollectiveGather:
    """Every rank's block on every rank, as one tensor (sum(sizes), *shape) that the blocks are received into."""

    def __init__(self, axis: Axis, sizes: tuple[int, ...], shape: tuple[int, ...], like: Tensor) -> None:
        self._axis = axis
        self._whole = like.new_empty((sum(sizes), *shape))
        self._slots = self._whole.split(sizes)
        self._moves: list[dist.Work] | None = None

    def outbox(self) -> Tensor:
        """Where to write my own block: its place in the whole."""
        return self._slots[self._axis.rank]

    def start(self) -> None:
        """Send what `outbox` holds, and receive the others' blocks, while this stream goes on."""
        peers = [(self._axis.rank + step) % self._axis.size for step in range(1, self._axis.size)]
        mine, group = _bytes(self.outbox()), self._axis.group
        moves = []
        for peer in peers:
            if mine.numel():
                moves.append(dist.P2POp(dist.isend, mine, group=group, group_peer=peer))
            if self._slots[peer].numel():
                moves.append(dist.P2POp(dist.irecv, _bytes(self._slots[peer]), group=group, group_peer=peer))
        self._moves = dist.batch_isend_irecv(moves) if moves else []

    def deliver(self) -> Tensor:
        """The whole; valid until the next call. Starts what nobody has started."""
        if self._moves is None:
            self.start()
        for move in self._moves or ():
            move.wait()
        self._moves = None
        return self._whole


def gather(block: Tensor, axis: Axis, sizes: tuple[int, ...], dim: int = 0) -> Tensor:
    """`CollectiveGather` once, along any dim, in a tensor of its own."""
    first = block.movedim(dim, 0)
    exchange = CollectiveGather(axis, sizes, tuple(first.shape[1:]), block)
    exchange.outbox().copy_(first)
    return exchange.deliver().movedim(0, dim)


def _bytes(block: Tensor) -> Tensor:
    return block.flatten().view(torch.uint8)
