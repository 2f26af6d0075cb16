"""The base class of all transports, which make exchanges; it enforces the same rules for every transport.

A transport is one file or folder in `seqpar/transports` that exports `Transport` (a subclass of the class here),
`FACTS`, `why_not` and `why_not_tried`. The base class checks that the calls of an exchange come in order, keeps a
transport alive as long as any of its exchanges, and refuses calls of exchanges whose memory was released.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field
from typing import Self
from weakref import WeakSet

import torch
from torch import Tensor

from seqpar.mesh.mesh import Axis
from seqpar.mesh.watch import LostRankError, Watch
from seqpar.transports import _turns
from seqpar.transports._exchanges import Gather, Halo, KeyValues, Rotation, ToHeads, ToTokens
from seqpar.transports._layout import HeadLayout
from seqpar.transports._turns import TurnError, Turns

__all__ = ["Facts", "Gather", "Halo", "KeyValues", "Rotation", "ToHeads", "ToTokens", "Transport", "TurnError"]


@dataclass(frozen=True)
class Facts:
    """What the planner, the benches and the tests must know about a transport. Its file exports one as `FACTS`.

    rates: device type -> the key of its measured times in `seqpar.planner.rates.Rates.exchange`.
    unasked: device type -> why transport "auto" may choose it there; on other device types it must be chosen by name.
    preference: if "auto" may choose several transports that work, it takes the one with the highest number.
    in_place: whether a rank writes directly into the memory that its reader reads, without a copy on either side.
    bare: (axis, bytes to each rank, device) -> a function that moves these bytes and does nothing else, for a bench to
        time; None for transports in place, of which the bench times the second half of an exchange of heads.
    """

    rates: Mapping[str, str]
    unasked: Mapping[str, str] = field(default_factory=dict)
    preference: int = 0
    in_place: bool = False
    bare: Callable[[Axis, int, torch.device], Callable[[], object]] | None = None


class Transport:
    """Makes exchanges, each of which owns its buffers. Subclasses implement the methods that begin with an underscore.

    These methods return exchanges without checks (`seqpar.transports._exchanges`); only a bench that times half of an
    exchange alone may use them directly. Every rank of an axis makes the same exchanges in the same order.
    """

    def __init__(self) -> None:
        self.exchanges: WeakSet[Turns] = WeakSet()
        self.unfinished: list[Turns] = []
        self.watch: Watch | None = None

    def part(self) -> Self:
        """Return a transport whose `release` frees its own exchanges only, so that those of one use can be freed.

        The order of calls is shared: `abandon` of either ends what is unfinished in both, in reverse order.
        """
        part = copy(self)
        part.exchanges = WeakSet()
        part._separate()
        return part

    def heads(self, axis: Axis, layout: HeadLayout) -> tuple[ToHeads, ToTokens]:
        """Make an exchange from sharded tokens to sharded heads, and the one back; the two must alternate."""
        self.watch = self.watch or axis.watch
        return _turns.both_ways(self._heads(axis, layout), self, layout.device)

    def key_values(self, axis: Axis, layout: HeadLayout, overlap: bool = False) -> KeyValues:
        """Make an exchange that brings the keys and values of all tokens to every rank.

        overlap: `start_keys` and `start_values` send k and v while this rank computes the next projection.
        """
        self.watch = self.watch or axis.watch
        return _turns.key_values(self._key_values(axis, layout, overlap), self, layout.device, overlap)

    def ring(self, axis: Axis, sizes: tuple[int, ...], shape: tuple[int, ...], like: Tensor) -> Rotation:
        """Make a ring; rank r's block is (sizes[r], *shape), with dtype and device of `like`."""
        self.watch = self.watch or axis.watch
        return _turns.RotationInTurn(self._ring(axis, sizes, shape, like), self, like.device)

    def gather(self, axis: Axis, sizes: tuple[int, ...], shape: tuple[int, ...], like: Tensor) -> Gather:
        """Make a gather: every rank gets all blocks (sizes[r], *shape), with dtype and device of `like`.

        Each call makes a new gather with its own buffers.
        """
        self.watch = self.watch or axis.watch
        return _turns.gather(self._gather(axis, sizes, shape, like), self, like.device)

    def halo(self, axis: Axis, capacity: int, like: Tensor) -> Halo:
        """Make a halo: neighbours swap blocks of at most `capacity` elements, with dtype and device of `like`.

        Raises `ValueError` for a negative capacity or one over 2^31 bytes, and for a dtype of more than 8 bytes.
        """
        if capacity < 0 or capacity * like.element_size() >= 2**31 or like.element_size() > 8:
            raise ValueError(
                f"got a halo of {capacity} elements of {like.dtype}, expected 0 to 2^31 - 1 bytes of elements of at "
                f"most 8 bytes; swap several blocks, or complex numbers as real ones"
            )
        self.watch = self.watch or axis.watch
        with torch.inference_mode(False):  # buffers outlive the caller's mode
            exchange = self._halo(axis, capacity, like) if axis.size > 1 else _turns.NoNeighbours()
        return _turns.HaloInTurn(exchange, self, axis, capacity, like)

    def abandon(self) -> None:
        """Finish every exchange that an error left unfinished, so that it can be used again; otherwise do nothing.

        Exchanges are finished in reverse order of their start. This rank sends what the other ranks still expect, with
        whatever the outboxes hold, and waits for them. So call this before the next use, not where the error is caught,
        because the other ranks may be gone. An exchange whose own capture in a CUDA graph failed has sent nothing; it
        only starts again. Raises `RuntimeError` while a CUDA graph is captured, because a capture sends nothing.
        """
        while self.unfinished:
            self.unfinished[-1].finish()

    def check(self) -> None:
        """Raise `TimeoutError` if this rank waited for another in vain, and name that rank.

        A transport whose exchanges do not raise this error themselves waits for the device.
        """
        self.check_now()

    def check_now(self) -> None:
        """Raise `TimeoutError` if it is known that this rank waited in vain; this does not wait for the device."""
        if self.watch is not None:
            self.watch.raise_if_failed()
        if (error := self.late()) is not None:
            raise LostRankError(error)

    def late(self) -> str | None:
        """Return what is known of a wait in vain that the watch does not see, or None."""
        return None

    def release(self) -> None:
        """Free all buffers; every rank must call this. Exchanges made before refuse every later call.

        Parts are released by their own calls, before this one.
        """
        for turns in self.exchanges:
            turns.release()
        # in place, because parts share the list
        self.unfinished[:] = [turns for turns in self.unfinished if turns not in self.exchanges]
        self.exchanges.clear()
        self._release()

    def _heads(self, axis: Axis, layout: HeadLayout) -> tuple[ToHeads, ToTokens]:
        raise NotImplementedError

    def _key_values(self, axis: Axis, layout: HeadLayout, overlap: bool) -> KeyValues:
        raise NotImplementedError

    def _ring(self, axis: Axis, sizes: tuple[int, ...], shape: tuple[int, ...], like: Tensor) -> Rotation:
        raise NotImplementedError

    def _gather(self, axis: Axis, sizes: tuple[int, ...], shape: tuple[int, ...], like: Tensor) -> Gather:
        raise NotImplementedError

    def _halo(self, axis: Axis, capacity: int, like: Tensor) -> Halo:
        raise NotImplementedError

    def _separate(self) -> None:
        """Begin with no exchanges, as a part of the transport that this one was copied from.

        A transport without memory that outlives its exchange has nothing to do.
        """

    def _release(self) -> None:
        """Free the memory that outlives its exchange; a transport without such memory does nothing."""
