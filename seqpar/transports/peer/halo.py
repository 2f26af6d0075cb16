"""Edges swapped between neighbours through peer memory: each rank writes into an inbox in its neighbour's memory.

A swap writes both edges into the neighbours' inboxes, tells both neighbours and waits for both, and then copies what
has arrived from this rank's own inboxes to its places. Both neighbours meet at every swap, even if nothing goes one
way. When it wins: one machine whose GPUs reach each other's memory; two launches a swap, no collective, no host.

Each inbox has two slots, which alternate. Two are enough: a rank writes swap n + 2 into the slot of swap n, and before
that it has met its neighbour at swap n + 1. The neighbour joins that meeting, in the order of its stream, after it has
copied what swap n brought. So a slot is never written while it is read, although no rank waits for anyone to read.
With one slot, a fast rank would write swap n + 1 over swap n. The slot follows from the counter of swaps that the flags
keep on the device. So replays of a CUDA graph, graphs with an odd number of swaps, calls between replays and captures
that failed all use the right slot, and nothing more has to meet, which `PeerKeyValues` needs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seqpar.kernels import halo
from seqpar.kernels.flags import Flags, Late
from seqpar.mesh.mesh import Axis
from seqpar.transports.peer.arena import ALIGN, Arena, Fields
from seqpar.transports.peer.blocks import FLAG_BYTES

SIDES = (0, 1)  # the neighbour before, the neighbour after


class PeerHalo:
    """Swaps edges with the neighbours through their memory; see `seqpar.transports._exchanges.Halo`."""

    def __init__(self, axis: Axis, capacity: int, like: Tensor, late: Late, number: int) -> None:
        """Make inboxes for at most `capacity` elements, with dtype and device of `like`, on 2 ranks or more."""
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
        """See `Halo.swap`."""
        halo.send((first, last), self._there, self._flags)
        halo.take((before, after), self._here, self._flags)
