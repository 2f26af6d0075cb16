"""Exchanges without collectives: what a rank writes is at once where its reader reads (`seqpar.transports.peer.arena`).

`outboxes()` are views of the readers' own buffers; then all peers are told and waited for, at the end of the kernel
that writes, or by `deliver()` where plain torch wrote: no send buffer, no copy on arrival, no host. When it wins: one
machine whose GPUs reach each other's memory; against NCCL most at small blocks, where its launch and its permutes cost
more than the bytes.

Nobody may write where a peer still reads. The exchange of heads needs no rule of its own for that, because its two ways
alternate: before a rank writes q, k, v of the next exchange, it has met all peers on the way back, which each does
after it has read; and the other way round. `PeerKeyValues` has no way back, so its two slots take turns: a rank that
has met all peers for one slot knows that they have left the other.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seqpar.kernels.flags import Flags, Late
from seqpar.kernels.push import Destinations
from seqpar.mesh import Axis
from seqpar.outboxes import Outbox, Outboxes, take_turns
from seqpar.transports._layout import HeadLayout
from seqpar.transports.peer.arena import Arena, Fields
from seqpar.transports.peer.blocks import FLAG_BYTES, Aside, after, flags_at, slices, spread


class PeerHeads:
    """q, k, v to the ranks of their heads and the output back: both ways in one arena."""

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
        self.all_flags = [flags_at(arena, axis, start, late, number + i) for i, start in enumerate(flags)]
        self.to_heads, self.to_tokens = PeerToHeads(self), PeerToTokens(self)

    def outboxes(self) -> Outboxes:
        """Of q, k, v: for each rank its heads of my tokens, in its slab."""
        mine = slices(self._layout.tokens)[self._rank]
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


class PeerToHeads:
    """See `seqpar.transports.collective.exchange.CollectiveToHeads`."""

    def __init__(self, heads: PeerHeads) -> None:
        self.flags, self._boxes, self._heads = heads.all_flags[0], heads.outboxes(), heads.heads()

    def outboxes(self) -> Outboxes:
        """Where to write each rank's heads of my tokens: in its memory."""
        return self._boxes

    def deliver(self, met: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """q (B, L, h, D), k and v (B, L, g, D): strided views of my slab."""
        if not met:
            self.flags.meet()
        return self._heads


class PeerToTokens:
    """See `seqpar.transports.collective.exchange.CollectiveToTokens`; without its copy."""

    def __init__(self, heads: PeerHeads) -> None:
        self.flags, self._boxes, self._out = heads.all_flags[1], heads.destinations(), heads.out()

    def outboxes(self) -> Destinations:
        """Where to write my heads of each rank's tokens: in its memory."""
        return self._boxes

    def deliver(self, met: bool = False) -> Tensor:
        """(B, l, H, D)."""
        if not met:
            self.flags.meet()
        return self._out


class PeerKeyValues:
    """Every rank's keys and values in every rank's memory; see `seqpar.transports._exchanges.KeyValues`.

    Between two captures of graphs there must be a call outside of one, as a warm-up is.
    """

    def __init__(self, axis: Axis, layout: HeadLayout, late: Late, number: int) -> None:
        self._layout, self._rank, self._slot = layout, axis.rank, 0
        # k and v apart, so that what is copied of one of them to one rank is one block
        shape = (2, sum(layout.tokens), layout.batch, layout.kv_heads, layout.head_dim)
        fields = Fields()
        nbytes = torch.Size(shape).numel() * layout.dtype.itemsize
        slots = [fields.add(nbytes) for _ in range(2)]
        flags = [fields.add(axis.size * FLAG_BYTES) for _ in range(2)]
        self.arena = arena = Arena(axis, fields.nbytes, layout.device)
        self._slots = [[arena.view(rank, start, shape, layout.dtype) for rank in range(axis.size)] for start in slots]
        self.all_flags = [flags_at(arena, axis, start, late, number + i) for i, start in enumerate(flags)]
        self.arrived, self._begun = self.all_flags
        self.flags: Flags | None = self.arrived
        mine = layout.tokens[axis.rank]
        # batch-major, because attention's output follows it: what projects that must find rows as on one rank
        q_shape = (layout.batch, mine, layout.heads, layout.head_dim)
        self.q_BlHD = torch.empty(q_shape, dtype=layout.dtype, device=layout.device)
        self._boxes = take_turns([self._outboxes(slot) for slot in self._slots])
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

    def start_keys(self) -> None:
        """Nothing to do: the kernel that prepares k and v writes them where they will be read."""

    def start_values(self) -> None:
        """Nothing to do, as for keys."""

    def deliver(self, met: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """q (B, l, H, D) of my tokens, k and v (B, L, G, D) of all; valid until the next call of `outboxes`."""
        if not met:
            self.arrived.meet()
        return self.read()

    def read(self) -> tuple[Tensor, Tensor, Tensor]:
        """What `deliver` returns, as it is now."""
        k, v = self.slot()[self._rank].transpose(1, 2)
        return self.q_BlHD, k, v

    def slot(self) -> list[Tensor]:
        """Every rank's keys and values, those in use: (2, L, B, G, D) each."""
        return self._slots[self._slot]

    def readers(self) -> list[int]:
        """Who gets k and v as they are prepared; the rank after mine first: none is written to by all at once."""
        return [*after(self._rank, len(self._slots[0])), self._rank]

    def _outboxes(self, slot: list[Tensor]) -> Outboxes:
        mine = slices(self._layout.tokens)[self._rank]
        every = {"heads": slice(0, self._layout.heads), "kv_heads": slice(0, self._layout.kv_heads)}
        boxes = []
        for rank in self.readers():
            k, v = slot[rank][:, mine]
            boxes.append(Outbox(self.q_BlHD.transpose(0, 1) if rank == self._rank else None, k, v, **every))
        return Outboxes(boxes)


class PeerOverlappedKeyValues(PeerKeyValues):
    """The same behind other work: whoever prepares writes here only, and copies on a stream of their own take k, then v
    to the others. Copy engines make them, so that no multiprocessor is missing elsewhere."""

    def __init__(self, axis: Axis, layout: HeadLayout, late: Late, number: int) -> None:
        super().__init__(axis, layout, late, number)
        self.flags = None  # the copies come later than what a kernel writes
        self._aside = Aside(layout.device)

    def readers(self) -> list[int]:
        """Myself: the others get copies."""
        return [self._rank]

    def start_keys(self) -> None:
        """Take k to the others."""
        with self._aside.begun():
            self._spread(0)

    def start_values(self) -> None:
        """Take v to the others, and tell them: the copies of k came before on the same stream."""
        with self._aside.begun():
            self._spread(1)
            self.arrived.tell()

    def _spread(self, part: int) -> None:
        # a part of one rank is contiguous: copied as it is, not by a kernel
        spread([whole[part] for whole in self.slot()], self._rank, slices(self._layout.tokens)[self._rank])

    def deliver(self, met: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """See `PeerKeyValues.deliver`."""
        self._aside.join()
        self.arrived.wait()
        return self.read()
