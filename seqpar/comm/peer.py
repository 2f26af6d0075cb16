"""The exchanges without collectives: what a rank writes is at once where its reader reads (see `seqpar.comm.arena`).

`outboxes()` are views of the readers' own buffers, `deliver()` tells all peers and waits for all of them: no send
buffer, no copy on arrival, no host. When it wins: one machine whose GPUs reach each other's memory; against NCCL most
at small blocks, where its launch and its permutes cost more than the bytes.

Nobody may write where a peer still reads. Ulysses needs no rule for that: to begin the next exchange into the heads a
rank must have met all peers on the way back, which each does after it has read; and the other way round. `ToAll` has
nothing on the way back, so its two slots take turns: who has met all peers for one slot knows that they have left the
other.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import torch
from torch import Tensor

from seqpar.comm.arena import Arena, Fields
from seqpar.comm.exchange import HeadLayout
from seqpar.kernels.flags import Flags, Late
from seqpar.kernels.push import Destinations
from seqpar.mesh import Axis
from seqpar.protocols import Outbox, Outboxes
from seqpar.shard import starts

FLAG_BYTES = 8


class PeerHeads:
    """q, k, v to their heads' ranks and the output back: both ways in one arena. See `seqpar.comm.exchange`."""

    def __init__(self, axis: Axis, layout: HeadLayout, late: Late, number: int) -> None:
        self._layout, self._rank = layout, axis.rank
        size, (batch, dim) = layout.dtype.itemsize, (layout.batch, layout.head_dim)
        rows = [h + 2 * g for h, g in map(layout.counts, range(axis.size))]
        fields = Fields()
        slabs = fields.add(*(sum(layout.tokens) * batch * n * dim * size for n in rows))
        outs = fields.add(*(n * batch * layout.heads * dim * size for n in layout.tokens))
        flags = [fields.add(axis.size * FLAG_BYTES) for _ in range(2)]
        self.arena = arena = Arena(axis, fields.nbytes, layout.device)
        shapes = [(sum(layout.tokens), batch, n, dim) for n in rows]
        self._slabs = [arena.view(rank, slabs, shape, layout.dtype) for rank, shape in enumerate(shapes)]
        shapes = [(batch, n, layout.heads, dim) for n in layout.tokens]
        self._outs = [arena.view(rank, outs, shape, layout.dtype) for rank, shape in enumerate(shapes)]
        self.flags = [_flags(arena, axis, start, late, number + i) for i, start in enumerate(flags)]
        self.into, self.back = IntoHeads(self), BackToTokens(self)

    def outboxes(self) -> Outboxes:
        """Of q, k, v: for each rank its heads of my tokens, in its slab."""
        mine = _slices(self._layout.tokens)[self._rank]
        boxes = []
        for rank, slab in enumerate(self._slabs):
            h, g = self._layout.counts(rank)
            q, k, v = slab[mine].split((h, g, g), dim=2)
            boxes.append(Outbox(q, k, v, self._layout.q_slice(rank), self._layout.kv_slice(rank)))
        return Outboxes(boxes)

    def destinations(self) -> Destinations:
        """Of the output: for each rank my heads of its tokens, in its output."""
        heads = self._layout.q_slice(self._rank)
        views = [out[:, :, heads].transpose(0, 1) for out in self._outs]
        return Destinations(views, (self._rank + 1) % len(views))

    def heads(self) -> tuple[Tensor, Tensor, Tensor]:
        """My heads of all tokens, as my slab holds them: q (B, L, h, D), k and v (B, L, g, D)."""
        h, g = self._layout.counts(self._rank)
        q, k, v = self._slabs[self._rank].transpose(0, 1).split((h, g, g), dim=2)
        return q, k, v

    def out(self) -> Tensor:
        """(B, l, H, D): the output of my tokens."""
        return self._outs[self._rank]


class IntoHeads:
    """See `seqpar.comm.exchange.ToHeads`."""

    def __init__(self, heads: PeerHeads) -> None:
        self._flags, self._boxes, self._heads = heads.flags[0], heads.outboxes(), heads.heads()

    def outboxes(self) -> Outboxes:
        """Where to write each rank's heads of my tokens: in its memory."""
        return self._boxes

    def deliver(self) -> tuple[Tensor, Tensor, Tensor]:
        """q (B, L, h, D), k and v (B, L, g, D): strided views of my slab."""
        self._flags.meet()
        return self._heads


