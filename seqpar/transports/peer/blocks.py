"""Blocks written into other ranks' memory: `PeerGather` for guidance branches, `PeerRotation` for rings, `PeerHalo`.

The protocol is in `seqpar.transports.peer.exchange`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from seqpar.kernels import halo
from seqpar.kernels.flags import Flags, Late
from seqpar.mesh.mesh import Axis
from seqpar.mesh.shard import starts
from seqpar.transports.peer.arena import ALIGN, Arena, Fields

FLAG_BYTES = 8


class PeerGather:
    """Copies every rank's block into every rank's memory.

    For one exchange per step: nothing else synchronizes these ranks, so each call first waits until all ranks have
    entered it and have read the last result.
    """

    def __init__(
        self, axis: Axis, sizes: tuple[int, ...], shape: tuple[int, ...], like: Tensor, late: Late, number: int
    ) -> None:
        self._rank, fields = axis.rank, Fields()
        whole = (sum(sizes), *shape)
        start = fields.add(torch.Size(whole).numel() * like.element_size())
        flags = [fields.add(axis.size * FLAG_BYTES) for _ in range(2)]
        self.arena = arena = Arena(axis, fields.nbytes, like.device)
        self._wholes = [arena.view(rank, start, whole, like.dtype) for rank in range(axis.size)]
        self._mine = slices(sizes)[axis.rank]
        self._begun, self._arrived = self.all_flags = [
            flags_at(arena, axis, start, late, number + i) for i, start in enumerate(flags)
        ]

    def outbox(self) -> Tensor:
        return self._wholes[self._rank][self._mine]

    def deliver(self) -> Tensor:
        self._begun.meet()
        spread(self._wholes, self._rank, self._mine)
        self._arrived.meet()
        return self._wholes[self._rank]


class PeerRotation:
    """Copies each block into the next rank's memory while this rank reads it.

    A rank has two slots: it reads one while the rank before it writes the other. It signals the rank before it when a
    slot is free, and the rank after it when a block is written. On GPUs copies run on a separate stream.
    """

    def __init__(
        self, axis: Axis, sizes: tuple[int, ...], shape: tuple[int, ...], like: Tensor, late: Late, number: int
    ) -> None:
        self._rank, self._sizes = axis.rank, sizes
        before, after = (axis.rank - 1) % axis.size, (axis.rank + 1) % axis.size
        whole, fields = (max(sizes), *shape), Fields()
        slots = [fields.add(torch.Size(whole).numel() * like.element_size()) for _ in range(2)]
        flags = [fields.add(FLAG_BYTES) for _ in range(2)]
        self.arena = arena = Arena(axis, fields.nbytes, like.device)
        self._here, self._there = (
            [arena.view(rank, start, whole, like.dtype) for start in slots] for rank in (axis.rank, after)
        )
        self._arrived, self._free = self.all_flags = [
            Flags.of(
                (arena.view(told, start, (), torch.int64),),
                arena.view(axis.rank, start, (1,), torch.int64),
                late,
                number + i,
                (heard,),
            )
            for i, (start, told, heard) in enumerate(zip(flags, (after, before), (before, after), strict=True))
        ]
        self._aside = Aside(like.device)

    def outbox(self) -> Tensor:
        return self._here[0][: self._sizes[self._rank]]

    def rotate(self) -> Iterator[tuple[int, Tensor]]:
        count = len(self._sizes)
        self._free.tell()  # this rank has read all blocks of the last call, so its second slot is free
        for step in range(count):
            owner = (self._rank - step) % count
            size = self._sizes[owner]
            block = self._here[step % 2][:size]
            if step + 1 < count:
                self._pass_on(block, self._there[(step + 1) % 2][:size])
            yield owner, block
            if step + 1 < count:
                self._aside.join()  # the block must be copied before later work may write over it
                if step + 2 < count:
                    self._free.tell()
                self._arrived.wait()

    def _pass_on(self, block: Tensor, room: Tensor) -> None:
        with self._aside.begun():
            self._free.wait()
            room.copy_(block)
            self._arrived.tell()


class Aside:
    """A separate stream on a GPU; on other devices all work runs in order."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def begun(self) -> Iterator[None]:
        """Run the body on the separate stream, after all work that is already queued on the current stream."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Make the current stream wait for all work on the separate stream."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)


def flags_at(arena: Arena, axis: Axis, start: int, late: Late, number: int) -> Flags:
    """Make flags by which every rank signals every rank, itself included; they begin at byte `start` of the arena."""
    flag = start + axis.rank * FLAG_BYTES
    theirs = tuple(arena.view(rank, flag, (), torch.int64) for rank in range(axis.size))
    return Flags.of(
        theirs, arena.view(axis.rank, start, (axis.size,), torch.int64), late, number, tuple(range(axis.size))
    )


def spread(wholes: list[Tensor], rank: int, mine: slice) -> None:
    """Copy the local part of the local tensor into the tensors of all other ranks."""
    for other in after(rank, len(wholes)):
        wholes[other][mine].copy_(wholes[rank][mine])


def after(rank: int, count: int) -> list[int]:
    return [(rank + step) % count for step in range(1, count)]


def slices(sizes: tuple[int, ...]) -> list[slice]:
    return [slice(start, start + size) for start, size in zip(starts(sizes), sizes, strict=True)]


SIDES = (0, 1)  # the neighbour before, the neighbour after


class PeerHalo:
    """Swaps edges with the neighbours through inboxes in their memory: two launches, no collective, no host.

    A swap writes both edges into the neighbours' inboxes, signals both neighbours and waits for both, even if one
    direction is empty, and then copies from the local inboxes to the destinations.

    Each inbox has two slots, which alternate. Two are enough: a rank writes swap n + 2 into the slot of swap n, and
    before that it has met its neighbour at swap n + 1, which the neighbour joins, in the order of its stream, after it
    has copied the edges of swap n. The slot follows from the counter of swaps that the flags keep on the device. So
    replays of CUDA graphs with any number of swaps, calls between them and captures that failed use the right slot.
    """

    def __init__(self, axis: Axis, capacity: int, like: Tensor, late: Late, number: int) -> None:
        fields, room = Fields(), -(-max(1, capacity * like.element_size()) // ALIGN) * ALIGN
        inboxes, flags = fields.add(4 * room), fields.add(2 * FLAG_BYTES)
        self.arena = arena = Arena(axis, fields.nbytes, like.device)
        neighbours = {side: axis.rank + step for side, step in zip(SIDES, (-1, 1), strict=True)}
        sides = [side for side in SIDES if 0 <= neighbours[side] < axis.size]

        def inbox(rank: int, side: int) -> Tensor:
            return arena.view(rank, inboxes + 2 * side * room, (2, room), torch.uint8)

        # to the rank before, this rank is the one after, and the other way round
        there = [inbox(neighbours[side], 1 - side) if side in sides else None for side in SIDES]
        here = [inbox(axis.rank, side) if side in sides else None for side in SIDES]
        self._there, self._here = (there[0], there[1]), (here[0], here[1])
        theirs = [arena.view(neighbours[side], flags + (1 - side) * FLAG_BYTES, (), torch.int64) for side in sides]
        mine = arena.view(axis.rank, flags + sides[0] * FLAG_BYTES, (len(sides),), torch.int64)
        self._flags = Flags.of(tuple(theirs), mine, late, number, tuple(neighbours[side] for side in sides))
        self.all_flags = [self._flags]

    def swap(self, first: Tensor | None, last: Tensor | None, before: Tensor | None, after: Tensor | None) -> None:
        halo.send((first, last), self._there, self._flags)
        halo.take((before, after), self._here, self._flags)
