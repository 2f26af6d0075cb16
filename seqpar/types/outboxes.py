"""Outboxes: the views into which kernels write the data that an exchange sends, and the address of every head in them.

Letters: l tokens on this rank, B batch rows, D head dim; `seqpar.types.protocols` lists the others.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd

import torch
from torch import Tensor

from seqpar.mesh.shard import starts


@dataclass(frozen=True)
class Outbox:
    """The views for q, k and v of some heads of this rank's tokens that one reader receives, (l, B, heads, D) each.

    A view of None is not sent to that reader (`kv_gather` sends no q). `heads` and `kv_heads` are the ranges of heads.
    """

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None
    heads: slice
    kv_heads: slice


@dataclass(frozen=True)
class Places:
    """The addresses of every head in some outboxes, for a kernel that writes all of them.

    table[part, copy, head] = (address, token stride, batch stride), int64 on the device of the outboxes, with strides
    in elements; part 0, 1, 2 is q, k, v. A head for several readers has several copies; an address of 0 marks an unused
    entry. alignment: a number of bytes, at most 16, that divides all addresses and strides.
    """

    table: Tensor
    dtype: torch.dtype
    alignment: int


class Outboxes(tuple[Outbox, ...]):
    """The outboxes of one slot of an exchange: made once with its buffers, so that no call computes addresses."""

    turns: weakref.ref[Slots] | None = None
    """The outboxes of all slots of the exchange, which keeps them, if several take turns; set by `take_turns`."""

    @cached_property
    def places(self) -> Places:
        """Return the table for kernels; its first use copies to the device, so use it before a CUDA graph's capture."""
        return _places(self)

    def split(self, sizes: Sequence[int]) -> tuple[Outboxes, ...]:
        """The outboxes of neighbouring parts of this rank's tokens, `sizes` tokens each; the parts cover all tokens.

        A single part is this object itself. The parts are made once, for all slots that take turns and with
        their tables, so that a call during a capture of a CUDA graph copies nothing from the host.
        """
        key, slots = tuple(sizes), self.turns and self.turns()
        if len(key) == 1:  # not kept: an object that held itself would keep its buffers until it is found as garbage
            return self._split(key)
        if key not in self._splits:
            for slot in slots or (self,):
                slot._splits[key] = slot._split(key)
        return self._splits[key]

    @cached_property
    def _splits(self) -> dict[tuple[int, ...], tuple[Outboxes, ...]]:
        return {}

    def _split(self, sizes: tuple[int, ...]) -> tuple[Outboxes, ...]:
        total = next(len(view) for box in self for view in (box.q, box.k, box.v) if view is not None)
        if sum(sizes) != total:
            raise ValueError(f"got streams of {sizes} tokens on this rank, expected {total} tokens together")
        parts = []
        for start, size in zip(starts(sizes), sizes, strict=True):
            part = self if len(sizes) == 1 else Outboxes(_narrowed(box, start, size) for box in self)
            if size:
                _ = part.places
            parts.append(part)
        return tuple(parts)


class Slots(list[Outboxes]):
    """The outboxes of all slots of one exchange, which must keep this object."""


def take_turns(slots: Sequence[Outboxes]) -> Slots:
    """Set `turns` of each of these outboxes to all slots of their exchange, and return them (see `Outboxes.split`)."""
    taken = Slots(slots)
    for slot in taken:
        slot.turns = weakref.ref(taken)
    return taken


def _narrowed(box: Outbox, start: int, size: int) -> Outbox:
    q, k, v = (None if view is None else view[start : start + size] for view in (box.q, box.k, box.v))
    return Outbox(q, k, v, box.heads, box.kv_heads)


def _places(boxes: Outboxes) -> Places:
    places_of: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    views = [view for box in boxes for view in (box.q, box.k, box.v) if view is not None]
    for box in boxes:
        for part, (view, heads) in enumerate(((box.q, box.heads), (box.k, box.kv_heads), (box.v, box.kv_heads))):
            for index, head in enumerate(range(heads.start, heads.stop) if view is not None else ()):
                assert view is not None
                place = (view[:, :, index].data_ptr(), view.stride(0), view.stride(1))
                places_of.setdefault((part, head), []).append(place)
    dtype = views[0].dtype
    if any(view.dtype != dtype or view.stride(-1) != 1 for view in views):
        raise ValueError("outboxes must have one dtype and contiguous head dims")
    copies, heads = max(map(len, places_of.values()), default=1), max((head + 1 for _, head in places_of), default=1)
    table, alignment = torch.zeros(3, copies, heads, 3, dtype=torch.int64), 16
    for (part, head), places in places_of.items():
        table[part, : len(places), head] = torch.tensor(places)
        for address, *strides in places:
            alignment = gcd(alignment, address, *(stride * dtype.itemsize for stride in strides))
    return Places(table.to(views[0].device), dtype, alignment)
