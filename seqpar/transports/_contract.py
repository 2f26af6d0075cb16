"""The base class of all transports; it enforces the same rules for every transport.

A transport is one file or folder in `seqpar/transports` that exports `Transport` (a subclass of the class here),
`FACTS`, `why_not` and `why_not_tried`. The base class checks the order of an exchange's calls, keeps a transport alive
as long as any of its exchanges, and rejects calls of exchanges whose memory was released.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Self
from weakref import WeakSet

import torch
from torch import Tensor

import seqpar.transports
from seqpar.mesh.mesh import Axis
from seqpar.mesh.watch import LostRankError, Watch
from seqpar.transports._exchanges import Gather, Halo, HeadLayout, KeyValues, Rotation, ToHeads, ToTokens
from seqpar.transports._turns import InTurn, RotationInTurn, TurnError, Turns
from seqpar.types.plugins import plugin, plugins

__all__ = ["Facts", "Gather", "Halo", "KeyValues", "Rotation", "ToHeads", "ToTokens", "Transport", "TurnError"]


@dataclass(frozen=True)
class Facts:
    """Facts about a transport for the planner, benches and tests; its file exports one as `FACTS`.

    rates: device type -> the key of its measured times in `seqpar.planner.rates.Rates.exchange`.
    unasked: device type -> why transport "auto" may choose it there; on other device types it must be chosen by name.
    preference: of several transports that work, "auto" takes the one with the highest number.
    in_place: a rank writes directly into the memory that its reader reads, without a copy on either side.
    bare: (axis, bytes to each rank, device) -> a function that moves these bytes and nothing else, for a bench to time;
        None for transports in place, of which the bench times the second half of an exchange of heads.
    """

    rates: Mapping[str, str]
    unasked: Mapping[str, str] = field(default_factory=dict)
    preference: int = 0
    in_place: bool = False
    bare: Callable[[Axis, int, torch.device], Callable[[], object]] | None = None


def names() -> tuple[str, ...]:
    return tuple(plugins(seqpar.transports))


def load(name: str) -> ModuleType:
    """Import a transport; raises ValueError with all names if there is none of this name."""
    return plugin(seqpar.transports, name, "transport")


def facts(name: str) -> Facts:
    return load(name).FACTS


def unasked(device_type: str) -> list[str]:
    """Return the transports that "auto" may choose for devices of this type, best first.

    A device type that no transport mentions is treated like a CPU.
    """
    facts_of = {name: facts(name) for name in names()}
    listed = any(device_type in candidate.unasked for candidate in facts_of.values())
    chosen = [name for name, of in facts_of.items() if (device_type if listed else "cpu") in of.unasked]
    return sorted(chosen, key=lambda name: -facts_of[name].preference)


class Transport:
    """Makes exchanges, each of which owns its buffers. Collective: all ranks of an axis make the same ones in order.

    Subclasses implement the methods that begin with an underscore. These return exchanges without checks
    (`seqpar.transports._exchanges`); only a bench that times half of an exchange may use them directly.
    """

    def __init__(self) -> None:
        self.exchanges: WeakSet[Turns] = WeakSet()
        self.unfinished: list[Turns] = []
        self.watch: Watch | None = None

    def part(self) -> Self:
        """Return a transport whose `release` frees its own exchanges only.

        The order of calls is shared: `abandon` of either ends all unfinished exchanges of both, in reverse order.
        """
        part = copy(self)
        part.exchanges = WeakSet()
        part._separate()
        return part

    def heads(self, axis: Axis, layout: HeadLayout) -> tuple[ToHeads, ToTokens]:
        """Make an exchange from sharded tokens to sharded heads, and the one back; the two must alternate."""
        self.watch, methods = self.watch or axis.watch, ("outboxes", "deliver")
        ways = dict(zip(("to_heads.", "to_tokens."), self._heads(axis, layout), strict=True))
        calls = {way + method: getattr(made, method) for way, made in ways.items() for method in methods}
        turns = Turns(self, "an exchange of heads", layout.device, calls)
        checked: Any = (InTurn(made, turns, methods, way, "to_heads.deliver") for way, made in ways.items())
        return tuple(checked)

    def key_values(self, axis: Axis, layout: HeadLayout, overlap: bool = False) -> KeyValues:
        """Make an exchange that brings the keys and values of all tokens to every rank.

        overlap: `start_keys` and `start_values` send k and v while this rank computes the next projection.
        """
        self.watch = self.watch or axis.watch
        made, methods = self._key_values(axis, layout, overlap), ("outboxes", "start_keys", "start_values", "deliver")
        calls = {name: getattr(made, name) for name in methods if overlap or not name.startswith("start")}
        turns = Turns(self, "an exchange of keys and values", layout.device, calls)
        checked: Any = InTurn(made, turns, methods, start=None if overlap else "deliver")
        return checked

    def ring(self, axis: Axis, sizes: tuple[int, ...], shape: tuple[int, ...], like: Tensor) -> Rotation:
        """Make a ring; rank r's block is (sizes[r], *shape), with dtype and device of `like`."""
        self.watch = self.watch or axis.watch
        return RotationInTurn(self._ring(axis, sizes, shape, like), self, like.device)

    def gather(self, axis: Axis, sizes: tuple[int, ...], shape: tuple[int, ...], like: Tensor) -> Gather:
        """Make a gather: every rank gets all blocks (sizes[r], *shape), with dtype and device of `like`."""
        self.watch = self.watch or axis.watch
        made = self._gather(axis, sizes, shape, like)
        calls = {"outbox": made.outbox, "deliver": made.deliver}
        checked: Any = InTurn(made, Turns(self, "a gather", like.device, calls), tuple(calls))
        return checked

    def halo(self, axis: Axis, capacity: int, like: Tensor) -> Halo:
        """Make a halo: neighbours swap blocks of at most `capacity` elements, with dtype and device of `like`.

        The axis has two ranks or more. Raises ValueError for 2^31 bytes or more.
        """
        if capacity * like.element_size() >= 2**31:
            raise ValueError(f"got edges of {capacity} elements of {like.dtype}, expected less than 2^31 bytes")
        self.watch = self.watch or axis.watch
        with torch.inference_mode(False):  # buffers outlive the caller's mode
            made = self._halo(axis, capacity, like)
        checked: Any = InTurn(made, Turns(self, "a halo", like.device, {"swap": made.swap}), ("swap",))
        return checked

    def abandon(self) -> None:
        """Finish every exchange that an error left unfinished, so that it can be used again; otherwise do nothing.

        This rank sends what the other ranks still expect, with the current contents of the outboxes, and waits for
        them. So call this before the next use, not where the error is caught: the other ranks may have exited. An
        exchange whose own capture in a CUDA graph failed has sent nothing and only starts again. Raises RuntimeError
        while a CUDA graph is captured.
        """
        while self.unfinished:
            self.unfinished[-1].finish()

    def check(self) -> None:
        """Raise TimeoutError with the late rank if a wait of this rank timed out.

        A transport whose exchanges do not raise this error themselves waits for the device.
        """
        self.check_now()

    def check_now(self) -> None:
        """Raise TimeoutError if a wait of this rank is known to have timed out; does not wait for the device."""
        if self.watch is not None:
            self.watch.raise_if_failed()
        if (error := self.late()) is not None:
            raise LostRankError(error)

    def late(self) -> str | None:
        """Return the error of a wait that timed out and that the watchdog does not see, or None."""
        return None

    def release(self) -> None:
        """Free all buffers; later calls of their exchanges raise. Collective. Release parts before."""
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
        """Drop the exchanges of the transport that this part was copied from. For memory that outlives an exchange."""

    def _release(self) -> None:
        """Free memory that outlives its exchange."""
