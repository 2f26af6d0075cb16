"""Blocks copied into other ranks' memory: `PeerGather` for guidance branches, `PeerRotation` for rings.

`seqpar.transports._exchanges` says what they do, `seqpar.transports.peer.exchange` explains the protocol.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from seqpar.kernels.flags import Flags, Late
from seqpar.mesh.mesh import Axis
from seqpar.mesh.shard import starts
from seqpar.transports.peer.arena import Arena, Fields

FLAG_BYTES = 8


class PeerGather:
    """Copies every rank's block into every rank's memory; see `seqpar.transports._exchanges.Gather`.

    It is meant for one exchange a step: nothing else synchronises these ranks, so each call first waits until all ranks
    have begun it and have finished reading the last result.
    """

    def __init__(
        self, axis: Axis, sizes: tuple[int, ...], shape: tuple[int, ...], like: Tensor, late: Late, number: int
    ) -> None:
        """Make buffers; rank r's block is (sizes[r], *shape), with dtype and device of `like`."""
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
        """Return where to write this rank's block: its place in the whole tensor."""
        return self._wholes[self._rank][self._mine]

    def deliver(self) -> Tensor:
        """Return the whole tensor; valid until `outbox` is written again."""
        self._begun.meet()
        spread(self._wholes, self._rank, self._mine)
        self._arrived.meet()
        return self._wholes[self._rank]


class PeerRotation:
    """Copies each block into the next rank's memory while this rank reads it.

    A rank has two slots: it reads one while the rank before it writes the other. It tells the rank before it when a
    slot is free, and the rank after it when a block has arrived. On GPUs the copies run on a separate stream, while
    attention computes.
    """

    def __init__(
        self, axis: Axis, sizes: tuple[int, ...], shape: tuple[int, ...], like: Tensor, late: Late, number: int
    ) -> None:
        """Make buffers; rank r's block is (sizes[r], *shape), with dtype and device of `like`."""
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
        """Return where to write this rank's block before `rotate`."""
        return self._here[0][: self._sizes[self._rank]]

    def rotate(self) -> Iterator[tuple[int, Tensor]]:
        """Yield (owner, block): this rank's block, then those of the ranks before it; see `Rotation.rotate`."""
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
    """A separate stream beside the current one on a GPU; on other devices all work runs in order."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def begun(self) -> Iterator[None]:
        """Run the body on the separate stream, after all work that is already queued on the current stream.

        Work that is queued on the current stream later does not wait for the body.
        """
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
    """Make flags with which every rank tells every rank, itself included.

    Each rank's memory holds one flag for every rank, from byte `start` on.
    """
    flag = start + axis.rank * FLAG_BYTES
    theirs = tuple(arena.view(rank, flag, (), torch.int64) for rank in range(axis.size))
    return Flags.of(
        theirs, arena.view(axis.rank, start, (axis.size,), torch.int64), late, number, tuple(range(axis.size))
    )


def spread(wholes: list[Tensor], rank: int, mine: slice) -> None:
    """Copy this rank's part of its tensor into the tensors of all other ranks."""
    for other in after(rank, len(wholes)):
        wholes[other][mine].copy_(wholes[rank][mine])


def after(rank: int, count: int) -> list[int]:
    """Return the other ranks in order, beginning after `rank`."""
    return [(rank + step) % count for step in range(1, count)]


def slices(sizes: tuple[int, ...]) -> list[slice]:
    return [slice(start, start + size) for start, size in zip(starts(sizes), sizes, strict=True)]
