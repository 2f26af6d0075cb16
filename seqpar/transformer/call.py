"""The forward of a parallelized transformer. Inference only; collective.

1. All ranks take rank 0's arguments; one gather on the host finds ranks that differ.
2. With a cfg axis, the first guidance call of a step is deferred, to run beside the second.
3. Rows are split over data and cfg, then tokens over the sequence axis; a kind of call is one CUDA graph.
4. Every rank returns the whole results, in diffusers' output class.
"""

from __future__ import annotations

import copy
import inspect
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from types import MethodType
from typing import Any, TypeVar, cast

import torch
from diffusers.models.attention_dispatch import attention_backend
from torch import Tensor

from seqpar.families._cuts import NOTE, Boundary, forward_of
from seqpar.graphs.deferred import plain
from seqpar.graphs.graphs import Capture, CudaCapture, Graphs, copied
from seqpar.graphs.signature import Form, form_of
from seqpar.loading.parking import bring
from seqpar.mesh.boundary import CancelledError
from seqpar.mesh.inputs import CALL, Described, broadcast, compared, shapes
from seqpar.transformer.attention import exact_mode
from seqpar.transformer.attention8 import KEEPS
from seqpar.transformer.foreign import is_offloaded, name_of
from seqpar.transformer.guidance import STATE, Branches, Split, Task, as_dtype, cut_rows, joined_rows
from seqpar.transformer.hooks import ShardedModule, shard
from seqpar.transformer.masks import Preparation, keys_for
from seqpar.transformer.step_cache import StepCaching
from seqpar.transports.collective import gather
from seqpar.types.arguments import is_not_finite

NUMBERS = ("timestep", "guidance")  # how names of arguments begin that hold a number, or one for each row
DESCRIBED = 16  # kinds of calls of which is kept what ranks compare
SAME, EXCHANGES, OTHER = range(3)  # of a module: nothing has changed, exchanges alone, or anything else
SOON = 8  # calls; a module that changed twice within them goes on changing, so that a graph would not be replayed


FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def _untraced(function: FunctionT) -> FunctionT:
    # a compiler would take minutes for a transformer whose calls are graphs already
    return cast(FunctionT, torch.compiler.disable(function))


