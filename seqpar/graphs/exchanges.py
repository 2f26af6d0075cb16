"""`Keeper`: the exchanges of one sharded model, made at the first call of a kind and kept for later calls.

An exchange owns buffers, and by peer memory a mapping on every rank, so only the last kinds of calls keep theirs.
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
        anywhere = [any(uses) for uses in zip(*collect_on_axis(self._axis, in_use, list[bool]), strict=True)]
        idle = [kind for kind, used in zip(self._kinds, anywhere, strict=True) if not used]
        for kind in idle[: max(len(self._kinds) + 1 - self._most, len(idle) // 2)]:
            self._kinds.pop(kind).moves.release()
            self.freed += 1


ATTENDS = 16  # attentions that are kept: new sizes must not fill the memory
GATHERS = 32  # gathers of an axis that are kept; a run has one or two for each stream of its state


class Keeper:
    """The exchanges of a plan on a mesh; all ranks that share tokens must ask for the same ones in the same order."""

    def __init__(self, mesh: Mesh, plan: Plan) -> None:
        self.mesh, self.plan, self.releases = mesh, plan, 0
        self._moves = load_transport(plan.transport.name)
        self._attends = Kept[Attend](mesh.sequence, ATTENDS)
        # the ranks of a sequence axis may make calls of their own, those of its replica exchange branches together
        self._gathers = {mesh.sequence.name: Kept[Gather](mesh.sequence, GATHERS)}

    def __deepcopy__(self, memo: object) -> Keeper:
        raise ValueError(
            "got a copy of a transformer that runs on several ranks, expected one that does not: its exchanges belong "
            "to one transformer; release it first, or copy it before it is made parallel"
        )

    def __len__(self) -> int:
        return len(self._attends) + sum(map(len, self._gathers.values()))

    @property
    def axis(self) -> Axis:
        """Return the sequence axis."""
        return self.mesh.sequence

    @property
    def state(self) -> Hashable:
        """Return a key that changes when any exchange was freed, after which no graph may be replayed that read it."""
        return self.releases, self._attends.freed, *(each.freed for each in self._gathers.values())

    def attend(self, batch: int, tokens: Tokens, local: str | None = None, user: object | None = None) -> Attend:
        """Return the sharded attention for this batch and split of tokens; it owns its buffers.

        local: the local attention, where it is not the plan's. user: an object that needs the attention as long as it
        exists, as a run whose CUDA graph reads the buffers; without one it may be freed after `ATTENDS` others.
        """
        build, core = load_strategy(self.plan.strategy.name).build, local or self.plan.local.name
        return self._attends.of(
            (batch, tokens, core), self._moves, lambda own: build(self.mesh, tokens, load_local(core), own), user
        )

    def gathered(
        self, use: Hashable, axis: Axis, mine: Tensor, sizes: tuple[int, ...] | None = None, user: object | None = None
    ) -> Tensor:
        """Return the rows of all ranks of an axis; the next call of this use overwrites them.

        mine: this rank's rows, of any strides. sizes: the number of rows of each rank; None means one a rank.
        use: must differ on all ranks if the shape differs on one, because ranks free the same exchanges: shares of 9
        and of 10 tokens have one shape on the first of two ranks and two shapes on the second. user: see `attend`.
        """
        counts, shape = sizes or (1,) * axis.size, tuple(mine.shape[1:])
        if axis.name not in self._gathers:
            self._gathers[axis.name] = Kept[Gather](self.mesh.replica, GATHERS)
        exchange = self._gathers[axis.name].of(
            (use, counts, shape, mine.dtype), self._moves, lambda own: own.gather(axis, counts, shape, mine), user
        )
        exchange.outbox().copy_(mine)
        return exchange.deliver()

    def abandon(self) -> None:
        """End the exchanges that an error in the last call left unfinished."""
        self._moves.abandon()

    def check(self) -> None:
        """Raise TimeoutError if a rank waited in vain for another one; this waits for the device."""
        self._moves.check()

    def check_now(self) -> None:
        """Raise TimeoutError if it is known by now that this rank waits for another one in vain."""
        self._moves.check_now()

    def wait(self, device: torch.device) -> None:
        """Wait for the device, and raise TimeoutError as soon as it is known that a rank waits in vain."""
        drain(self.mesh.world.watch, device, self._moves.late)
        self._moves.check_now()

    def release(self) -> None:
        """Free all exchanges, on all ranks at the same time; the next call makes new ones."""
        self._attends.release()
        for kept in self._gathers.values():
            kept.release()
        self.releases += 1
        self._moves.release()
