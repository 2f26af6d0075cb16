"""`ExchangeCache`: the exchanges of one sharded model, made at the first call of a kind and cached for later calls.

An exchange owns buffers, and over peer memory a mapping on every rank, so only the last kinds of calls keep theirs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor

from seqpar.mesh.inputs import collect_on_axis
from seqpar.mesh.mesh import Axis, Mesh
from seqpar.mesh.shard import Tokens
from seqpar.mesh.watch import drain
from seqpar.planner.plan import Plan, load_local, load_strategy, load_transport
from seqpar.transports._contract import Gather, Transport
from seqpar.types.protocols import Attend

T = TypeVar("T")


@dataclass
class _Entry(Generic[T]):
    value: T
    moves: Transport
    users: WeakSet[object] = field(default_factory=WeakSet)


class IdleCache(Generic[T]):
    """A cache of at most `most` values, or more while they are in use.

    axis: the ranks that request the same kinds in the same order.
    """

    def __init__(self, axis: Axis, most: int) -> None:
        self._axis, self._most = axis, most
        self.freed = 0  # how many values were evicted
        self._kinds: OrderedDict[Hashable, _Entry[T]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kinds)

    def of(self, kind: Hashable, moves: Transport, make: Callable[[Transport], T], user: object | None = None) -> T:
        """Return the value of a kind, made at its first use with a part of the transport `moves`.

        user: an object that needs the value as long as it exists; without one a later call of `of` may evict it.
        """
        if kind not in self._kinds:
            if len(self._kinds) >= self._most:
                moves.abandon()  # an exchange that an error left unfinished is ended by all ranks before it is freed
                self._make_room()
            moves.watch = moves.watch or self._axis.watch  # parts alone make exchanges, and `moves` is asked for errors
            part = moves.part()
            with torch.inference_mode(False):  # buffers outlive the caller's mode
                self._kinds[kind] = _Entry(make(part), part)
        self._kinds.move_to_end(kind)
        if user is not None:
            self._kinds[kind].users.add(user)
        return self._kinds[kind].value

    def release(self) -> None:
        """Free all values with their exchanges, also those in use. Collective over the axis."""
        while self._kinds:
            self._kinds.popitem(last=False)[1].moves.release()

    def _make_room(self) -> None:
        # evict the least recently used half of the entries that are idle on all ranks; in batches, because each
        # eviction forces graphs to be captured again
        in_use = [bool(kind.users) for kind in self._kinds.values()]
        anywhere = [any(uses) for uses in zip(*collect_on_axis(self._axis, in_use, list[bool]), strict=True)]
        idle = [kind for kind, used in zip(self._kinds, anywhere, strict=True) if not used]
        for kind in idle[: max(len(self._kinds) + 1 - self._most, len(idle) // 2)]:
            self._kinds.pop(kind).moves.release()
            self.freed += 1


ATTENDS = 16  # cached attentions: new sizes must not fill the memory
GATHERS = 32  # cached gathers of an axis; a run has one or two per stream of its state


class ExchangeCache:
    """The exchanges of a plan on a mesh. All ranks that share tokens request the same ones in the same order."""

    def __init__(self, mesh: Mesh, plan: Plan) -> None:
        self.mesh, self.plan, self.releases = mesh, plan, 0
        self._moves = load_transport(plan.transport.name)
        self._attends = IdleCache[Attend](mesh.sequence, ATTENDS)
        # ranks of a sequence axis may make separate calls; the ranks of its replica exchange branches together
        self._gathers = {mesh.sequence.name: IdleCache[Gather](mesh.sequence, GATHERS)}

    def __deepcopy__(self, memo: object) -> ExchangeCache:
        raise ValueError(
            "A transformer that runs on several ranks cannot be copied: its exchanges belong to one transformer. "
            "Release it first, or copy it before it is parallelized"
        )

    def __len__(self) -> int:
        return len(self._attends) + sum(map(len, self._gathers.values()))

    @property
    def axis(self) -> Axis:
        """The sequence axis."""
        return self.mesh.sequence

    @property
    def state(self) -> Hashable:
        """A key that changes when any exchange was freed, after which no graph that read it may be replayed."""
        return self.releases, self._attends.freed, *(gathers.freed for gathers in self._gathers.values())

    def attend(self, batch: int, tokens: Tokens, local: str | None = None, user: object | None = None) -> Attend:
        """Return the sharded attention for this batch and split of tokens; it owns its buffers.

        local: the local attention, if it is not the plan's. user: an object that needs the attention as long as it
        exists, as a run whose CUDA graph reads the buffers; without one it may be freed after `ATTENDS` others.
        """
        build, core = load_strategy(self.plan.strategy.name).build, local or self.plan.local.name
        return self._attends.of(
            (batch, tokens, core), self._moves, lambda part: build(self.mesh, tokens, load_local(core), part), user
        )

    def gathered(
        self, use: Hashable, axis: Axis, local: Tensor, sizes: tuple[int, ...] | None = None, user: object | None = None
    ) -> Tensor:
        """Return the rows of all ranks of an axis; the next call of this use overwrites them.

        local: this rank's rows, of any strides. sizes: the number of rows of each rank; None means one per rank.
        use: must differ on all ranks if the shape differs on one, because ranks free the same exchanges: shares of 9
        and of 10 tokens have one shape on the first of two ranks and two shapes on the second. user: see `attend`.
        """
        counts, shape = sizes or (1,) * axis.size, tuple(local.shape[1:])
        if axis.name not in self._gathers:
            self._gathers[axis.name] = IdleCache[Gather](self.mesh.replica, GATHERS)
        exchange = self._gathers[axis.name].of(
            (use, counts, shape, local.dtype), self._moves, lambda part: part.gather(axis, counts, shape, local), user
        )
        exchange.outbox().copy_(local)
        return exchange.deliver()

    def abandon(self) -> None:
        """End exchanges that an error in the last call left unfinished."""
        self._moves.abandon()

    def check(self) -> None:
        """Raise TimeoutError if this rank timed out waiting for another one; waits for the device."""
        self._moves.check()

    def check_now(self) -> None:
        """Raise TimeoutError if this rank is known to have timed out waiting for another one."""
        self._moves.check_now()

    def wait(self, device: torch.device) -> None:
        """Wait for the device; raise TimeoutError as soon as a rank is known to have timed out."""
        drain(self.mesh.world.watch, device, self._moves.late)
        self._moves.check_now()

    def release(self) -> None:
        """Free all exchanges; the next call makes new ones. Collective."""
        self._attends.release()
        for gathers in self._gathers.values():
            gathers.release()
        self.releases += 1
        self._moves.release()
