"""`Branches`: what a call computes at which time, so that guidance's two calls of a step are computed at once.

A call is promised (`seqpar.graphs.deferred`) where the next one is known to be its step's other branch. With two ranks
on the `cfg` axis each half then computes one of them.
When it wins: with guidance; without it all ranks share the tokens of one call (`parallelize(cfg=False)`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from seqpar.families._find import ROW_LISTS, WITHOUT_ROWS
from seqpar.graphs.deferred import Ticket
from seqpar.graphs.signature import Form, form_of
from seqpar.mesh.inputs import shapes
from seqpar.mesh.mesh import Axis, Mesh
from seqpar.mesh.shard import Shard
from seqpar.mesh.watch import KINDS
from seqpar.transports.collective.point_to_point import gather

Split = tuple[Axis, tuple[int, ...]]
"""An axis and the number of rows of each of its ranks."""
STATE = ("hidden_states", "x")  # the names that transformers give their latents, whose rows are those of the batch
# arguments with an entry for each token, pair of rotary values or layer, even if there happen to be as many as rows
_WHOLE = re.compile(rf"rotary|rope|indices|skip_layers|^({'|'.join(sorted(WITHOUT_ROWS))})$")


def as_dtype(value: Any, dtype: torch.dtype) -> Any:
    """Return an argument or a result with the floating-point tensors in it in another dtype."""
    return pytree.tree_map_only(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, value)


def rows_of(arguments: dict[str, Any]) -> int:
    """Return the number of rows of a call's batch, or 0 if its latents have none."""
    state = next((arguments[name] for name in STATE if name in arguments), None)
    if isinstance(state, Tensor):
        return len(state) if state.dim() else 0
    if not isinstance(state, list) or len({(x.shape, x.dtype) for x in state}) != 1:
        return 0  # results of unequal shapes could not be gathered
    return len(state)


def split_over(axes: Sequence[Axis], rows: int) -> tuple[Axis, ...]:
    """Return the axes, in their order, whose ranks can have rows of their own."""
    taken, parts = [], 1
    for axis in axes:
        if axis.size > 1 and parts * axis.size <= rows:
            taken.append(axis)
            parts *= axis.size
    return tuple(taken)


def cut_rows(whole: dict[str, Any], axes: Sequence[Axis]) -> tuple[Form, list[Split]]:
    """Return the call that this rank computes, and how the rows were split. axes: those of `split_over`."""
    splits = []
    for axis in axes:
        rows = rows_of(whole)
        shard = Shard(rows, axis.size)
        whole = {name: _cut(name, value, rows, shard.slice(axis.rank)) for name, value in whole.items()}
        splits.append((axis, shard.sizes))
    return form_of(whole), splits


def joined_rows(results: Form, splits: Sequence[Split]) -> Form:
    """Return the results of all rows on every rank."""
    for axis, sizes in reversed(splits):
        results = form_of(_joined(results.whole, axis, sizes))
    return results


def _cut(name: str, value: Any, rows: int, part: slice) -> Any:
    """Return the part of an argument that belongs to some rows: all of it, if it has no entry for each row."""
    if isinstance(value, list) and name in ROW_LISTS and len(value) == rows:
        return value[part]
    if _WHOLE.search(name) and not (isinstance(value, Tensor) and value.dim() > 2):
        return value
    return pytree.tree_map_only(Tensor, lambda x: x[part] if x.dim() and len(x) == rows else x, value)


def _joined(results: Any, axis: Axis, sizes: tuple[int, ...]) -> Any:
    """Gather the rows of nested results; a list of tensors has an entry for each row."""
    if isinstance(results, Tensor):
        return gather(results, axis, sizes)
    if isinstance(results, list):
        return list(gather(torch.stack(results), axis, sizes).unbind())
    return tuple(_joined(each, axis, sizes) for each in results)


MANY = 3  # calls in a row without a partner, after which a cfg axis has nothing to split
SOON = 8  # calls; a module that changed twice within them goes on changing


