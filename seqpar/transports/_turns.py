"""Checks the order of an exchange's calls, for the exchanges of every transport.

A call out of order raises the same `TurnError` with every transport, before any data moves. Without this check, peer
memory would be written while it is still read, and collectives would wait for each other forever. A check runs on the
host only; a CUDA graph contains nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor

from seqpar.transports._exchanges import Rotation

RELEASED = -1  # the next call after `Transport.release`: none
END = "rotate, read to its end"


class Owner(Protocol):
    """A transport. unfinished: exchanges between their first and their last call, in the order of their first calls."""

    exchanges: WeakSet[Turns]
    unfinished: list[Turns]


class TurnError(RuntimeError):
    """A call of an exchange came out of order."""


class Turns:
    """Knows which call of one exchange is next. Keeps the transport, and so all memory of the exchange, alive.

    calls: name -> unchecked method, in the order in which they must come.
    """

    def __init__(self, owner: Owner, what: str, device: torch.device, calls: Mapping[str, Callable[..., Any]]) -> None:
        self._owner, self._what, self._calls, self._names = owner, what, calls, tuple(calls)
        self._on_gpu, self._captured = device.type == "cuda", False
        self._next, self._started = 0, False
        owner.exchanges.add(self)

    def take(self, call: str) -> None:
        """Record a call, also one that fails; raise TurnError if another one is next."""
        if self._next == RELEASED or call != self._names[self._next]:
            raise self._error(call)
        self._started = False
        if self._next == 0:
            self._captured = self._capturing()
            self._owner.unfinished.append(self)
        self._next += 1
        if self._next == len(self._names):
            self._owner.unfinished.remove(self)
            self._next = 0

    def start(self, call: str, before: str | None) -> None:
        """Record an optional call, which may be made once before the call `before`, or raise TurnError."""
        if self._next == RELEASED or self._started or before != self._names[self._next]:
            raise self._error(call)
        self._started = True

    def finish(self) -> None:
        """Make the remaining calls of the exchange, for `seqpar.transports._contract.Transport.abandon`."""
        if not self._captured and self._capturing():
            raise RuntimeError(
                f"{self._what} is unfinished after an error and a CUDA graph is captured, which sends nothing; make "
                f"one call outside of a capture first"
            )
        while self._next > 0:
            name = self._names[self._next]
            self.take(name)
            if not self._captured:  # a failed capture has sent nothing, so no rank expects the rest
                self._calls[name]()

    def release(self) -> None:
        self._next = RELEASED

    def _capturing(self) -> bool:
        return self._on_gpu and torch.cuda.is_current_stream_capturing()

    def _error(self, call: str) -> TurnError:
        if self._next == RELEASED:
            return TurnError(f"{call}() of {self._what} was called after release(); make a new exchange")
        return TurnError(
            f"got {call}() of {self._what}, expected {self._names[self._next]}(); make its calls in the order "
            f"{', '.join(self._names)}, and after an error call the transport's abandon() first"
        )


class InTurn:
    """An exchange with checked calls: it has these methods of the unchecked exchange `made`.

    Methods are attributes, so that nothing refers back to this object: memory of an exchange that is dropped must not
    wait until Python collects cycles. prefix: of the turns' names. start: the turn before which the optional `start`
    comes; None if the exchange has none.
    """

    def __init__(
        self, made: Any, turns: Turns, methods: Sequence[str], prefix: str = "", start: str | None = None
    ) -> None:
        self.made, self.flags = made, getattr(made, "flags", None)
        checks: dict[str, Callable[..., None]] = dict.fromkeys(methods, turns.take)
        if hasattr(made, "start"):
            checks["start"] = partial(turns.start, before=start)
        for method, check in checks.items():
            setattr(self, method, partial(_checked, partial(check, prefix + method), made, method))


def _checked(check: Callable[[], None], made: Any, method: str, *args: Any, **kwargs: Any) -> Any:
    check()
    return getattr(made, method)(*args, **kwargs)


class RotationInTurn:
    """A checked `Rotation`. made: the unchecked one of the transport."""

    def __init__(self, made: Rotation, owner: Owner, device: torch.device) -> None:
        reading: list[Iterator[tuple[int, Tensor]]] = [iter(())]

        def begin() -> None:
            reading[0] = made.rotate()

        def finish() -> None:
            blocks, reading[0] = reading[0], iter(())
            for _ in blocks:
                pass

        self.made, self._reading, self._begin = made, reading, begin
        self._turns = Turns(owner, "a ring", device, {"outbox": made.outbox, "rotate": begin, END: finish})

    def outbox(self) -> Tensor:
        self._turns.take("outbox")
        return self.made.outbox()

    def rotate(self) -> Iterator[tuple[int, Tensor]]:
        self._turns.take("rotate")  # checked at the call; a generator would check only when its first block is read
        self._begin()
        return self._all(self._reading[0])

    def _all(self, blocks: Iterator[tuple[int, Tensor]]) -> Iterator[tuple[int, Tensor]]:
        # not `yield from`, which would close `blocks` if the caller stops early; `abandon` must still pass them on
        for block in blocks:  # noqa: UP028
            yield block
        if blocks is self._reading[0]:  # `abandon` has not replaced them
            self._turns.take(END)
