"""`Bodies`: chooses what computes each call of a transformer, and says why where the native model cannot.

The native model is the faster one, but it knows only the arguments of its family; whatever it refuses is computed by
the transformer's own modules (the generic way), from the same weights.
When it wins: it costs nothing; a transformer without a native model has the generic body alone.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from seqpar.adapter.body import Body


@dataclass(frozen=True)
class Native:
    """A native body with `why_not`: the reason why it cannot compute a call with these arguments, or None."""

    body: Body
    why_not: Callable[[Mapping[str, Any]], str | None]


class Bodies:
    """The bodies of one transformer. native: the preferred one. generic: builds the other one, which is then kept.

    say: prints the reason of a choice on one rank.
    """

    def __init__(self, native: Native | None, generic: Callable[[], Body], say: Callable[[str], None]) -> None:
        self._native, self._build, self._say = native, generic, say
        self._generic = generic() if native is None else None
        self._told: set[str] = set()

    def of(self, arguments: Mapping[str, Any]) -> Body:
        """Return the body that computes a call with these arguments, which are equal on all ranks."""
        reason = None if self._native is None else self._native.why_not(arguments)
        if self._native is not None and reason is None:
            return self._native.body
        if reason is not None and reason not in self._told:
            self._told.add(reason)
            self._say(f"a call is computed by the transformer's own modules, because {reason}")
        self._generic = self._generic or self._build()
        return self._generic

    def state(self) -> Hashable:
        """Return the states of all bodies that were built; see `Body.state`."""
        return tuple(body.state() for body in self._all)

    def check_delivered(self) -> None:
        """See `Body.check_delivered`."""
        for body in self._all:
            body.check_delivered()

    def release(self) -> None:
        """See `Body.release`."""
        for body in self._all:
            body.release()

    @property
    def _all(self) -> list[Body]:
        return [body for body in (self._native and self._native.body, self._generic) if body is not None]
