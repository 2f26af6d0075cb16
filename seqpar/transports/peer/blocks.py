"""Blocks between ranks by copies into each other's memory: the guidance swap's `PeerGather`, the ring's `PeerRotation`.

See `seqpar.transports._exchanges` for what they do, `seqpar.transports.peer.exchange` for how.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from seqpar.kernels.flags import Flags, Late
from seqpar.mesh import Axis
from seqpar.shard import starts
from seqpar.transports.peer.arena import Arena, Fields

FLAG_BYTES = 8


class PeerGather:
    """Every rank's block in every rank's memory; see `seqpar.transports._exchanges.Gather`.

    For what is exchanged once a step: nothing else holds these ranks together, so it asks first whether all have begun.
    """

    def __init__(
        self, axis: Axis, sizes: tuple[int, ...], shape: tuple[int, ...], like: Tensor, late: Late, number: int
    ) -> None:
        """Rank r's block is (sizes[r], *shape), with dtype and device of `like`."""
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
        """Where to write my own block: its place in the whole."""
        return self._wholes[self._rank][self._mine]

    def deliver(self) -> Tensor:
        """The whole; valid until `outbox` is written again."""
        self._begun.meet()
        spread(self._wholes, self._rank, self._mine)
        self._arrived.meet()
        return self._wholes[self._rank]


class PeerRotation:
    """Blocks that are copied into the next rank's memory while they are read.

    Two slots a rank: one is read, one is written to. A rank tells the one before it when a slot is free, and the one
    after it when a block has arrived. On GPUs the copies have a stream of their own, so that they run under attention.
    """

    def __init__(
        self, axis: Axis, sizes: tuple[int, ...], shape: tuple[int, ...], like: Tensor, late: Late, number: int
    ) -> None:
        """Rank r's block is (sizes[r], *shape), with dtype and device of `like`."""
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
        """Where to write my own block before `rotate`."""
        return self._here[0][: self._sizes[self._rank]]

    def rotate(self) -> Iterator[tuple[int, Tensor]]:
        """Yield (owner, block): my block, then those of the ranks before me. Read one before asking for the next."""
        count = len(self._sizes)
        self._free.tell()  # all that I read in the last call: the second slot is free
        for step in range(count):
            owner = (self._rank - step) % count
            size = self._sizes[owner]
            block = self._here[step % 2][:size]
            if step + 1 < count:
                self._pass_on(block, self._there[(step + 1) % 2][:size])
            yield owner, block
            if step + 1 < count:
                self._aside.join()  # what comes next may write over the block
                if step + 2 < count:
                    self._free.tell()
                self._arrived.wait()

    def _pass_on(self, block: Tensor, room: Tensor) -> None:
        with self._aside.begun():
            self._free.wait()
            room.copy_(block)
            self._arrived.tell()


class Aside:
    """A stream of its own beside the current one, on a GPU; elsewhere everything is done in order."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def begun(self) -> Iterator[None]:
        """What is done inside waits for all that the current stream was given, and what that is given later does not
        wait for it."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """The current stream goes on after all that was done aside."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)


def flags_at(arena: Arena, axis: Axis, start: int, late: Late, number: int) -> Flags:
    """One flag of every peer in every rank's memory, mine included: it is raised as the others are."""
    flag = start + axis.rank * FLAG_BYTES
    theirs = tuple(arena.view(rank, flag, (), torch.int64) for rank in range(axis.size))
    return Flags.of(
        theirs, arena.view(axis.rank, start, (axis.size,), torch.int64), late, number, tuple(range(axis.size))
    )


def spread(wholes: list[Tensor], rank: int, mine: slice) -> None:
    """My part of my whole into everybody else's."""
    for other in after(rank, len(wholes)):
        wholes[other][mine].copy_(wholes[rank][mine])


def after(rank: int, count: int) -> list[int]:
    """The other ranks, beginning after `rank`."""
    return [(rank + step) % count for step in range(1, count)]


def slices(sizes: tuple[int, ...]) -> list[slice]:
    return [slice(start, start + size) for start, size in zip(starts(sizes), sizes, strict=True)]
