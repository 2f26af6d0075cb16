"""What a transport is: it makes exchanges, and this base class gives every transport the same rules.

One transport = one file or folder in `seqpar/transports` that exports `Transport`, a subclass of the one here, `FACTS`,
`why_not` and `why_not_tried`. The base class checks that the calls of an exchange come in turn, keeps a transport alive
as long as one of its exchanges is, and refuses exchanges whose memory was released.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from weakref import WeakSet

import torch
from torch import Tensor

from seqpar.mesh import Axis
from seqpar.transports import _turns
from seqpar.transports._exchanges import Gather, KeyValues, Rotation, ToHeads, ToTokens
from seqpar.transports._layout import HeadLayout
from seqpar.transports._turns import TurnError, Turns

__all__ = ["Facts", "Gather", "KeyValues", "Rotation", "ToHeads", "ToTokens", "Transport", "TurnError"]
DEADLINE_S = 120.0  # how long a rank waits for a peer: longer than any kernel compiles, shorter than patience


@dataclass(frozen=True)
class Facts:
    """What the planner, the benches and the tests must know of a transport. Its file exports one as `FACTS`.

    rates: type of device -> the key of its measured times in `seqpar.planner.rates.Rates.exchange`.
    unasked: type of device -> why transport "auto" may take it there; a type that is missing: only where named.
    preference: where "auto" may take several that work, the one with the highest number is taken.
    in_place: whether what a rank writes is at once where its reader reads it, without a copy on either side.
    bare: (axis, bytes to each rank, device) -> work that moves so many bytes and does nothing else, for a bench to
        time; None: the way back of an exchange of heads is timed, which writes in place.
    """

    rates: Mapping[str, str]
    unasked: Mapping[str, str] = field(default_factory=dict)
    preference: int = 0
    in_place: bool = False
    bare: Callable[[Axis, int, torch.device], Callable[[], object]] | None = None


class Transport:
    """Makes exchanges; each owns its buffers. Subclasses implement the methods that begin with an underscore.

    Those return exchanges without checks (`seqpar.transports._exchanges`); only a bench that times one way of an
    exchange alone may use such a one. Every rank of an axis makes the same exchanges in the same order.
    """

    def __init__(self) -> None:
        self.exchanges: WeakSet[Turns] = WeakSet()
        self.unfinished: list[Turns] = []

    def heads(self, axis: Axis, layout: HeadLayout) -> tuple[ToHeads, ToTokens]:
        """Tokens sharded to heads sharded, and back; the two ways alternate."""
        return _turns.both_ways(self._heads(axis, layout), self, layout.device)

    def key_values(self, axis: Axis, layout: HeadLayout, overlap: bool = False) -> KeyValues:
        """Keys and values of all tokens on every rank.

        overlap: k and v are sent by `start_keys` and `start_values` while this rank computes what comes next.
        """
        return _turns.key_values(self._key_values(axis, layout, overlap), self, layout.device, overlap)

    def ring(self, axis: Axis, sizes: tuple[int, ...], shape: tuple[int, ...], like: Tensor) -> Rotation:
        """Rank r's block is (sizes[r], *shape), with dtype and device of `like`."""
        return _turns.RotationInTurn(self._ring(axis, sizes, shape, like), self, like.device)

    def gather(self, axis: Axis, sizes: tuple[int, ...], shape: tuple[int, ...], like: Tensor) -> Gather:
        """Every rank's (sizes[r], *shape) on every rank, with dtype and device of `like`. Each call makes another."""
        return _turns.gather(self._gather(axis, sizes, shape, like), self, like.device)

    def abandon(self) -> None:
        """End every exchange that an error left unfinished, so that it can be used again; else do nothing.

        The exchange that began last is ended first. What other ranks still expect is sent, with whatever the outboxes
        hold, and waited for: so call this before the next use and not where the error is caught, because the other
        ranks may be gone. RuntimeError in the capture of a CUDA graph, where nothing is sent; an exchange whose own
        capture failed has sent nothing, and is only begun anew.
        """
        while self.unfinished:
            self.unfinished[-1].finish()

    def check(self) -> None:
        """Raise `TimeoutError` on a rank that waited for another in vain, and name that. Waits for the device.

        A transport whose exchanges raise by themselves has nothing to check.
        """

    def release(self) -> None:
        """Free all buffers, together with the other ranks. Exchanges made before refuse every later call."""
        for turns in self.exchanges:
            turns.release()
        self.exchanges.clear()
        self.unfinished.clear()
        self._release()

    def _heads(self, axis: Axis, layout: HeadLayout) -> tuple[ToHeads, ToTokens]:
        raise NotImplementedError

    def _key_values(self, axis: Axis, layout: HeadLayout, overlap: bool) -> KeyValues:
        raise NotImplementedError

    def _ring(self, axis: Axis, sizes: tuple[int, ...], shape: tuple[int, ...], like: Tensor) -> Rotation:
        raise NotImplementedError

    def _gather(self, axis: Axis, sizes: tuple[int, ...], shape: tuple[int, ...], like: Tensor) -> Gather:
        raise NotImplementedError

    def _release(self) -> None:
        """Free what does not go with its exchange; nothing, where there is none."""
