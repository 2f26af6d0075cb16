"""`Call`: what a diffusers transformer's `forward` is while it is parallelized.

It takes rank 0's arguments, splits guidance's branches and the batch's rows over the mesh, runs a body on the ranks of
the sequence axis, eagerly or as a CUDA graph, and returns complete results in diffusers' form on every rank.
When it wins: it is how an unmodified pipeline runs on several GPUs, and in a graph on one.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import MethodType
from typing import Any, TypeVar, cast

import torch
from diffusers.hooks.group_offloading import _is_group_offload_enabled
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from diffusers.utils.outputs import BaseOutput
from torch import Tensor, nn

from seqpar.families._cuts import HOME, NOTE, Boundary, Cuts, forward_of
from seqpar.graphs.deferred import plain
from seqpar.graphs.graphs import Capture, Graphs
from seqpar.graphs.signature import Form, form_of
from seqpar.mesh.boundary import CancelledError
from seqpar.mesh.inputs import CALL, broadcast, compared, shapes
from seqpar.mesh.mesh import Mesh
from seqpar.planner.plan import Plan
from seqpar.transformer.attention import Exactly
from seqpar.transformer.changes import Changes
from seqpar.transformer.foreign import Foreign, is_offloaded, name_of, own_forward, refuse, refuse_late
from seqpar.transformer.forward import Forward, Ranks
from seqpar.transformer.guidance import STATE, Branches, Split, Task, as_dtype, cut_rows, joined_rows
from seqpar.transformer.hooks import Cutter, Installed
from seqpar.transformer.masks import Preparation, keys_for
from seqpar.types.arguments import is_not_finite


class Body:
    """Computes a diffusers transformer's forward on all ranks of a mesh's sequence axis, as the plan says.

    The module stays the owner of its weights and is changed by hooks only. cuts: where its tokens are split. fused:
    whether functions of `families` may compute its blocks. ranks: its exchanges, and the tokens of the last
    call. returns_fp32: whether outputs are converted. Raises ValueError, the same on every rank, if the tokens cannot
    be split.
    """

    def __init__(self, module: nn.Module, mesh: Mesh, plan: Plan, cuts: Cuts, fused: bool = False) -> None:
        self.module, self._cuts, self._fused, self.returns_fp32 = module, cuts, fused, False
        self.ranks, self._watch = Ranks(mesh, plan), Changes(module)
        self._looked, self._named, self._theirs = 0, {""}, None
        self._look()
        self._root = Cutter(self.ranks, cuts.places.get("", Boundary()), "its inputs")
        self._installed: Installed | None = Installed(module, cuts, self.ranks, self._watch, fused)

    @torch.no_grad()
    def __call__(self, arguments: Mapping[str, Any], /) -> tuple[Tensor, ...]:
        """Return the transformer's outputs, complete on every rank of the sequence axis.

        arguments: those of the transformer's own forward by their names, without `return_dict`; tensors are complete
        and on the mesh's device, and all values are equal on all ranks of the sequence axis. An argument that is left
        out has its default; there may be `NOTE` (`families._cuts`), too. The outputs are those
        of `forward(..., return_dict=False)`; the next call may overwrite them. The first call of a kind builds
        exchanges; a later call with tensors of the same shapes and dtypes, the same other values and the same `state()`
        can be captured as a CUDA graph. Raises ValueError, the same on every rank, for arguments that cannot be
        computed.
        """
        self._refuse(arguments)
        self._follow()
        self._rescale(arguments)
        self._refuse_memory()
        now = self.ranks.begin()
        try:
            given = self._unmasked(now, arguments)
            for name, how in self._root.inputs:
                if name in given:
                    given[name] = self._root.value(given[name], how)
            assert self._installed is not None
            with Exactly(self.ranks) if self.ranks.plan.exact else nullcontext(), self._installed.watch.during():
                outputs = tuple(self._forward(**given, return_dict=False))
            return as_dtype(outputs, torch.float32) if self.returns_fp32 else outputs
        finally:
            self.ranks.now = None

    def why_eager(self) -> str | None:
        """Return the reason why no call can be captured as a CUDA graph (it copies from or to the host), or None."""
        return self._cuts.why_eager(self.module)

    def state(self) -> Hashable:
        """Return a key that stays equal while a captured call is valid, after following what was replaced.

        Weights, adapters, attention processors and exchanges are then unchanged. Raises ValueError if the module as it
        is now cannot be computed; another rank may find nothing wrong.
        """
        refuse_late(self.module)
        self._follow()
        count = self._watch.counted
        if count != self._looked:
            self._look()
            self._looked = count
        return self.ranks.keeper.state, self.module.training, count, self._scale()

    def told(self) -> Mapping[str, str]:
        """Return what must be equal on all ranks, as it was at the last `state`, as texts by their names.

        It says what computes, and has the texts of `seqpar.transformer.lora.texts`.
        """
        computation = "by its own modules" if self._installed is None else self._installed.fused.text()
        return {"computation": computation, **self._watch.texts()}

    def version(self) -> Hashable:
        """Return a key that stays equal while the module would compute the same, also by weights written in place."""
        return self.module.training, self._watch.count(), self._watch.values()

    def merged(self) -> Mapping[str, Tensor]:
        """Return the copies of weights with merged adapters that compute blocks, by names that all ranks have."""
        return {} if self._installed is None else self._installed.fused.copies

    def foreign(self) -> Foreign:
        """Return what others have put onto the module, as it was at the last `state`."""
        return self._watch.foreign()

    @property
    def lacks_memory(self) -> bool:
        """Return whether weights with merged adapters did not fit at the last `state`; other ranks may have room."""
        return self._installed is not None and self._installed.fused.lacks_memory

    def end_copies(self) -> None:
        """Compute adapters by their own layers from now on; every rank must call this if one of them lacks memory."""
        assert self._installed is not None
        self._installed.fused.end_copies()
        self._watch.accept()  # weights of other blocks may have become views of one matrix

    def check_delivered(self) -> None:
        """Raise TimeoutError if a rank waited in vain for another one; this waits for the device."""
        self.ranks.keeper.check()

    def release(self) -> None:
        """Undo what was put onto the module and free the exchanges, on all ranks at the same time.

        The next call builds everything again.
        """
        if self._installed is not None:
            self._installed.remove()
            self._installed = None
        self.ranks.keeper.release()

    def _unmasked(self, now: Forward, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Note the key masks of a call, and return its arguments as the forward takes them."""
        given = dict(arguments)
        note = given.pop(NOTE, None)
        now.masks, now.padding = keys_for(self._cuts, given, note)
        return {**given, NOTE: note} if self._ours else given

    def _follow(self) -> None:
        """Put hooks and attention on the module, also where it changed; ValueError if an attention backend was set."""
        if self._installed is None:
            self._installed = Installed(self.module, self._cuts, self.ranks, self._watch, self._fused)
        self._installed.refresh()

    def _rescale(self, arguments: Mapping[str, Any]) -> None:
        """Bring merged adapters to the scale of a call, by which diffusers multiplies those of all adapters."""
        assert self._installed is not None
        options = (arguments.get(name) or {} for name in ("joint_attention_kwargs", "attention_kwargs"))
        scale = next((one["scale"] for one in options if one.get("scale") is not None), 1.0)
        self._installed.fused.rescale(scale)

    def _scale(self) -> float | None:
        """Return the scale at which adapters are merged, or None."""
        fused = None if self._installed is None else self._installed.fused
        return fused.scale if fused is not None and fused.merged else None

    def _is_diffusers_own(self) -> bool:
        """Return whether the transformer's forward is as diffusers wrote it, so that another one may take its place."""
        changed = any(one.path == "" for one in self._watch.foreign().hooks)
        return not changed and type(self.module).__module__.startswith(HOME)

    def _look(self) -> None:
        """Follow the transformer's own forward, which may be replaced on its class at any time.

        Look, on several ranks, for what does not compute each token by itself: refuse it, or say that it may not.
        """
        if (theirs := own_forward(self.module)) != self._theirs:
            forward = self._cuts.forward(self.module) if self._is_diffusers_own() else None
            self._ours, self._forward = forward is not None, partial(forward, self.module) if forward else theirs
            self._theirs = theirs
        refuse(self.module, self.ranks.mesh, self._cuts.why_not(self.module), self._watch.foreign())
        if self.ranks.axis.size == 1:
            return
        named = self._watch.foreign().named
        if named not in self._named and self.ranks.mesh.is_main:
            print(
                f"seqpar: each rank's tokens alone pass {named}; where that needs all tokens results are wrong: "
                f"seqpar.verify tells",
                flush=True,
            )
        self._named.add(named)

    def _refuse_memory(self) -> None:
        """Raise OutOfMemoryError if copies do not fit, found in the middle of a call, which others compute already."""
        if self.lacks_memory and self.ranks.axis.size > 1:
            raise torch.OutOfMemoryError(
                "got copies of weights with merged adapters that do not fit into the memory of this rank, expected "
                "room for them; from the next call on, adapters are computed by their own layers on all ranks"
            )

    def _refuse(self, arguments: Mapping[str, Any]) -> None:
        name = type(self.module).__name__
        for key, reason in self._cuts.refused.items():
            if arguments.get(key) is not None:
                raise ValueError(f"got {key} for {name} on several ranks, expected None: {reason}")