class ShardedCall:
    """The forward of a parallelized transformer; every rank must make the same calls.

    capture: captures calls as CUDA graphs; None runs them eagerly. before: attributes of the transformer that
    `parallelize` replaces. Raises the same ValueError on every rank if arguments, adapters, attention processors, or
    what computes differ.
    """

    def __init__(
        self, sharded: ShardedModule, capture: Capture | None = None, before: Mapping[str, Any] | None = None
    ) -> None:
        module, state, cuts = sharded.module, sharded.state, sharded.cuts
        self.sharded, self.state, self.mesh, self.before = sharded, state, state.mesh, dict(before or {})
        self.ends = ExitStack()  # what is undone at the release of this transformer
        self.graphs, self._capture = Graphs(self.mesh, capture, state.check), capture
        self.label: str | None = None  # how the pipeline names the call that it makes now
        self.keeps_attention: Callable[[], bool] | None = None  # whether attention of the next call keeps the dtype
        self.boundary: Callable[[], None] | None = None  # runs before each call (`seqpar.mesh.boundary`)
        self.check: Callable[[], None] | None = None  # raises ValueError for what no call may find
        self.__wrapped__ = type(module).forward.__get__(module)
        self.__name__ = "forward"
        self.__signature__ = self._signature = inspect.signature(forward_of(type(module)).__get__(module))
        parameters, empty = self._signature.parameters.values(), inspect.Parameter.empty
        self._required = {x.name for x in parameters if x.default is empty}
        exact = state.plan.exact
        moves_only = cuts.prepare is not None and state.moves_only
        config = getattr(sharded.module, "config", None)
        self._preparation = Preparation(
            cuts, self.mesh.sequence.size, exact, lambda: moves_only and not sharded.keeps_masks, config
        )
        self._replaced: dict[str, Any] = {}  # what replaces arguments of the last `rank_0s` in `computed`
        self._guidance = Branches(self.mesh, state.say, exact, cuts.calls_twice)
        self.leave_out(sharded.steps)
        self.narrow: torch.dtype | None = None  # of the weights, where a pipeline keeps latents and results in fp32
        self._released: Callable[..., Any] | None = None  # the forward after the release
        self._key: Hashable = None
        self._ordinal = 0  # which branch of guidance the last call is, and the last deferred one
        self._first = 0
        self._texts: Mapping[str, str] = {}
        self._described = dict[Hashable, Described]()
        self._generation, self._calls, self._changes = 0, 0, deque[int]((-SOON, -SOON), maxlen=2)
        self._reached = False
        self._reaches: Any = None  # the module's last forward that has called this one; None: it is this one
        self._grads = False  # whether the caller wants gradients

    @_untraced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the transformer's own forward returns, on every rank."""
        if self._released is not None:
            return self._released(*args, **kwargs)
        self.pass_boundary()
        self._grads = torch.is_grad_enabled()
        arguments = self.named(args, kwargs)
        return_dict = arguments.pop("return_dict", True)
        if self.keeps_attention is not None:
            arguments[KEEPS] = self.keeps_attention()  # two kinds of calls, with a graph each
        with torch.inference_mode(False), torch.no_grad(), self._resetting():
            # 1. all ranks take rank 0's arguments; one small gather on the host finds ranks that differ
            call = self.computed(self.rank_0s(arguments))

            # 2. guidance: the first call of a step is deferred, and the second one runs beside it on the cfg axis
            steady = self._calls - self._changes[-1] > 1  # the module did not change in the last step
            task = self._guidance.task(call, self.label, self._coupled(call), steady)
            if task is None:
                self._first, version = self._ordinal, self.sharded.version()
                compute = partial(self._compute_deferred, self._ordinal, self.label)
                results = self._guidance.defer(call, version, self._texts, compute).whole
            else:
                # 3. rows over data and cfg, then tokens over the sequence axis, in one CUDA graph
                rows, splits = cut_rows(task.form, task.axes)
                rows = self._with_step(rows, call, task, self._ordinal)
                with self.graphs.entered(self.compute, rows, self._generation, self._is_eager(rows)) as compute:
                    outputs = copied(compute(rows))

                # 4. every rank returns the whole results, in diffusers' class
                results = self._guidance.results(task, self._joined(outputs, splits)).whole
        self._reached = True
        return self.sharded.cuts.output(*results) if return_dict else results

    @torch.no_grad()
    def compute(self, call: Form) -> tuple[Tensor, ...]:
        """Return the transformer's outputs, complete on every rank of the sequence axis; a CUDA graph captures this.

        call: arguments of the transformer's own forward by their names, and maybe `NOTE`; tensors are complete and on
        the mesh's device, and equal on all ranks of the sequence axis. The next call may overwrite the outputs. The
        first call of a kind builds exchanges. Raises ValueError, the same on every rank, for arguments that cannot be
        computed.
        """
        arguments, sharded, state = call.whole, self.sharded, self.state
        bring(sharded.module)
        for name, reason in sharded.cuts.refused.items():
            if arguments.get(name) is not None:
                kind = type(sharded.module).__name__
                raise ValueError(f"{name} of {kind} is not supported on several ranks: {reason}")
        sharded.follow()
        sharded.fused.rescale(_scale_of(arguments))
        sharded.fused.refuse_memory()
        state.begin()
        try:
            steps = self.steps
            state.keeps_attention = arguments.pop(KEEPS, False)
            if steps is not None:
                steps.begin(call.mark, arguments)
            note = arguments.pop(NOTE, None)
            keys = keys_for(sharded.cuts, arguments, note, sharded.keeps_masks)
            state.masks, state.padding, state.prefix, is_whole = keys
            state.active = not is_whole
            if sharded.takes_note:
                arguments[NOTE] = note
            for name, how in sharded.cuts.places.get("", Boundary()).inputs.items():
                if name in arguments:
                    arguments[name] = shard(state, arguments[name], how)
            # diffusers' dispatcher calls torch's attention, which is overridden, whatever is set elsewhere
            with exact_mode(state), sharded.watch.during(), attention_backend():
                outputs = sharded.forward(**arguments, return_dict=False)
                outputs = (outputs,) if isinstance(outputs, torch.Tensor) else tuple(outputs)  # Kandinsky's is alone
            if steps is not None:
                steps.check_ended()
        finally:
            state.active = False
            if self.steps is not None:
                self.steps.end()
        return outputs if self.narrow is None else as_dtype(outputs, torch.float32)

    # 1. Rank 0's arguments ----------------------------------------------------------------------------------------

    def named(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by their names; those that are left out are missing."""
        names = self._signature.parameters
        if not args and kwargs.keys() <= names.keys() and self._required <= kwargs.keys():
            return {name: kwargs[name] for name in names if name in kwargs}  # as below, in a tenth of the time
        arguments = self._signature.bind(*args, **kwargs).arguments
        for name, parameter in self._signature.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                arguments |= arguments.pop(name, {})
        return arguments

    def rank_0s(self, arguments: dict[str, Any]) -> Form:
        """Return rank 0's arguments on this rank's device, without padding that the cuts name; collective."""
        if (narrow := self.narrow) is not None:
            arguments = {name: as_dtype(x, narrow) if name in STATE else x for name, x in arguments.items()}
        form = form_of(arguments).each(plain)
        gradients = sorted(path for path, x in form.tensors.items() if x.requires_grad)
        self._calls += 1
        key = self._followed()
        key = key if isinstance(key, ValueError) else _not_finite(arguments) or key
        numbers = self._preparation.read(form) if self.mesh.is_main else 0
        ordinal = 0 if self.steps is None else self.steps.ordinal(self.label, self.steps.text_of(arguments))
        numbers, self._ordinal = self._compare(self._shown(form, gradients), key, numbers, ordinal)
        if gradients:
            raise ValueError(f"{gradients[0]} requires grad, but parallelize supports inference only. Detach it")
        device = self.mesh.device
        form, self._replaced, messages = self._preparation.apply(form, numbers)
        for message in messages:
            self.state.say(message)
        return form.holding(broadcast(self.mesh, form.tensors)).each(lambda x: x.to(device))

    def _shown(self, form: Form, gradients: Sequence[str]) -> Described:
        # what all ranks compare; it is made once for calls of one kind
        of = None if form.kind is None else (form.kind, tuple(gradients), tuple(self._texts.items()))
        known = self._described.get(of)
        if known is None:
            shown = {"arguments": sorted(form.tensors), "requires_grad": gradients, **self._texts, **form.shown}
            known = Described({**shapes(form.tensors), **shown, CALL: f"calls {type(self.sharded.module).__name__}"})
            if len(self._described) >= DESCRIBED:
                self._described.clear()
            if of is not None:
                self._described[of] = known
        return known

    def computed(self, form: Form) -> Form:
        """Return the arguments with which calls are computed: those of the last `rank_0s`, as `Cuts.prepare` says."""
        return form_of(form.whole | self._replaced) if self._replaced else form

    def _coupled(self, call: Form) -> str | None:
        # why rows of a call may depend on each other
        kept = next((name for name in self.sharded.cuts.of_batch if call.values.get(name) is not None), None)
        return self.sharded.foreign.coupled or (kept and f"{kept} is that of all rows")

    def _followed(self) -> Hashable:
        # The module's key, or the ValueError with which this rank, and maybe no other, refuses the call. It is raised
        # only after ranks have compared their calls, because the others wait there.
        module, name = self.sharded.module, type(self.sharded.module).__name__
        bring(module)  # a replay reads its weights
        try:
            key = self.sharded.key()
            if self.mesh.world.size > 1:
                self._texts = self.sharded.texts()
            # graphs and exchanges rely on the addresses of weights; hooks are searched for again if these have changed
            if is_offloaded(module, key != self._key):
                raise ValueError(
                    f"{name} has offloaded weights; parallelize needs them on the GPU. Call seqpar.release before "
                    f"enabling offload"
                )
            if self._grads and any(x.requires_grad for x in module.parameters()):
                if module.training:
                    raise ValueError(
                        f"{name} is in training mode and its parameters require gradients, but parallelize supports "
                        f"inference only; call seqpar.release to train, or eval() and torch.no_grad() for inference"
                    )
                self.state.say(
                    f"parameters of {name} require gradients, but parallelize supports inference only: results have "
                    f"no gradients; call it under torch.no_grad()"
                )
            if self.check is not None:
                self.check()
        except ValueError as error:
            return error
        return key

    def _compare(
        self, form: Mapping[str, object] | Described, key: Hashable, numbers: int = 0, ordinal: int = 0
    ) -> tuple[int, int]:
        """Raise the same ValueError on all ranks if `form` differs, or if a rank refuses; follow changes of the module.

        key: what `_followed` returned. numbers: what `Preparation.read` returned. ordinal: which branch of guidance the
        call is (`StepCaching.ordinal`). Rank 0's are returned.
        """
        is_first, waits = self._key is None, self._guidance.waiting
        moved = waits and not isinstance(key, ValueError) and self.sharded.version() != self._guidance.version
        changes, lacks_memory = _change(self._key, key, moved), self.sharded.fused.lacks_memory
        per_rank = compared(self.mesh, form, [changes, lacks_memory, numbers, ordinal])
        ends = any(lacks for _, lacks, *_ in per_rank)
        if ends or any(changed for changed, *_ in per_rank):
            self.mesh.on_all_ranks(lambda: _raise(key))
            self._generation += 1  # addresses of weights may change on one rank only; all must capture again
            if self.steps is not None and (ends or any(changed == OTHER for changed, *_ in per_rank)):
                self.steps.forget()
            if waits:
                self._refuse_change()
            if not is_first:
                self._changes.append(self._calls)
        if ends:
            self.sharded.end_copies()
            key = self._followed()
        self._key = key
        return per_rank[0][2], per_rank[0][3]

    def _refuse_change(self) -> None:
        # if the module is no longer as it was when a call was deferred, the same ValueError on all ranks
        version, texts = self._guidance.version, self._guidance.texts
        changed = " and ".join(sorted(name for name in texts if self._texts.get(name) != texts[name])) or "weights"
        message = (
            f"{changed} of {type(self.sharded.module).__name__} changed between the guidance calls of a step, which "
            f"run together. Use parallelize(cfg=False)"
        )
        try:
            self.mesh.on_all_ranks(lambda: _raise(ValueError(message) if self.sharded.version() != version else None))
        except ValueError:
            self._guidance.cancel(message)
            raise

    # 2. Guidance --------------------------------------------------------------------------------------------------

    @contextmanager
    def labelled(self, label: str, context: AbstractContextManager[Any]) -> Iterator[Any]:
        """Context in which calls have the name that a pipeline gives them. context: the pipeline's own."""
        before, self.label = self.label, label
        try:
            with context as value:
                yield value
        finally:
            self.label = before

    def settle(self) -> None:
        """Compute a deferred call, before the module changes; collective."""
        self._guidance.settle()

    # 3. Rows and tokens -------------------------------------------------------------------------------------------

    def _compute_deferred(self, ordinal: int, label: str | None, call: Form) -> Form:
        # the results of a deferred call that are read before the next call. ordinal: which branch of guidance it is,
        # label: how its pipeline names it
        key = self._followed()
        self._compare({CALL: f"reads a result of {type(self.sharded.module).__name__}", **self._texts}, key)
        # as it was called, wherever it is read
        with torch.autocast(self.mesh.device.type, enabled=False), self._resetting():
            task = self._guidance.alone(call, label)
            rows, splits = cut_rows(task.form, task.axes)
            rows = self._with_step(rows, call, task, ordinal)
            outputs = self.graphs.run(self.compute, rows, self._generation, self._is_eager(rows))
            return self._guidance.results(task, self._joined(outputs, splits))

    def _with_step(self, rows: Form, call: Form, task: Task, ordinal: int) -> Form:
        # the rows, marked with the buffers of a step cache
        if self.steps is None:
            return rows
        first = None if task.first is None else task.first.arguments
        calls = [(call, ordinal)] if first is None else [(first, self._first), (call, ordinal)]
        axes, kinds = tuple(axis.name for axis in task.axes), list[tuple[Hashable, int]]()
        for each, at in calls:
            kind = _kind(each) if self.steps.has(each) else None
            kinds.append((kind and (kind, axes), at))
        return replace(rows, mark=self.steps.enter(kinds, self.mesh.cfg in task.axes))

    def _joined(self, outputs: Form, splits: Sequence[Split]) -> Form:
        # the results of all rows; of a call that both halves of a cfg axis compute, those of the half with residuals
        outputs = joined_rows(outputs, splits)
        home = None if self.steps is None else self.steps.home
        return outputs if home is None else outputs.each(lambda x: gather(x[None], self.mesh.cfg, (1, 1))[home])

    @contextmanager
    def _resetting(self) -> Iterator[None]:
        # after an error, no step of the next run reuses anything of this one
        try:
            yield
        except BaseException:
            self.reset()
            raise

    def leave_out(self, steps: StepCaching | None) -> None:
        """Leave out blocks by this step cache from the next call on; None computes all."""
        self.steps = self.sharded.steps = steps
        self._guidance.together = steps is not None
        if steps is not None and isinstance(capture := self._capture, CudaCapture):
            steps.recording = lambda: capture.recording

    def reset(self) -> None:
        """Begin a run: a step cache reuses nothing of the calls before."""
        if self.steps is not None:
            self.steps.reset()

    def _is_eager(self, call: Form) -> bool:
        # a replay would not run third-party hooks, or soon be invalid, and what reads values cannot be captured
        reasons = [f"calls run without CUDA graphs while {hook}" for hook in self.sharded.foreign.hooks[:1]]
        given = {path.partition("[")[0] for path in call.tensors}
        for name, reason in self.sharded.cuts.eager_with.items():
            if name in given:
                reasons.append(f"calls with {name} run without CUDA graphs, because {reason}")
        if reasons and self.graphs.captures:
            self.state.say(reasons[0])
        return bool(reasons) or self._calls - self._changes[0] <= SOON

    # Beside calls -------------------------------------------------------------------------------------------------

    def pass_boundary(self) -> None:
        """Raise CancelledError, the same on all ranks, if the run was cancelled; its deferred call is dropped."""
        if self.boundary is None:
            return
        try:
            self.boundary()
        except CancelledError:
            self._guidance.cancel("a result of a cancelled run was read")
            self.reset()
            raise

    def check_delivered(self) -> None:
        """Raise TimeoutError if this rank timed out waiting for another one; waits for the device."""
        self.state.check()

    @_untraced
    def check_reached(self, *_: Any) -> None:
        """Raise ValueError, the same on every rank, if a forward that users have set does not call this one.

        It is a hook of the module, called after each call. A forward that has called this one may skip it later, as
        caches do.
        """
        module = self.sharded.module
        forward, reached = vars(module).get("forward"), self._reached
        self._reached = False
        if reached or forward is (self if self._reaches is None else self._reaches):
            self._reaches = forward
            return
        name = type(module).__name__
        by = f"by {name_of(forward)}, which does not call the one before it" if forward else "by that of its class"
        error = ValueError(
            f"The forward of {name} was replaced after parallelize {by}, so that each rank computes alone. Let it call "
            f"the forward that it replaces, or call seqpar.release first"
        )
        self._compare({CALL: f"calls {name} with another forward than that of parallelize"}, error)

    def release(self) -> None:
        """Free graphs and exchanges; collective."""
        self._guidance.cancel("a result was read after release(); read it before")
        self.graphs.release()
        self.sharded.release()

    def stand_aside(self, forward: Callable[..., Any] | None) -> None:
        """Call a forward, or that of the class, from now on: wrappers that users have put around this call stay."""
        module, around = self.sharded.module, vars(self.sharded.module).get("forward")
        self._released = forward or MethodType(type(module).forward, module)
        if around is not forward:
            self.state.say(f"{name_of(around)} stays the forward of the released {type(module).__name__}")

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # of the module's copy, which is possible after the release only
        return copy.deepcopy(self._released, memo)

    def __get__(self, instance: object, owner: type | None = None) -> ShardedCall:
        # as a bound method: who puts the former forward back may bind it again
        return self


def _kind(call: Form) -> Hashable:
    # one for steps whose attention is in 8 bits and those whose attention keeps its dtype
    if KEEPS not in call.values:
        return call.kind
    return form_of({name: x for name, x in call.whole.items() if name != KEEPS}).kind


def _scale_of(arguments: Mapping[str, Any]) -> float:
    # by which diffusers multiplies the scales of all adapters in this call
    options = (arguments.get(name) or {} for name in ("joint_attention_kwargs", "attention_kwargs"))
    return next((option["scale"] for option in options if option.get("scale") is not None), 1.0)


def _not_finite(arguments: Mapping[str, Any]) -> ValueError | None:
    # of a timestep or scale of guidance on the host
    for name, value in arguments.items():
        x = torch.tensor(value) if isinstance(value, float) else value
        if name.startswith(NUMBERS) and isinstance(x, torch.Tensor) and is_not_finite(x):
            return ValueError(f"got {name} {x.tolist()}, expected finite numbers")
    return None


def _change(before: Hashable, key: Hashable, moved: bool) -> int:
    # what has changed between two keys of `ShardedModule.key`, whose first part is the state of exchanges: they are
    # built in the first call of a kind, and freed after others, which changes no result, so that a step cache goes on
    if not moved and key == before:
        return SAME
    parts = [cast(tuple[Hashable, ...], each)[1:] for each in (before, key) if isinstance(each, tuple)]
    return EXCHANGES if not moved and len(parts) == 2 and parts[0] == parts[1] else OTHER


def _raise(key: Hashable) -> None:
    if isinstance(key, ValueError):
        raise key
