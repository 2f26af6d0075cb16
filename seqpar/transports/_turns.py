"""Wrappers that enforce the order of an exchange's calls; the exchanges of every transport are wrapped in them.

A call out of order raises the same `TurnError` with every transport, before any data moves. Without this check, peer
memory would be written while it is still read, and collectives would wait for each other forever. A check compares two
integers on the host; a CUDA graph contains nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor

from seqpar.kernels.flags import Flags
from seqpar.mesh.mesh import Axis
from seqpar.transports._exchanges import Gather, Halo, KeyValues, Rotation, ToHeads, ToTokens
from seqpar.types.outboxes import Outboxes

RELEASED = -1  # the next turn after `Transport.release`: no call has this number
NEVER = -2  # the turn of a call that this exchange does not have
END = "rotate, read to its end"
BoxesT = TypeVar("BoxesT", covariant=True)
ReadT = TypeVar("ReadT", covariant=True)


class Owner(Protocol):
    """The part of a transport that is used here.

    unfinished: the exchanges whose first call was made and whose last call was not, in the order of their first calls.
    """

    exchanges: WeakSet[Turns]
    unfinished: list[Turns]


class TurnError(RuntimeError):
    """A call of an exchange came out of order."""


class Turns:
    """Knows which call of one exchange is next. Keeps the transport, and so all memory of the exchange, alive.

    calls: the name of each call and the unchecked method behind it, in the order in which they must come.
    """

    def __init__(
        self, owner: Owner, what: str, device: torch.device, calls: tuple[tuple[str, Callable[[], object]], ...]
    ) -> None:
        self._owner, self._what, self._calls = owner, what, calls
        self._on_gpu, self._captured = device.type == "cuda", False
        self._next, self._last, self._started = 0, len(calls) - 1, False
        owner.exchanges.add(self)

    def take(self, turn: int, call: str) -> None:
        """Record that this call is made, or raise `TurnError` if another is next. A call that fails counts as made."""
        if turn != self._next:
            raise self._error(call)
        self._started = False
        if turn == 0:
            self._captured = self._capturing()
            self._owner.unfinished.append(self)
        if turn == self._last:
            self._owner.unfinished.remove(self)
            self._next = 0
        else:
            self._next = turn + 1

    def start(self, turn: int, call: str) -> None:
        """Record an optional call, which may be made once before the call of this turn, or raise `TurnError`."""
        if turn != self._next or self._started:
            raise self._error(call)
        self._started = True

    def finish(self) -> None:
        """Make the remaining calls of the exchange; see `seqpar.transports._contract.Transport.abandon`."""
        if not self._captured and self._capturing():
            raise RuntimeError(
                f"got the capture of a CUDA graph while {self._what} is unfinished after an error, expected a call "
                f"outside of a capture first, because a capture sends nothing"
            )
        while self._next > 0:
            name, make = self._calls[self._next]
            self.take(self._next, name)
            if not self._captured:  # a failed capture has sent nothing, so no rank expects the rest
                make()

    def release(self) -> None:
        """Refuse every later call."""
        self._next = RELEASED

    def _capturing(self) -> bool:
        return self._on_gpu and torch.cuda.is_current_stream_capturing()

    def _error(self, call: str) -> TurnError:
        if self._next == RELEASED:
            return TurnError(f"got {call}() of {self._what} after release(), expected a new exchange; ask for one")
        names = [name for name, _ in self._calls]
        return TurnError(
            f"got {call}() of {self._what}, expected {names[self._next]}(); make its calls in the order "
            f"{', '.join(names)}, and after an error call the transport's abandon() first"
        )


class _Way(Protocol[BoxesT, ReadT]):
    @property
    def flags(self) -> Flags | None: ...

    def outboxes(self) -> BoxesT: ...

    def deliver(self, met: bool = False) -> ReadT: ...


class WayInTurn(Generic[BoxesT, ReadT]):
    """Half of an exchange of heads, checked: `ToHeads` or `ToTokens`. made: the unchecked one of the transport."""

    def __init__(self, made: _Way[BoxesT, ReadT], name: str, turns: Turns, first: int) -> None:
        self.made, self.flags = made, made.flags
        self._turns, self._first, self._second = turns, first, first + 1
        self._names = f"{name}.outboxes", f"{name}.deliver"

    def outboxes(self) -> BoxesT:
        """See `ToHeads.outboxes`."""
        self._turns.take(self._first, self._names[0])
        return self.made.outboxes()

    def deliver(self, met: bool = False) -> ReadT:
        """See `ToHeads.deliver`."""
        self._turns.take(self._second, self._names[1])
        return self.made.deliver(met)


class ToHeadsInTurn(WayInTurn[Outboxes, tuple[Tensor, Tensor, Tensor]]):
    """A checked `ToHeads`, the first half of an exchange of heads. made: the unchecked one of the transport."""

    made: ToHeads

    def __init__(self, made: ToHeads, turns: Turns) -> None:
        super().__init__(made, "to_heads", turns, 0)

    def start(self) -> None:
        """See `ToHeads.start`."""
        self._turns.start(1, "to_heads.start")
        self.made.start()


class KeyValuesInTurn:
    """A checked `KeyValues`. made: the unchecked one of the transport."""

    def __init__(self, made: KeyValues, turns: Turns, overlap: bool) -> None:
        self.made, self.flags, self._turns = made, made.flags, turns
        self._keys, self._values, self._last = (1, 2, 3) if overlap else (NEVER, NEVER, 1)

    def outboxes(self) -> Outboxes:
        """See `KeyValues.outboxes`."""
        self._turns.take(0, "outboxes")
        return self.made.outboxes()

    def start(self) -> None:
        """See `KeyValues.start`."""
        self._turns.start(NEVER if self._last == 3 else self._last, "start")
        self.made.start()

    def start_keys(self) -> None:
        """See `KeyValues.start_keys`."""
        self._turns.take(self._keys, "start_keys")
        self.made.start_keys()

    def start_values(self) -> None:
        """See `KeyValues.start_values`."""
        self._turns.take(self._values, "start_values")
        self.made.start_values()

    def deliver(self, met: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """See `KeyValues.deliver`."""
        self._turns.take(self._last, "deliver")
        return self.made.deliver(met)


class GatherInTurn:
    """A checked `Gather`. made: the unchecked one of the transport."""

    def __init__(self, made: Gather, turns: Turns) -> None:
        self.made, self._turns = made, turns

    def outbox(self) -> Tensor:
        """See `Gather.outbox`."""
        self._turns.take(0, "outbox")
        return self.made.outbox()

    def deliver(self) -> Tensor:
        """See `Gather.deliver`."""
        self._turns.take(1, "deliver")
        return self.made.deliver()


class _Reading:
    """The blocks of a ring that are being read. It knows nothing of its `Turns`, so that both are freed at once."""

    def __init__(self, made: Rotation) -> None:
        self.made, self.blocks = made, iter(())

    def begin(self) -> None:
        self.blocks = self.made.rotate()

    def finish(self) -> None:
        blocks, self.blocks = self.blocks, iter(())
        for _ in blocks:
            pass


class RotationInTurn:
    """A checked `Rotation`. made: the unchecked one of the transport."""

    def __init__(self, made: Rotation, owner: Owner, device: torch.device) -> None:
        self.made, self._reading = made, _Reading(made)
        calls = (("outbox", made.outbox), ("rotate", self._reading.begin), (END, self._reading.finish))
        self._turns = Turns(owner, "a ring", device, calls)

    def outbox(self) -> Tensor:
        """See `Rotation.outbox`."""
        self._turns.take(0, "outbox")
        return self.made.outbox()

    def rotate(self) -> Iterator[tuple[int, Tensor]]:
        """See `Rotation.rotate`."""
        self._turns.take(1, "rotate")  # checked at the call; a generator would check only when its first block is read
        self._reading.begin()
        return self._all(self._reading.blocks)

    def _all(self, blocks: Iterator[tuple[int, Tensor]]) -> Iterator[tuple[int, Tensor]]:
        # not `yield from`, which would close `blocks` if the caller stops early; `abandon` must still pass them on
        for block in blocks:  # noqa: UP028
            yield block
        if blocks is self._reading.blocks:  # `abandon` has not replaced them
            self._turns.take(2, END)


class NoNeighbours:
    """The `Halo` of an axis of one rank."""

    def swap(self, first: Tensor | None, last: Tensor | None, before: Tensor | None, after: Tensor | None) -> None:
        """Do nothing; all four are None."""


class HaloInTurn:
    """A checked `Halo`. made: the unchecked one of the transport. It has one call, so only release ends its turns."""

    def __init__(self, made: Halo, owner: Owner, axis: Axis, capacity: int, like: Tensor) -> None:
        self.made, self._capacity, self._kind = made, capacity, (like.dtype, like.device)
        self._ends = axis.rank == 0, axis.rank == axis.size - 1
        self._turns = Turns(owner, "a halo", like.device, (("swap", lambda: None),))

    def swap(self, first: Tensor | None, last: Tensor | None, before: Tensor | None, after: Tensor | None) -> None:
        """See `Halo.swap`."""
        self._check(0, first, before)
        self._check(1, last, after)
        self._turns.take(0, "swap")
        self.made.swap(first, last, before, after)

    def _check(self, side: int, outgoing: Tensor | None, incoming: Tensor | None) -> None:
        for block in (outgoing, incoming):
            if block is None:
                continue
            if self._ends[side]:
                raise ValueError(
                    f"got a block for the rank {('before', 'after')[side]}, expected None on the "
                    f"{('first', 'last')[side]} rank of an axis, which has no such neighbour; pass None there"
                )
            kind = (block.dtype, block.device)
            if block.numel() > self._capacity or kind != self._kind or block.dim() > 5:
                raise ValueError(
                    f"got a block {tuple(block.shape)} of {block.dtype} on {block.device}, expected at most 5 dims, "
                    f"{self._capacity} elements, {self._kind[0]} on {self._kind[1]}; make a halo for the largest block"
                )


def both_ways(made: tuple[ToHeads, ToTokens], owner: Owner, device: torch.device) -> tuple[ToHeads, ToTokens]:
    """Wrap the two halves of an exchange of heads, which must alternate."""
    to_heads, to_tokens = made
    calls = (
        ("to_heads.outboxes", to_heads.outboxes),
        ("to_heads.deliver", to_heads.deliver),
        ("to_tokens.outboxes", to_tokens.outboxes),
        ("to_tokens.deliver", to_tokens.deliver),
    )
    turns = Turns(owner, "an exchange of heads", device, calls)
    return ToHeadsInTurn(to_heads, turns), WayInTurn(to_tokens, "to_tokens", turns, 2)


def key_values(made: KeyValues, owner: Owner, device: torch.device, overlap: bool) -> KeyValues:
    """Wrap an exchange of keys and values; it has the calls `start_keys` and `start_values` only with overlap."""
    starts = (("start_keys", made.start_keys), ("start_values", made.start_values)) if overlap else ()
    calls = (("outboxes", made.outboxes), *starts, ("deliver", made.deliver))
    return KeyValuesInTurn(made, Turns(owner, "an exchange of keys and values", device, calls), overlap)


def gather(made: Gather, owner: Owner, device: torch.device) -> Gather:
    """Wrap a gather."""
    return GatherInTurn(made, Turns(owner, "a gather", device, (("outbox", made.outbox), ("deliver", made.deliver))))