class Pairs:
    """What the last calls tell of the next ones. `see` every call, and then `changed` if the module has changed."""

    def __init__(self) -> None:
        self._known = False  # whether a step had two calls of the same module
        self._index = 0  # of the last call in its step
        self._latents: ref[Any] | None = None
        self._labels: set[str | None] = set()  # of the calls of the step
        self._count = self._single = 0
        self._changes = (-SOON, -SOON)  # the numbers of the last two calls before which the module changed

    @property
    def expected(self) -> bool:
        """Return whether the call that was seen last is the first of two that can be computed together."""
        return self._known and self._index == 0

    @property
    def lonely(self) -> bool:
        """Return whether several calls in a row came without a partner."""
        return self._single >= MANY

    @property
    def restless(self) -> bool:
        """Return whether the module keeps changing, so that a captured call would not be replayed."""
        return self._count - self._changes[0] <= SOON

    def see(self, latents: Any, label: str | None) -> None:
        """Take note of a call by its label, or by its latents, which are one object in all calls of a step."""
        latents = latents[0] if isinstance(latents, list) and latents else latents
        same = self._latents is not None and latents is not None and self._latents() is latents
        begins = not same if label is None else label in self._labels
        if begins or not self._count:
            self._single = self._single + 1 if self._index == 0 else 0
            self._index, self._labels = 0, {label}
        else:
            self._index += 1
            self._labels.add(label)
        self._known = self._known or self._index == 1
        self._latents = ref(latents) if isinstance(latents, Tensor) else None
        self._count += 1

    def changed(self) -> None:
        """Take note that the module has changed between the last call and this one."""
        self._known = False
        self._changes = self._changes[1], self._count

    def alone(self) -> None:
        """Take note that a promised call was read before a second one came."""
        self._known = False


BOTH = "cond_uncond"  # the label of a call whose rows are both branches of guidance


@dataclass(frozen=True)
class Task:
    """What a call computes now: the arguments, whose rows the axes split, and the promised call beside it, if any."""

    form: Form
    axes: tuple[Axis, ...]
    first: Ticket | None = None


Compute = Callable[[Task], Form]


