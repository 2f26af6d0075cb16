"""`Call`: what a diffusers transformer's `forward` is while it is parallelized.

It takes rank 0's arguments, splits guidance's branches and the batch's rows over the mesh, runs a body on the ranks of
the sequence axis, eagerly or as a CUDA graph, and returns complete results in diffusers' form on every rank.
When it wins: it is how an unmodified pipeline runs on several GPUs, and in a graph on one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar, cast

import torch
from diffusers.hooks.group_offloading import _is_group_offload_enabled
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from diffusers.utils.outputs import BaseOutput
from torch import Tensor, nn

from seqpar.adapter.body import Body
from seqpar.adapter.pairs import Pairs
from seqpar.adapter.rows import STATE, compute_rows, rows_of, split_over
from seqpar.engine.graphs import KINDS, Capture, Graphs
from seqpar.engine.promises import Ticket, plain
from seqpar.engine.signature import Form, form_of
from seqpar.inputs import CALL, agree, broadcast, shapes
from seqpar.mesh import Axis, Mesh
from seqpar.transports.collective.point_to_point import gather

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
BOTH = "cond_uncond"  # the label of a call whose rows are both branches of guidance


def _untraced(function: FunctionT) -> FunctionT:
    """Keep a compiler out of a function: it would take minutes for a transformer whose calls are graphs already."""
    return cast(FunctionT, torch.compiler.disable(function))


class Call:
    """The forward of a parallelized transformer, for inference; every rank must make the same calls.

    module: the transformer; its own `forward` gives the names of the arguments. body: computes calls.
    capture: captures calls as CUDA graphs; None runs them eagerly.
    Raises the same ValueError on every rank if the forms of their arguments differ, or their adapters, attention
    processors, or what computes.
    """

    def __init__(self, module: nn.Module, mesh: Mesh, body: Body, capture: Capture | None) -> None:
        self.mesh, self.body, self.graphs = mesh, body, Graphs(mesh, capture)
        self.label: str | None = None
        self.__wrapped__ = type(module).forward.__get__(module)  # `inspect.signature` reads it
        self.__name__ = "forward"
        self._signature = inspect.signature(self.__wrapped__)
        self._module, self._output = module, output_class(module)
        self._state: Hashable = None
        self._told: Mapping[str, str] = {}
        self._generation = 0
        self._known: dict[Hashable, Form] = {}
        self._pending: Ticket | None = None
        self._promised: tuple[Hashable, Mapping[str, str]] = None, {}  # the module as it was at the pending call
        self._pairs = Pairs()
        self._said: set[str] = set()

    @_untraced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the transformer's own forward returns, on every rank."""
        arguments = self.named(args, kwargs)
        return_dict = arguments.pop("return_dict", True)
        with torch.inference_mode(False), torch.no_grad():
            self._pairs.see(next((arguments[name] for name in STATE if name in arguments), None), self.label)
            results = self._results(self.rank_0s(arguments)).whole
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

    def release(self) -> None:
        """Free graphs and exchanges; every rank must call this at the same time."""
        if self._pending is not None:
            self._pending.cancel("got a result that was not read before release(), expected it to be read earlier")
        self._pending = None
        self.graphs.release()
        self.body.release()

    def check_delivered(self) -> None:
        """Raise TimeoutError if a rank waited in vain for another one; this waits for the device."""
        self.body.check_delivered()

    def settle(self) -> None:
        """Compute a call that was promised, before the module changes; every rank must call this at the same time."""
        if self._pending is not None:
            self._pending.fulfil()
        self._pending = None

    # Rank 0's arguments ------------------------------------------------------------------------------------------

    def rank_0s(self, arguments: dict[str, Any]) -> Form:
        """Return rank 0's arguments on this rank's device; every rank must call this at the same time."""
        form = form_of(arguments).each(plain)
        gradients = sorted(path for path, x in form.tensors.items() if x.requires_grad)
        state = self._looked()
        shown = {"arguments": sorted(form.tensors), "requires_grad": gradients, **self._told, **form.shown}
        shown |= {CALL: f"calls {type(self._module).__name__}", "pairs of calls": self._pairs.expected}
        self._compare({**shapes(form.tensors), **shown}, state)
        if gradients:
            raise ValueError(f"got {gradients[0]} that requires gradients, expected none: parallelize is for inference")
        device = self.mesh.device
        return form.holding(broadcast(self.mesh, form.tensors)).each(lambda x: x.to(device))

    def _compare(self, form: Mapping[str, object], state: Hashable) -> None:
        """Raise the same ValueError on all ranks if `form` differs, or if a rank refuses; follow changes of the module.

        state: what `_looked` returned.
        """
        is_first = self._state is None
        waits = self._pending is not None and self._pending.arguments is not None
        moved = waits and not isinstance(state, ValueError) and self.body.version() != self._promised[0]
        if agree(self.mesh, form, vote=moved or state != self._state):
            self.mesh.together(lambda: _raised(state))
            self._generation += 1  # addresses of weights may change on one rank only; all must capture again
            if self._pending is not None and self._pending.arguments is not None:
                self._refuse_change(self._pending)
            if not is_first:
                self._pairs.changed()
        self._state = state

    def _refuse_change(self, first: Ticket) -> None:
        """Raise ValueError, on all ranks, if the module is no longer as it was when a promised call was made."""
        version, texts = self._promised
        changed = sorted(name for name in texts if self._told.get(name) != texts[name])
        message = (
            f"got {type(self._module).__name__} with other {' and '.join(changed) or 'weights'} than at a call that "
            f"was to be computed beside the next one, expected no change between them; call parallelize with cfg=False"
        )
        try:
            self.mesh.together(lambda: _raised(ValueError(message) if self.body.version() != version else None))
        except ValueError:
            first.cancel(message)
            self._pending = None
            raise

    def _looked(self) -> Hashable:
        """Return the body's state, or the ValueError with which this rank, and maybe no other, refuses the call.

        An error is raised only after ranks have compared their calls, because the others wait there.
        """
        try:
            state = self.body.state()
            self._refuse_offload(state != self._state)
        except ValueError as error:
            return error
        if self.mesh.world.size > 1:
            self._told = self.body.told()
        return state

    def _refuse_offload(self, changed: bool) -> None:
        """Raise ValueError if weights travel between host and GPU, whose addresses graphs and exchanges rely on.

        changed: whether the weights' addresses have, without which diffusers' hooks are not searched for again.
        """
        found = hasattr(self._module, "_hf_hook") or (changed and _is_group_offload_enabled(self._module))
        if found:
            raise ValueError(
                f"got {type(self._module).__name__} whose weights are offloaded between calls, expected them on the "
                f"GPU; call seqpar.release before enabling offload"
            )

    # Branches and rows -------------------------------------------------------------------------------------------

    def _results(self, form: Form) -> Form:
        """Return the results of a call, or promises of them where they may be computed beside the next call."""
        first, self._pending = self._pending, None
        if first is not None and first.arguments is not None:
            if self._alike(first, form):
                return self._both(first, first.arguments, form)
            first.fulfil()
        reason = self.body.foreign().coupled
        if reason is not None:
            self._say_whole(reason)
            return self._by_rows(form, ())
        if not self._may_wait(form):
            return self._by_rows(form)
        self._promised = self.body.version(), self._told
        self._pending = Ticket(form, self._known[form.kind].each(_room), self._alone)
        return self._pending.promised()

    def _may_wait(self, form: Form) -> bool:
        """Return whether a call may be computed later, beside the step's next one, which then is sure to come."""
        if self.mesh.cfg.size == 1 or torch.is_autocast_enabled(self.mesh.device.type):
            return False
        split = split_over(self._axes, rows_of(form.whole))
        if self.label in (None, BOTH) and len(split) == len(self._axes):
            return False  # its rows are both branches
        if self.mesh.cfg not in split and self._pairs.lonely:
            self._say(
                "both halves of the cfg axis compute the same, because calls come without a second branch; "
                "parallelize(cfg=False) lets all ranks share the tokens"
            )
        return form.kind in self._known and self._pairs.expected

    def _alike(self, first: Ticket, form: Form) -> bool:
        """Return whether a call has results like those of the one before, so that both can be exchanged."""
        known = self._known.get(form.kind)
        mixed = torch.is_autocast_enabled(self.mesh.device.type)  # the first one was called without
        return not mixed and known is not None and shapes(known.tensors) == shapes(first.results.tensors)

    def _both(self, ticket: Ticket, first: Form, second: Form) -> Form:
        """Compute two calls at the same time, one on each half of the cfg axis; fulfil the first, return the second."""
        cfg = self.mesh.cfg
        mine = self._by_rows((first, second)[cfg.rank], (self.mesh.data,))
        both = {path: gather(x[None], cfg, (1, 1)) for path, x in mine.tensors.items()}
        ticket.fill({path: x[0] for path, x in both.items()})
        return mine.holding({path: x[1].clone() for path, x in both.items()})

    def _alone(self, form: Form) -> Form:
        """Compute a promised call that was read before a second one came."""
        self._pairs.alone()
        state = self._looked()
        self._compare({CALL: f"reads a result of {type(self._module).__name__}", **self._told}, state)
        with torch.autocast(self.mesh.device.type, enabled=False):  # as it was called, wherever it is read
            return self._by_rows(form)

    def _say_whole(self, reason: str) -> None:
        if self._axes:
            self._say(
                f"every rank computes the whole batch of each call, at the time of the call, because {reason}; "
                f"parallelize(cfg=False) lets all ranks share the tokens"
            )

    def _say(self, message: str) -> None:
        """Print a message once, on rank 0."""
        if self.mesh.is_main and message not in self._said:
            print(f"seqpar: {message}", flush=True)
        self._said.add(message)

    @property
    def _axes(self) -> tuple[Axis, ...]:
        """Return the axes with several ranks that can split a batch."""
        return tuple(axis for axis in (self.mesh.data, self.mesh.cfg) if axis.size > 1)

    def _by_rows(self, form: Form, axes: Sequence[Axis] | None = None) -> Form:
        """Compute a call, its rows split over the axes where there are enough."""
        whole = form.whole
        split = split_over(self._axes if axes is None else axes, rows_of(whole))
        results = compute_rows(whole, split, self._computed)
        if self.mesh.cfg.size > 1 and form.kind is not None and form.kind not in self._known:
            if len(self._known) == KINDS:
                del self._known[next(iter(self._known))]
            self._known[form.kind] = results.each(lambda x: x.new_empty(()).expand(x.shape))
        return results

    def _computed(self, form: Form) -> Form:
        """Run a body on this rank's rows; with hooks of others eagerly, because a replay would not run them."""
        hooks = self.body.foreign().hooks
        if hooks and self.graphs.captures:
            self._say(f"calls run without CUDA graphs while {hooks[0]}")
        return self.graphs.run(self.body, form, self._generation, eagerly=bool(hooks) or self._pairs.restless)


def _raised(state: Hashable) -> None:
    """Raise the error that was found in place of a state."""
    if isinstance(state, ValueError):
        raise state


def _room(like: Tensor) -> Tensor:
    """Return a tensor for results that are not there yet; NaN would show where it is read too early."""
    unknown = torch.nan if like.is_floating_point() else 0
    return torch.full(like.shape, unknown, dtype=like.dtype, device=like.device)


def output_class(module: nn.Module) -> type[BaseOutput]:
    """Return the class in which a transformer's forward returns its results, which its code names."""
    forward = inspect.unwrap(type(module).forward)
    named = (forward.__globals__.get(name) for name in forward.__code__.co_names)
    found = [each for each in named if isinstance(each, type) and issubclass(each, BaseOutput)]
    return found[0] if found else Transformer2DModelOutput
