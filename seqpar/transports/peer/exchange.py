"""Exchanges without collectives: a rank writes directly into the memory of its readers.

`outboxes()` returns views of the readers' own buffers (`seqpar.transports.peer.arena`). After writing, a rank signals
all ranks and waits for them, at the end of the kernel that wrote, or in `deliver()` if plain torch wrote. There is no
send buffer, no copy on arrival, and the host does not wait.

No rank may write where another still reads. The exchange of heads needs no extra rule for that, because its two halves
alternate: before a rank writes q, k, v of the next exchange, it has met all ranks in the second half, and each rank
joins that meeting only after it has read its q, k, v. The same holds for the output. `PeerKeyValues` has no second
half, so its two slots alternate: a rank that has met all ranks for one slot knows that they have read the other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from seqpar.kernels.flags import Flags, Late
from seqpar.kernels.push import Destinations
from seqpar.mesh.mesh import Axis
from seqpar.transports._exchanges import HeadLayout
from seqpar.transports.peer.arena import Arena, Fields
from seqpar.transports.peer.blocks import FLAG_BYTES, Aside, after, flags_at, slices, spread
from seqpar.types.outboxes import Outbox, Outboxes, take_turns


class PeerHeads:
    """An exchange of heads: q, k, v to the ranks of their heads, and the output back, in one arena."""

    def __init__(self, axis: Axis, layout: HeadLayout, late: Late, number: int) -> None:
        self._layout, self.rank = layout, axis.rank
        size, wide = layout.dtype.itemsize, layout.out_dtype.itemsize
        batch, dim = layout.batch, layout.head_dim
        rows = [h + 2 * g for h, g in map(layout.counts, range(axis.size))]
        fields = Fields()
        slabs = fields.add(*(sum(layout.tokens) * batch * n * dim * size for n in rows))
        outs = fields.add(*(n * batch * layout.heads * dim * wide for n in layout.tokens))
        flags = [fields.add(axis.size * FLAG_BYTES) for _ in range(2)]
        self.arena = arena = Arena(axis, fields.nbytes, layout.device)
        shapes = [(sum(layout.tokens), batch, n, dim) for n in rows]
        self._slabs = [arena.view(rank, slabs, shape, layout.dtype) for rank, shape in enumerate(shapes)]
        shapes = [(batch, n, layout.heads, dim) for n in layout.tokens]
        self.outs = [arena.view(rank, outs, shape, layout.out_dtype) for rank, shape in enumerate(shapes)]
        self.all_flags = [flags_at(arena, axis, start, late, number + i) for i, start in enumerate(flags)]
        self.to_heads = PeerHalf(self.all_flags[0], self.outboxes(), self.heads())
        self.to_tokens = PeerHalf(self.all_flags[1], self.destinations(), self.outs[axis.rank])

    def outboxes(self) -> Outboxes:
        """Outboxes of q, k, v: for each rank its heads of the local tokens, in its slab."""
        mine = slices(self._layout.tokens)[self.rank]
        boxes = []
        for rank, slab in enumerate(self._slabs):
            h, g = self._layout.counts(rank)
            q, k, v = slab[mine].split((h, g, g), dim=2)
            boxes.append(Outbox(q, k, v, self._layout.q_slice(rank), self._layout.kv_slice(rank)))
        return Outboxes(boxes)

    def destinations(self) -> Destinations:
        """Destinations of the output: for each rank the local heads of its tokens, in its buffer."""
        heads = self._layout.q_slice(self.rank)
        views = [out[:, :, heads].transpose(0, 1) for out in self.outs]
        return Destinations(views, (self.rank + 1) % len(views))

    def heads(self) -> tuple[Tensor, Tensor, Tensor]:
        """Views of the local slab, the local heads of all tokens: q (B, L, h, D), k and v (B, L, g, D)."""
        h, g = self._layout.counts(self.rank)
        q, k, v = self._slabs[self.rank].transpose(0, 1).split((h, g, g), dim=2)
        return q, k, v


class PeerHalf:
    """One direction of an exchange of heads; nothing is copied on arrival. arrived: what `deliver` returns."""

    def __init__(self, flags: Flags, boxes: Any, arrived: Any) -> None:
        self.flags, self._boxes, self._arrived = flags, boxes, arrived
        self._started = False

    def outboxes(self) -> Any:
        self._started = False  # a capture that failed after `start` has signalled no rank
        return self._boxes

    def start(self) -> None:
        self.flags.tell()
        self._started = True

    def deliver(self, met: bool = False) -> Any:
        if not met:
            self.flags.wait() if self._started else self.flags.meet()
        return self._arrived


class PeerKeyValues:
    """Writes every rank's keys and values into every rank's memory.

    Between two captures of CUDA graphs there must be a call outside of a capture; a warm-up call is one.
    """

    def __init__(self, axis: Axis, layout: HeadLayout, late: Late, number: int) -> None:
        self._layout, self._rank, self._slot = layout, axis.rank, 0
        # k and v are separate, so that one rank's part of either is one contiguous block to copy
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
        # batch-major: attention's output follows q, and the output projection must see rows laid out as on one rank
        q_shape = (layout.batch, mine, layout.heads, layout.head_dim)
        self.q_BlHD = torch.empty(q_shape, dtype=layout.dtype, device=layout.device)
        self._boxes = take_turns([self._outboxes(slot) for slot in self._slots])
        for boxes in self._boxes:
            _ = boxes.places  # made now, because only captures use the second slot, and a capture must not copy
        self._in_capture = self._started = False

    def outboxes(self) -> Outboxes:
        """Return where to write q (a local buffer) and k and v (every rank's memory)."""
        capturing = self._layout.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        # a graph may follow any other call, also its own last one, so the first call in it waits until all ranks have
        # read both slots; a call outside of a capture always waits, because its speed matters less
        first, self._in_capture = not (capturing and self._in_capture), capturing
        return self.open(0 if first else 1 - self._slot, first)

    def open(self, slot: int, first: bool) -> Outboxes:
        """Return the outboxes of a slot; with `first`, wait until all ranks have read both slots."""
        if first:
            self._begun.meet()
        self._slot, self._started = slot, False  # a capture that failed after `start` has signalled no rank
        return self._boxes[slot]

    def start(self) -> None:
        self.arrived.tell()
        self._started = True

    def start_keys(self) -> None:
        """Do nothing: the kernel that prepares k and v writes them where they will be read."""

    def start_values(self) -> None:
        """Do nothing, like `start_keys`."""

    def deliver(self, met: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        if not met:
            self.arrived.wait() if self._started else self.arrived.meet()
        return self.read()

    def read(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the result of `deliver`, without waiting for the other ranks."""
        k, v = self.slot()[self._rank].transpose(1, 2)
        return self.q_BlHD, k, v

    def slot(self) -> list[Tensor]:
        """Keys and values of every rank in the current slot, (2, L, B, G, D) each."""
        return self._slots[self._slot]

    def readers(self) -> list[int]:
        """Ranks that get k and v from the preparing kernel, in the order of the writes.

        Each rank starts with the rank after it, so that the ranks do not all write to one rank at once.
        """
        return [*after(self._rank, len(self._slots[0])), self._rank]

    def _outboxes(self, slot: list[Tensor]) -> Outboxes:
        mine = slices(self._layout.tokens)[self._rank]
        heads = {"heads": slice(0, self._layout.heads), "kv_heads": slice(0, self._layout.kv_heads)}
        boxes = []
        for rank in self.readers():
            k, v = slot[rank][:, mine]
            boxes.append(Outbox(self.q_BlHD.transpose(0, 1) if rank == self._rank else None, k, v, **heads))
        return Outboxes(boxes)


class PeerOverlappedKeyValues(PeerKeyValues):
    """Like `PeerKeyValues`, but sends k, then v, asynchronously while later projections run.

    The preparing kernel writes to this rank's memory only, and copies on a separate stream bring k, then v, to the
    other ranks. Copy engines make these copies, so kernels keep all multiprocessors.
    """

    def __init__(self, axis: Axis, layout: HeadLayout, late: Late, number: int) -> None:
        super().__init__(axis, layout, late, number)
        self.flags = None  # a preparing kernel must not raise flags, because the copies come after it
        self._aside = Aside(layout.device)

    def readers(self) -> list[int]:
        return [self._rank]

    def start_keys(self) -> None:
        with self._aside.begun():
            self._spread(0)

    def start_values(self) -> None:
        """Copy v to the other ranks and signal them; the copies of k precede on the same stream."""
        with self._aside.begun():
            self._spread(1)
            self.arrived.tell()

    def _spread(self, part: int) -> None:
        # one rank's part is contiguous, so copy engines copy it, not a kernel
        spread([whole[part] for whole in self.slot()], self._rank, slices(self._layout.tokens)[self._rank])

    def deliver(self, met: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        self._aside.join()
        self.arrived.wait()
        return self.read()
