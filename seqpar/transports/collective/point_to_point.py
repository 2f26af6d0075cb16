"""Blocks sent directly between ranks: `CollectiveRotation`, `CollectiveGather` of uneven blocks, and `CollectiveHalo`.

All group sends and receives into views of buffers that are made once. They take any sizes and need neither an exchange
of sizes nor a concatenation. (gloo's `all_gather` refuses uneven sizes.)
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from seqpar.mesh.mesh import Axis
from seqpar.transports.collective.waiting import Waits


class CollectiveRotation:
    """Passes one block per rank around an axis. A rank keeps two blocks: one travels while the other is read."""

    def __init__(self, axis: Axis, sizes: tuple[int, ...], shape: tuple[int, ...], like: Tensor) -> None:
        """Make buffers; rank r's block is (sizes[r], *shape), with dtype and device of `like`."""
        self._axis, self._sizes = axis, sizes
        self._waits = Waits(axis, f"blocks of a ring of {sum(sizes)} tokens", like.device)
        count = 1 if axis.size == 1 else 2
        self._blocks = [like.new_empty((max(sizes), *shape)) for _ in range(count)]

    def outbox(self) -> Tensor:
        """Return where to write this rank's block before `rotate`."""
        return self._blocks[0][: self._sizes[self._axis.rank]]

    def rotate(self) -> Iterator[tuple[int, Tensor]]:
        """Yield (owner, block): this rank's block, then those of the ranks before it; see `Rotation.rotate`."""
        here, there = self._blocks[0], self._blocks[-1]
        for step in range(self._axis.size):
            owner = self._owner(step)
            block = here[: self._sizes[owner]]
            last = step + 1 == self._axis.size
            moves = [] if last else self._pass_on(block, there[: self._sizes[self._owner(step + 1)]])
            yield owner, block
            self._waits.end(moves)
            here, there = there, here

    def _owner(self, step: int) -> int:
        return (self._axis.rank - step) % self._axis.size

    def _pass_on(self, block: Tensor, room: Tensor) -> list[dist.Work]:
        after, before = (self._axis.rank + 1) % self._axis.size, (self._axis.rank - 1) % self._axis.size
        moves = [
            dist.P2POp(dist.isend, _bytes(block), group=self._axis.group, group_peer=after),
            dist.P2POp(dist.irecv, _bytes(room), group=self._axis.group, group_peer=before),
        ]
        return self._waits.begun(lambda: dist.batch_isend_irecv(moves))


class CollectiveGather:
    """Brings every rank's block to every rank, received into one tensor (sum(sizes), *shape)."""

    def __init__(self, axis: Axis, sizes: tuple[int, ...], shape: tuple[int, ...], like: Tensor) -> None:
        self._axis = axis
        self._waits = Waits(axis, f"a gather of {sum(sizes)} rows", like.device)
        self._whole = like.new_empty((sum(sizes), *shape))
        self._slots = self._whole.split(sizes)
        self._moves: list[dist.Work] | None = None

    def outbox(self) -> Tensor:
        """Return where to write this rank's block: its place in the whole tensor."""
        return self._slots[self._axis.rank]

    def start(self) -> None:
        """Start to send what `outbox` holds and to receive the other blocks; the current stream does not wait."""
        peers = [(self._axis.rank + step) % self._axis.size for step in range(1, self._axis.size)]
        mine, group = _bytes(self.outbox()), self._axis.group
        moves = []
        for peer in peers:
            if mine.numel():
                moves.append(dist.P2POp(dist.isend, mine, group=group, group_peer=peer))
            if self._slots[peer].numel():
                moves.append(dist.P2POp(dist.irecv, _bytes(self._slots[peer]), group=group, group_peer=peer))
        self._moves = self._waits.begun(lambda: dist.batch_isend_irecv(moves)) if moves else []

    def deliver(self) -> Tensor:
        """Return the whole tensor, valid until the next call; starts the exchange if `start` was not called."""
        if self._moves is None:
            self.start()
        moves, self._moves = self._moves, None
        self._waits.end(moves or ())
        return self._whole


class CollectiveHalo:
    """Swaps edges with the neighbours in one group of at most two sends and two receives; see `Halo`.

    Contiguous blocks are sent from and received into their own memory. Others are copied through one of four buffers,
    which are made once for the capacity. Nothing waits on the host with NCCL, and a CUDA graph can capture it.
    """

    def __init__(self, axis: Axis, capacity: int, like: Tensor) -> None:
        self._group = axis.group
        self._waits = Waits(axis, "edges of neighbours", like.device)
        self._sides = [
            (neighbour, like.new_empty(capacity), like.new_empty(capacity)) if 0 <= neighbour < axis.size else None
            for neighbour in (axis.rank - 1, axis.rank + 1)
        ]

    def swap(self, first: Tensor | None, last: Tensor | None, before: Tensor | None, after: Tensor | None) -> None:
        """Send and receive what is there; an empty block is not sent."""
        moves, late = [], []
        for side, outgoing, incoming in zip(self._sides, (first, last), (before, after), strict=True):
            if side is None:
                continue
            neighbour, send, receive = side
            if outgoing is not None and outgoing.numel():
                block = _packed(outgoing, send)
                moves.append(dist.P2POp(dist.isend, _bytes(block), group=self._group, group_peer=neighbour))
            if incoming is not None and incoming.numel():
                room = incoming if incoming.is_contiguous() else receive[: incoming.numel()].view(incoming.shape)
                moves.append(dist.P2POp(dist.irecv, _bytes(room), group=self._group, group_peer=neighbour))
                if room is not incoming:
                    late.append((incoming, room))
        self._waits.end(self._waits.begun(lambda: dist.batch_isend_irecv(moves)) if moves else ())
        for incoming, room in late:
            incoming.copy_(room)


def gather(block: Tensor, axis: Axis, sizes: tuple[int, ...], dim: int = 0) -> Tensor:
    """Gather blocks once, along any dim, into a new tensor; see `CollectiveGather`."""
    first = block.movedim(dim, 0)
    exchange = CollectiveGather(axis, sizes, tuple(first.shape[1:]), block)
    exchange.outbox().copy_(first)
    return exchange.deliver().movedim(0, dim)


def _packed(block: Tensor, buffer: Tensor) -> Tensor:
    """Return the block itself if it is contiguous, else a copy of it in the buffer."""
    return block if block.is_contiguous() else buffer[: block.numel()].view(block.shape).copy_(block)


def _bytes(block: Tensor) -> Tensor:
    return block.flatten().view(torch.uint8)