class BackToTokens:
    """See `seqpar.comm.exchange.ToTokens`; without its copy."""

    def __init__(self, heads: PeerHeads) -> None:
        self._flags, self._boxes, self._out = heads.flags[1], heads.destinations(), heads.out()

    def outboxes(self) -> Destinations:
        """Where to write my heads of each rank's tokens: in its memory."""
        return self._boxes

    def deliver(self) -> Tensor:
        """(B, l, H, D)."""
        self._flags.meet()
        return self._out


class PeerToAll:
    """Every rank's keys and values in every rank's memory. See `seqpar.comm.exchange.ToAll`.

    Between two captures of graphs there must be a call outside of one, as a warm-up is.
    """

    def __init__(self, axis: Axis, layout: HeadLayout, late: Late, number: int) -> None:
        self._layout, self._rank, self._slot = layout, axis.rank, 0
        shape = (sum(layout.tokens), layout.batch, 2 * layout.kv_heads, layout.head_dim)
        fields = Fields()
        nbytes = torch.Size(shape).numel() * layout.dtype.itemsize
        slots = [fields.add(nbytes) for _ in range(2)]
        flags = [fields.add(axis.size * FLAG_BYTES) for _ in range(2)]
        self.arena = arena = Arena(axis, fields.nbytes, layout.device)
        self._slots = [[arena.view(rank, start, shape, layout.dtype) for rank in range(axis.size)] for start in slots]
        self._arrived, self._begun = self.flags = [
            _flags(arena, axis, start, late, number + i) for i, start in enumerate(flags)
        ]
        mine = layout.tokens[axis.rank]
        # batch-major, because attention's output follows it: what projects that must find rows as on one rank
        q_shape = (layout.batch, mine, layout.heads, layout.head_dim)
        self.q_BlHD = torch.empty(q_shape, dtype=layout.dtype, device=layout.device)
        self._boxes = [self._outboxes(slot) for slot in self._slots]
        for boxes in self._boxes:
            _ = boxes.places  # made now: calls of the host never use the second slot, and a graph must not copy
        self._in_capture = False

    def outboxes(self) -> Outboxes:
        """Where to write: q to my own buffer, k and v into every rank's."""
        capturing = self._layout.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        # a graph begins after whatever ran before, its own last call too, so its first call makes sure that all have
        # left both slots; calls of the host are not for speed, and do so always
        first, self._in_capture = not (capturing and self._in_capture), capturing
        return self.open(0 if first else 1 - self._slot, first)

    def open(self, slot: int, first: bool) -> Outboxes:
        """The outboxes of a slot; `first`: once all ranks have left both."""
        if first:
            self._begun.meet()
        self._slot = slot
        return self._boxes[slot]

    def deliver(self) -> tuple[Tensor, Tensor, Tensor]:
        """q (B, l, H, D) of my tokens, k and v (B, L, G, D) of all; valid until the next call of `outboxes`."""
        self._arrived.meet()
        groups = self._layout.kv_heads
        k, v = self._slots[self._slot][self._rank].transpose(0, 1).split((groups, groups), dim=2)
        return self.q_BlHD, k, v

    def _outboxes(self, slot: list[Tensor]) -> Outboxes:
        mine, groups = _slices(self._layout.tokens)[self._rank], self._layout.kv_heads
        every = {"heads": slice(0, self._layout.heads), "kv_heads": slice(0, groups)}
        boxes = []
        for step in range(1, len(slot) + 1):  # the rank after mine first: no rank is written to by all at once
            rank = (self._rank + step) % len(slot)
            k, v = slot[rank][mine].split((groups, groups), dim=2)
            boxes.append(Outbox(self.q_BlHD.transpose(0, 1) if rank == self._rank else None, k, v, **every))
        return Outboxes(boxes)