NUMBERS = ("timestep", "guidance")  # how names of arguments begin that hold a number, or one for each row
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def _untraced(function: FunctionT) -> FunctionT:
    """Keep a compiler out of a function: it would take minutes for a transformer whose calls are graphs already."""
    return cast(FunctionT, torch.compiler.disable(function))


class Call:
    """The forward of a parallelized transformer, for inference; every rank must make the same calls.

    module: the transformer; its own `forward` gives the names of the arguments. body: computes calls.
    capture: captures calls as CUDA graphs; None runs them eagerly. cuts: names the transformer's key masks, if any.
    exact: whether rows of a batch stay together; see `Branches`.
    Raises the same ValueError on every rank if the forms of their arguments differ, or their adapters, attention
    processors, or what computes.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh,
        body: Body,
        capture: Capture | None,
        cuts: Cuts | None = None,
        exact: bool = False,
    ) -> None:
        self.mesh, self.body, self.graphs = mesh, body, Graphs(mesh, capture)
        self.label: str | None = None
        self.__wrapped__ = type(module).forward.__get__(module)
        self.__name__ = "forward"
        self.__signature__ = self._signature = inspect.signature(forward_of(type(module)).__get__(module))
        self._module, self._output = module, output_class(module)
        self._state: Hashable = None
        self._texts: Mapping[str, str] = {}
        self._generation = 0
        self._branches = Branches(mesh, self._computed, self._compare_alone, self._say, exact)
        self._said: set[str] = set()
        cuts = cuts or Cuts({}, {})
        moves_only = cuts.prepare is not None and body.ranks.moves_only
        self._preparation = Preparation(cuts, mesh.sequence.size, exact, moves_only)
        self._changes: dict[str, Any] = {}  # what replaces arguments of the last `rank_0s` in `computed`
        self._narrow: torch.dtype | None = None
        self.boundary: Callable[[], None] | None = None  # passed before each call, see `seqpar.mesh.boundary`
        self._aside: Callable[..., Any] | None = None  # what is called after the release
        self._reached, self._reaches = False, cast(Any, self)  # the module's last forward that has called this one
        self.check: Callable[[], None] | None = None  # raises ValueError for what no call may find
        self._grads = False  # whether the caller wants gradients

    @_untraced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the transformer's own forward returns, on every rank."""
        if self._aside is not None:
            return self._aside(*args, **kwargs)
        self.pass_boundary()
        self._grads = torch.is_grad_enabled()
        arguments = self.named(args, kwargs)
        return_dict = arguments.pop("return_dict", True)
        with torch.inference_mode(False), torch.no_grad():
            self._branches.pairs.see(next((arguments[name] for name in STATE if name in arguments), None), self.label)
            form = self.computed(self.rank_0s(arguments))
            task = self._branches.task(form, self.label, self.body.foreign().coupled)
            if task is None:
                results = self._branches.promise(form, self.body.version(), self._texts).whole
            else:
                mine, splits, eagerly = self._rows(task)
                mine = joined_rows(self.graphs.run(self.body, mine, self._generation, eagerly), splits)
                results = self._branches.results(task, mine).whole
        self._reached = True
        return self._output(*results) if return_dict else results

    def named(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by their names; those that are left out are missing."""
        arguments = self._signature.bind(*args, **kwargs).arguments
        for name, parameter in self._signature.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                arguments |= arguments.pop(name, {})
        return arguments

    @contextmanager
    def labelled(self, label: str, context: AbstractContextManager[Any]) -> Iterator[Any]:
        """Remember the name that a pipeline gives to the calls it makes inside of its own context."""
        before, self.label = self.label, label
        try:
            with context as value:
                yield value
        finally:
            self.label = before

    def keep_fp32(self, narrow: torch.dtype) -> None:
        """Return results in fp32 from now on, and take latents of any dtype; call this before the first call.

        narrow: the dtype of the weights, to which latents are converted.
        """
        self._narrow, self.body.returns_fp32 = narrow, True

    def release(self) -> None:
        """Free graphs and exchanges; every rank must call this at the same time."""
        self._branches.cancel("got a result that was not read before release(), expected it to be read earlier")
        self.graphs.release()
        self.body.release()

    def stand_aside(self, forward: Callable[..., Any] | None) -> None:
        """Call a forward, or that of the class, from now on: wrappers that users have put around this call stay.

        Rank 0 names them.
        """
        module, around = self._module, vars(self._module).get("forward")
        self._aside = forward or MethodType(type(module).forward, module)
        if around is not forward:
            self._say(f"{name_of(around)} stays the forward of the released {type(module).__name__}")

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return the forward of the module's copy, which is possible after the release only."""
        return copy.deepcopy(self._aside, memo)

    def __get__(self, instance: object, owner: type | None = None) -> Call:
        """Return this call, as a bound method does: who puts the former forward back may bind it again."""
        return self

    @_untraced
    def check_reached(self, *_: Any) -> None:
        """Raise ValueError, the same on every rank, if a forward that users have set does not call this one.

        It is a hook of the module, called after each call. A forward that has called this one may skip it later, as
        caches do.
        """
        forward, reached = vars(self._module).get("forward"), self._reached
        self._reached = False
        if reached or forward is self._reaches:
            self._reaches = forward
            return
        name = type(self._module).__name__
        by = f"by {name_of(forward)}, which does not call the one before it" if forward else "by that of its class"
        error = ValueError(
            f"The forward of {name} was replaced after parallelize {by}, so that each rank computes alone. Let it call "
            f"the forward that it replaces, or call seqpar.release first"
        )
        self._compare({CALL: f"calls {name} with another forward than that of parallelize"}, error)

    def pass_boundary(self) -> None:
        """Raise CancelledError, on all ranks alike, if the run is to end; then nothing of it is promised any more."""
        if self.boundary is None:
            return
        try:
            self.boundary()
        except CancelledError:
            self._branches.cancel("got a result of a run that was given up, expected none to be read")
            raise

    def check_delivered(self) -> None:
        """Raise TimeoutError if a rank waited in vain for another one; this waits for the device."""
        self.body.check_delivered()

    def settle(self) -> None:
        """Compute a call that was promised, before the module changes; every rank must call this at the same time."""
        self._branches.settle()

    # Rank 0's arguments ------------------------------------------------------------------------------------------

    def rank_0s(self, arguments: dict[str, Any]) -> Form:
        """Return rank 0's arguments on this rank's device, without padding that the cuts tell of.

        Every rank must call this at the same time.
        """
        form = form_of(self._converted(arguments)).each(plain)
        gradients = sorted(path for path, x in form.tensors.items() if x.requires_grad)
        state = self._looked()
        state = state if isinstance(state, ValueError) else _not_finite(arguments) or state
        shown = {"arguments": sorted(form.tensors), "requires_grad": gradients, **self._texts, **form.shown}
        shown |= {CALL: f"calls {type(self._module).__name__}", "pairs of calls": self._branches.pairs.expected}
        numbers = self._preparation.read(form) if self.mesh.is_main else 0
        numbers = self._compare({**shapes(form.tensors), **shown}, state, numbers)
        if gradients:
            raise ValueError(f"got {gradients[0]} that requires gradients, expected none: parallelize is for inference")
        device = self.mesh.device
        form, self._changes, messages = self._preparation.apply(form, numbers)
        for message in messages:
            self._say(message)
        return form.holding(broadcast(self.mesh, form.tensors)).each(lambda x: x.to(device))

    def _converted(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments with the latents in the dtype of the weights, if the state is kept in fp32."""
        if (narrow := self._narrow) is None:
            return arguments
        return {name: as_dtype(x, narrow) if name in STATE else x for name, x in arguments.items()}

    def computed(self, form: Form) -> Form:
        """Return the arguments with which the body computes: those of the last `rank_0s` without full masks."""
        return form_of(form.whole | self._changes) if self._changes else form

    def _compare(self, form: Mapping[str, object], state: Hashable, numbers: int = 0) -> int:
        """Raise the same ValueError on all ranks if `form` differs, or if a rank refuses; follow changes of the module.

        state: what `_looked` returned. numbers: what `Preparation.read` returned; rank 0's are returned.
        """
        is_first = self._state is None
        waits = self._branches.waiting
        moved = waits and not isinstance(state, ValueError) and self.body.version() != self._branches.version
        every = compared(self.mesh, form, [moved or state != self._state, self.body.lacks_memory, numbers])
        ends = any(lacks for _, lacks, _ in every)
        if ends or any(changed for changed, *_ in every):
            self.mesh.on_all_ranks(lambda: _raised(state))
            self._generation += 1  # addresses of weights may change on one rank only; all must capture again
            if waits:
                self._refuse_change()
            if not is_first:
                self._branches.pairs.changed()
        if ends:
            self.body.end_copies()
            state = self._looked()
        self._state = state
        return every[0][-1]

    def _refuse_change(self) -> None:
        """Raise ValueError, on all ranks, if the module is no longer as it was when a promised call was made."""
        version, texts = self._branches.version, self._branches.texts
        changed = sorted(name for name in texts if self._texts.get(name) != texts[name])
        message = (
            f"got {type(self._module).__name__} with other {' and '.join(changed) or 'weights'} than at a call that "
            f"was to be computed beside the next one, expected no change between them; call parallelize with cfg=False"
        )
        try:
            self.mesh.on_all_ranks(lambda: _raised(ValueError(message) if self.body.version() != version else None))
        except ValueError:
            self._branches.cancel(message)
            raise

    def _looked(self) -> Hashable:
        """Return the body's state, or the ValueError with which this rank, and maybe no other, refuses the call.

        An error is raised only after ranks have compared their calls, because the others wait there.
        """
        try:
            state = self.body.state()
            if self.mesh.world.size > 1:
                self._texts = self.body.told()
            self._refuse_offload(state != self._state)
            self._refuse_training()
            if self.check is not None:
                self.check()
        except ValueError as error:
            return error
        return state

    def _refuse_offload(self, changed: bool) -> None:
        """Raise ValueError if weights travel between host and GPU, whose addresses graphs and exchanges rely on.

        changed: whether the weights' addresses have, without which hooks are not searched for again.
        """
        offloaded = is_offloaded(self._module, changed) or (changed and _is_group_offload_enabled(self._module))
        if offloaded:
            raise ValueError(
                f"got {type(self._module).__name__} whose weights are offloaded between calls, expected them on the "
                f"GPU; call seqpar.release before enabling offload"
            )

    def _refuse_training(self) -> None:
        """Raise ValueError for a call of a training loop; print once that any other in grad mode has no gradients."""
        if not self._grads or not any(x.requires_grad for x in self._module.parameters()):
            return
        name = type(self._module).__name__
        if self._module.training:
            raise ValueError(
                f"{name} is in training mode and its parameters require gradients, but parallelize supports inference "
                f"only; call seqpar.release to train, or eval() and torch.no_grad() for inference"
            )
        self._say(
            f"parameters of {name} require gradients, but parallelize supports inference only: results have no "
            f"gradients; call it under torch.no_grad()"
        )

    def _compare_alone(self) -> None:
        """Compare the ranks before a promised call is computed, whose result was read before the next one came."""
        state = self._looked()
        self._compare({CALL: f"reads a result of {type(self._module).__name__}", **self._texts}, state)

    # Results -----------------------------------------------------------------------------------------------------

    def _say(self, message: str) -> None:
        """Print a message once, on rank 0."""
        if self.mesh.is_main and message not in self._said:
            print(f"seqpar: {message}", flush=True)
        self._said.add(message)

    def _computed(self, task: Task) -> Form:
        """Compute a task on all ranks, as `__call__` does, which does it itself to be near to the kernels."""
        mine, splits, eagerly = self._rows(task)
        return joined_rows(self.graphs.run(self.body, mine, self._generation, eagerly), splits)

    def _rows(self, task: Task) -> tuple[Form, list[Split], bool]:
        """Return this rank's rows of a call, how they were split, and whether it runs eagerly.

        With hooks of others it does, because a replay would not run them.
        """
        hooks = self.body.foreign().hooks
        if hooks and self.graphs.captures:
            self._say(f"calls run without CUDA graphs while {hooks[0]}")
        eagerly = bool(hooks) or self._branches.pairs.restless
        return *cut_rows(task.form.whole, task.axes), eagerly


def _not_finite(arguments: Mapping[str, Any]) -> ValueError | None:
    """Return the error for a timestep or scale of guidance on the host that is NaN or infinity, or None."""
    for name, value in arguments.items():
        x = torch.tensor(value) if isinstance(value, float) else value
        if name.startswith(NUMBERS) and isinstance(x, torch.Tensor) and is_not_finite(x):
            return ValueError(f"got {name} {x.tolist()}, expected finite numbers")
    return None


def _raised(state: Hashable) -> None:
    """Raise the error that was found in place of a state."""
    if isinstance(state, ValueError):
        raise state


def output_class(module: nn.Module) -> type[BaseOutput]:
    """Return the class in which a transformer's forward returns its results, which its code names."""
    forward = inspect.unwrap(forward_of(type(module)))
    named = (forward.__globals__.get(name) for name in forward.__code__.co_names)
    classes = [each for each in named if isinstance(each, type) and issubclass(each, BaseOutput)]
    return classes[0] if classes else Transformer2DModelOutput
