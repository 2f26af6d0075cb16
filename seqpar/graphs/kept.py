"""`Kept`: what is kept of the last kinds of calls, each with exchanges of its own, which are freed with it.

A kind is a shape: a batch and its tokens. Each one needs buffers, and by peer memory a mapping on every rank, so that
all of a long-lived process would fill the memory. What was used longest ago is freed first, by all ranks of an axis
together, unless something on any of them still needs it, as a run whose CUDA graph reads these buffers.
When it wins: many sizes in one process. A size that comes back after it was freed costs new buffers, a few
milliseconds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar
from weakref import WeakSet

import torch

from seqpar.mesh.mesh import Axis
from seqpar.mesh.together import together
from seqpar.transports._contract import Transport

T = TypeVar("T")


@dataclass
class _Kind(Generic[T]):
    value: T
    moves: Transport
    users: WeakSet[object] = field(default_factory=WeakSet)


class Kept(Generic[T]):
    """Keeps at most `most` values, and more only while they are in use.

    axis: the ranks that ask for the same kinds in the same order.
    """

    def __init__(self, axis: Axis, most: int) -> None:
        self._axis, self._most = axis, most
        self.freed = 0  # how many values were freed to make room
        self._kinds: OrderedDict[Hashable, _Kind[T]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kinds)

    def of(self, kind: Hashable, moves: Transport, make: Callable[[Transport], T], user: object | None = None) -> T:
        """Return the value of a kind, made at its first use with a part of the transport `moves`.

        user: an object that needs the value as long as it exists; without one it may be freed by a later call of `of`.
        """
        if kind not in self._kinds:
            if len(self._kinds) >= self._most:
                moves.abandon()  # an exchange that an error left unfinished is ended by all ranks before it is freed
                self._make_room()
            moves.watch = moves.watch or self._axis.watch  # parts alone make exchanges, and `moves` is asked for errors
            part = moves.part()
            with torch.inference_mode(False):  # buffers outlive the caller's mode
                self._kinds[kind] = _Kind(make(part), part)
        self._kinds.move_to_end(kind)
        if user is not None:
            self._kinds[kind].users.add(user)
        return self._kinds[kind].value

    def release(self) -> None:
        """Free all values with their exchanges, also those in use; every rank of the axis must call this."""
        while self._kinds:
            self._kinds.popitem(last=False)[1].moves.release()

    def _make_room(self) -> None:
        """Free the half that was used longest ago of what is in use on no rank.

        Not one after the other, because calls that are CUDA graphs are captured again after each change.
        """
        in_use = [bool(kind.users) for kind in self._kinds.values()]
        anywhere = [any(uses) for uses in zip(*together(self._axis, in_use, list[bool]), strict=True)]
        idle = [kind for kind, used in zip(self._kinds, anywhere, strict=True) if not used]
        for kind in idle[: max(len(self._kinds) + 1 - self._most, len(idle) // 2)]:
            self._kinds.pop(kind).moves.release()
            self.freed += 1