class PeerGather:
    """Every rank's block in every rank's memory. See `seqpar.comm.point_to_point.Gather`.

    For what is exchanged once a step: nothing else holds these ranks together, so it asks first whether all have begun.
    """

    def __init__(
        self,
        axis: Axis,
        sizes: tuple[int, ...],
        shape: tuple[int, ...],
        like: Tensor,
        late: Late,
        number: int,
    ) -> None:
        """Rank r's block is (sizes[r], *shape), with dtype and device of `like`."""
        self._rank, fields = axis.rank, Fields()
        whole = (sum(sizes), *shape)
        start = fields.add(torch.Size(whole).numel() * like.element_size())
        flags = [fields.add(axis.size * FLAG_BYTES) for _ in range(2)]
        self.arena = arena = Arena(axis, fields.nbytes, like.device)
        self._wholes = [arena.view(rank, start, whole, like.dtype) for rank in range(axis.size)]
        self._mine = _slices(sizes)[axis.rank]
        self._begun, self._arrived = self.flags = [
            _flags(arena, axis, start, late, number + i) for i, start in enumerate(flags)
        ]

    def outbox(self) -> Tensor:
        """Where to write my own block: its place in the whole."""
        return self._wholes[self._rank][self._mine]

    def deliver(self) -> Tensor:
        """The whole; valid until `outbox` is written again."""
        self._begun.meet()
        for step in range(1, len(self._wholes)):
            self._wholes[(self._rank + step) % len(self._wholes)][self._mine].copy_(self.outbox())
        self._arrived.meet()
        return self._wholes[self._rank]


class PeerRotation:
    """Blocks that are copied into the next rank's memory while they are read. See `seqpar.comm.point_to_point`.

    Two slots a rank: one is read, one is written to. A rank tells the one before it when a slot is free, and the one
    after it when a block has arrived. On GPUs the copies have a stream of their own, so that they run under attention.
    """

    def __init__(
        self,
        axis: Axis,
        sizes: tuple[int, ...],
        shape: tuple[int, ...],
        like: Tensor,
        late: Late,
        number: int,
    ) -> None:
        """Rank r's block is (sizes[r], *shape), with dtype and device of `like`."""
        self._rank, self._sizes = axis.rank, sizes
        before, after = (axis.rank - 1) % axis.size, (axis.rank + 1) % axis.size
        whole, fields = (max(sizes), *shape), Fields()
        slots = [fields.add(torch.Size(whole).numel() * like.element_size()) for _ in range(2)]
        flags = [fields.add(FLAG_BYTES) for _ in range(2)]
        self.arena = arena = Arena(axis, fields.nbytes, like.device)
        self._here, self._there = ([arena.view(rank, start, whole, like.dtype) for start in slots]
                                   for rank in (axis.rank, after))  # fmt: skip
        self._arrived, self._free = self.flags = [
            Flags.of(
                (arena.view(told, start, (), torch.int64),),
                arena.view(axis.rank, start, (1,), torch.int64),
                late,
                number + i,
                (heard,),
            )
            for i, (start, told, heard) in enumerate(zip(flags, (after, before), (before, after), strict=True))
        ]
        self._copies = torch.cuda.Stream(like.device) if like.is_cuda else None

    def outbox(self) -> Tensor:
        """Where to write my own block before `rotate`."""
        return self._here[0][: self._sizes[self._rank]]

    def rotate(self) -> Iterator[Tensor]:
        """Yield my block, then those of the ranks before me. Read a block before asking for the next."""
        count = len(self._sizes)
        self._free.tell()  # all that I read in the last call: the second slot is free
        for step in range(count):
            size = self._sizes[(self._rank - step) % count]
            block = self._here[step % 2][:size]
            if step + 1 < count:
                self._pass_on(block, self._there[(step + 1) % 2][:size])
            yield block
            if step + 1 < count:
                self._passed_on()
                if step + 2 < count:
                    self._free.tell()
                self._arrived.wait()

    def _pass_on(self, block: Tensor, room: Tensor) -> None:
        if self._copies is not None:
            self._copies.wait_stream(torch.cuda.current_stream())
        with nullcontext() if self._copies is None else torch.cuda.stream(self._copies):
            self._free.wait()
            room.copy_(block)
            self._arrived.tell()

    def _passed_on(self) -> None:
        """What comes next may write over the block."""
        if self._copies is not None:
            torch.cuda.current_stream().wait_stream(self._copies)


def _flags(arena: Arena, axis: Axis, start: int, late: Late, number: int) -> Flags:
    """One flag of every peer in every rank's memory, mine included: it is raised as the others are."""
    flag = start + axis.rank * FLAG_BYTES
    theirs = tuple(arena.view(rank, flag, (), torch.int64) for rank in range(axis.size))
    return Flags.of(theirs, arena.view(axis.rank, start, (axis.size,), torch.int64), late, number,
                    tuple(range(axis.size)))  # fmt: skip


def _slices(sizes: tuple[int, ...]) -> list[slice]:
    return [slice(start, start + size) for start, size in zip(starts(sizes), sizes, strict=True)]
