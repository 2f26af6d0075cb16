"""What this rank computes of a call: a part of the batch's rows, and with a cfg axis one of guidance's two calls.

The first guidance call of a step is deferred (`seqpar.graphs.deferred`), and each half of the ranks computes one of the
two calls concurrently. Nothing is predicted: the pipeline names its first call (`cache_context("cond")`), or the
family's cuts say that its pipelines make two calls per step (`Cuts.calls_twice`). Other calls are computed at once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from seqpar.families._find import ROW_LISTS, WITHOUT_ROWS
from seqpar.graphs.deferred import DeferredCall
from seqpar.graphs.signature import Form, form_of
from seqpar.mesh.inputs import shapes
from seqpar.mesh.mesh import Axis, Mesh
from seqpar.mesh.shard import Shard
from seqpar.mesh.watch import KINDS
from seqpar.transports.collective import gather

Split = tuple[Axis, tuple[int, ...]]
"""An axis, and the number of rows of each of its ranks."""
STATE = ("hidden_states", "x")  # the names that transformers give their latents, whose rows are those of the batch

# arguments with an entry for each token, pair of rotary values or layer, even if there happen to be as many as rows
_WHOLE = re.compile(rf"rotary|rope|indices|skip_layers|^({'|'.join(sorted(WITHOUT_ROWS))})$")


def as_dtype(value: Any, dtype: torch.dtype) -> Any:
    """Return an argument or a result with its floating-point tensors in another dtype."""
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
    """Return the axes, in order, over which so many rows can be split."""
    taken, parts = list[Axis](), 1
    for axis in axes:
        if axis.size > 1 and parts * axis.size <= rows:
            taken.append(axis)
            parts *= axis.size
    return tuple(taken)


def cut_rows(call: Form, axes: Sequence[Axis]) -> tuple[Form, list[Split]]:
    """Return the part of a call that this rank computes, and how its rows were split. axes: those of `split_over`."""
    if not axes:
        return call, []
    whole: dict[str, Any] = call.whole
    splits = list[Split]()
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
    # all of an argument, if it has no entry for each row
    if isinstance(value, list) and name in ROW_LISTS and len(value) == rows:
        return value[part]
    if _WHOLE.search(name) and not (isinstance(value, Tensor) and value.dim() > 2):
        return value
    return pytree.tree_map_only(Tensor, lambda x: x[part] if x.dim() and len(x) == rows else x, value)


def _joined(results: Any, axis: Axis, sizes: tuple[int, ...]) -> Any:
    # a list of tensors has an entry for each row
    if isinstance(results, Tensor):
        return gather(results, axis, sizes)
    if isinstance(results, list):
        return list(gather(torch.stack(results), axis, sizes).unbind())
    return tuple(_joined(result, axis, sizes) for result in results)


FIRST = ("cond", "pred_cond")  # how pipelines and guiders of diffusers name the first of a step's two calls
MANY = 3  # calls in a row without a second one, after which rank 0 says that the cfg axis has nothing to split


@dataclass(frozen=True)
class Task:
    """What this rank computes now: arguments, the axes that split their rows, and the deferred call beside it."""

    form: Form
    axes: tuple[Axis, ...]
    first: DeferredCall | None = None


class Branches:
    """Decides whether a call is computed at once, deferred, or together with the deferred one before it.

    say: prints a message once, on rank 0. exact: whether rows of a call stay together, because GEMMs of fewer rows,
    above all those of the modulation, may round differently. twice: whether calls without a name come in pairs.
    """

    def __init__(self, mesh: Mesh, say: Callable[[str], None], exact: bool = False, twice: bool = False) -> None:
        self._mesh, self._say, self._exact, self._twice, self._alone = mesh, say, exact, twice, 0
        self._axes = tuple(axis for axis in (mesh.data, mesh.cfg) if axis.size > 1)
        self.together = False  # whether a step cache keeps residuals of named calls, whose rows no cfg axis splits then
        self._results: dict[Hashable, Form] = {}  # by kind of call, without values
        self._pending: DeferredCall | None = None
        self.version: Hashable = None  # of the module when the pending call was deferred, and its texts then
        self.texts: Mapping[str, str] = {}

    @property
    def waiting(self) -> bool:
        """Whether a deferred call is not computed yet."""
        return self._pending is not None and self._pending.arguments is not None

    def settle(self) -> None:
        """Compute the deferred call, if there is one, before the module changes; collective."""
        if self._pending is not None:
            self._pending.compute()
        self._pending = None

    def cancel(self, error: str) -> None:
        """Raise `RuntimeError` with this message where the results of a deferred call are read."""
        if self._pending is not None:
            self._pending.cancel(error)
        self._pending = None

    def task(self, form: Form, label: str | None, coupled: str | None, steady: bool) -> Task | None:
        """Return what a call computes now; None if it is to be deferred.

        label: the name that the pipeline gives to the call. coupled: why its rows may depend on each other, or None.
        steady: whether the module has not changed in the last step.
        """
        first = self._pending
        if first is not None and first.arguments is not None and self._alike(first, form):
            self._pending, self._alone = None, 0
            local = (first.arguments, form)[self._mesh.cfg.rank]
            return Task(local, self._split((self._mesh.data,), local), first)
        self.settle()
        if coupled is not None:
            if self._axes:
                self._say_whole(f"at the time of the call, because {coupled}")
            return Task(form, ())
        if form.kind not in self._results:
            return Task(form, self._split(self._of_lone(label), form))
        return None if steady and self._defers(form, label) else self.alone(form, label)

    def defer(self, form: Form, version: Hashable, texts: Mapping[str, str], compute: Callable[[Form], Form]) -> Form:
        """Return deferred results, which `compute` computes if they are read before the next call.

        version, texts: the module's, which must not change until then.
        """
        self.version, self.texts = version, texts
        self._pending = DeferredCall(form, self._results[form.kind].each(_empty), compute)
        return self._pending.deferred()

    def results(self, task: Task, local: Form) -> Form:
        """Return the results of a call, of which `local` are this rank's; set those of the deferred call beside it."""
        if task.first is not None:
            both = {path: gather(x[None], self._mesh.cfg, (1, 1)) for path, x in local.tensors.items()}
            task.first.fill({path: x[0] for path, x in both.items()})
            return local.holding({path: x[1].clone() for path, x in both.items()})
        kind = task.form.kind
        if self._mesh.cfg.size > 1 and kind is not None and kind not in self._results:
            if len(self._results) == KINDS:
                del self._results[next(iter(self._results))]
            self._results[kind] = local.each(lambda x: x.new_empty(()).expand(x.shape))
        return local

    def _defers(self, form: Form, label: str | None) -> bool:
        # whether a call is computed later, beside the step's next one
        if torch.is_autocast_enabled(self._mesh.device.type):
            return False
        if label is None:  # rows for all axes are both branches already
            return self._twice and len(split_over(self._axes, rows_of(form.whole))) < len(self._axes)
        return label in FIRST

    def _alike(self, first: DeferredCall, form: Form) -> bool:
        # whether a call has results like those of the one before, so that both can be exchanged
        results = self._results.get(form.kind)
        mixed = torch.is_autocast_enabled(self._mesh.device.type)  # the first one was called without
        return not mixed and results is not None and shapes(results.tensors) == shapes(first.results.tensors)

    def _of_lone(self, label: str | None) -> tuple[Axis, ...]:
        # the axes that may split the rows of a call that no other one runs beside
        return tuple(axis for axis in self._axes if axis is not self._mesh.cfg or not self.together or label is None)

    def alone(self, form: Form, label: str | None) -> Task:
        """Return the task of a call that no other one runs beside. label: see `task`."""
        axes = split_over(self._axes, rows_of(form.whole))
        if self._mesh.cfg.size > 1 and self._mesh.cfg not in axes:
            self._alone += 1
            if self._alone > MANY:
                self._say(
                    "both halves of the cfg axis compute the same calls, because no two calls belong to one step; "
                    "parallelize(cfg=False) lets all ranks share the tokens"
                )
        return Task(form, self._split(self._of_lone(label), form))

    def _split(self, axes: tuple[Axis, ...], form: Form) -> tuple[Axis, ...]:
        split = split_over(axes, rows_of(form.whole)) if axes else ()
        if split and self._exact:
            self._say_whole("because GEMMs of fewer rows may round differently, in exact mode")
        return () if self._exact else split

    def _say_whole(self, why: str) -> None:
        self._say(
            f"every rank computes the whole batch of each call, {why}; parallelize(cfg=False) lets all ranks share the "
            f"tokens"
        )


def _empty(like: Tensor) -> Tensor:
    # NaN shows where a result is read too early
    unknown = torch.nan if like.is_floating_point() else 0
    return torch.full(like.shape, unknown, dtype=like.dtype, device=like.device)