class Branches:
    """Decides for each call whether it is computed at once, beside the next one, or together with the one before.

    compute: computes a task on all ranks. check: compares the ranks before a promised call is computed alone.
    say: prints a message once, on rank 0. exact: whether rows of a call stay together, because products of fewer rows,
    above all those of the modulation, may round otherwise.
    """

    def __init__(
        self, mesh: Mesh, compute: Compute, check: Callable[[], None], say: Callable[[str], None], exact: bool = False
    ) -> None:
        self._mesh, self._compute, self._check, self._say, self._exact = mesh, compute, check, say, exact
        self.pairs = Pairs()
        self._known: dict[Hashable, Form] = {}  # the results of kinds of calls, without values
        self._pending: Ticket | None = None
        self.version: Hashable = None  # of the module when the pending call was made, and what it showed then
        self.texts: Mapping[str, str] = {}

    @property
    def waiting(self) -> bool:
        """Return whether a promised call is not computed yet."""
        return self._pending is not None and self._pending.arguments is not None

    def settle(self) -> None:
        """Compute a call that was promised, before the module changes; every rank must call this at the same time."""
        if self._pending is not None:
            self._pending.fulfil()
        self._pending = None

    def cancel(self, error: str) -> None:
        """Raise `RuntimeError` with this message where the results of a promised call are read."""
        if self._pending is not None:
            self._pending.cancel(error)
        self._pending = None

    def task(self, form: Form, label: str | None, coupled: str | None) -> Task | None:
        """Return what a call computes now; None if its results are to be promised.

        label: the name that the pipeline gives to the call. coupled: why its rows may depend on each other, or None.
        """
        first = self._pending
        if first is not None and first.arguments is not None and self._alike(first, form):
            self._pending, cfg = None, self._mesh.cfg
            mine = (first.arguments, form)[cfg.rank]
            return Task(mine, self._split((self._mesh.data,), mine), first)
        self.settle()
        if coupled is not None:
            if self.axes:
                self._say_whole(f"at the time of the call, because {coupled}")
            return Task(form, ())
        return None if self._may_wait(form, label) else self._alone(form)

    def promise(self, form: Form, version: Hashable, texts: Mapping[str, str]) -> Form:
        """Return promises of the results of a call.

        version, texts: the module's, which must stay the same until the call is computed.
        """
        self.version, self.texts = version, texts
        self._pending = Ticket(form, self._known[form.kind].each(_room), self._computed_alone)
        return self._pending.promised()

    def results(self, task: Task, mine: Form) -> Form:
        """Return the results of a call; those of a promised call beside it, on the other half of the cfg axis, are set.

        mine: what this rank computed for the task.
        """
        if task.first is not None:
            both = {path: gather(x[None], self._mesh.cfg, (1, 1)) for path, x in mine.tensors.items()}
            task.first.fill({path: x[0] for path, x in both.items()})
            return mine.holding({path: x[1].clone() for path, x in both.items()})
        kind = task.form.kind
        if self._mesh.cfg.size > 1 and kind is not None and kind not in self._known:
            if len(self._known) == KINDS:
                del self._known[next(iter(self._known))]
            self._known[kind] = mine.each(lambda x: x.new_empty(()).expand(x.shape))
        return mine

    @property
    def axes(self) -> tuple[Axis, ...]:
        """Return the axes with several ranks that can split a batch."""
        return tuple(axis for axis in (self._mesh.data, self._mesh.cfg) if axis.size > 1)

    def _may_wait(self, form: Form, label: str | None) -> bool:
        """Return whether a call may be computed later, beside the step's next one, which then is sure to come."""
        cfg = self._mesh.cfg
        if cfg.size == 1 or torch.is_autocast_enabled(self._mesh.device.type):
            return False
        split = split_over(self.axes, rows_of(form.whole))
        if label in (None, BOTH) and len(split) == len(self.axes):
            return False  # its rows are both branches
        if cfg not in split and self.pairs.lonely:
            self._say(
                "both halves of the cfg axis compute the same, because calls come without a second branch; "
                "parallelize(cfg=False) lets all ranks share the tokens"
            )
        return form.kind in self._known and self.pairs.expected

    def _alike(self, first: Ticket, form: Form) -> bool:
        """Return whether a call has results like those of the one before, so that both can be exchanged."""
        known = self._known.get(form.kind)
        mixed = torch.is_autocast_enabled(self._mesh.device.type)  # the first one was called without
        return not mixed and known is not None and shapes(known.tensors) == shapes(first.results.tensors)

    def _alone(self, form: Form) -> Task:
        return Task(form, self._split(self.axes, form))

    def _split(self, axes: tuple[Axis, ...], form: Form) -> tuple[Axis, ...]:
        """Return the axes that split the rows of a call."""
        split = split_over(axes, rows_of(form.whole))
        if split and self._exact:
            self._say_whole("because products of fewer rows may round otherwise, in exact mode")
        return () if self._exact else split

    def _say_whole(self, why: str) -> None:
        self._say(
            f"every rank computes the whole batch of each call, {why}; parallelize(cfg=False) lets all ranks share the "
            f"tokens"
        )

    def _computed_alone(self, form: Form) -> Form:
        """Compute a promised call that was read before a second one came."""
        self.pairs.alone()
        self._check()
        with torch.autocast(self._mesh.device.type, enabled=False):  # as it was called, wherever it is read
            task = self._alone(form)
            return self.results(task, self._compute(task))


def _room(like: Tensor) -> Tensor:
    """Return a tensor for results that are not there yet; NaN would show where it is read too early."""
    unknown = torch.nan if like.is_floating_point() else 0
    return torch.full(like.shape, unknown, dtype=like.dtype, device=like.device)
