"""Installs cuts, gathers and attention on a transformer's submodules, and removes them again.

Cuts and gathers are hooks of diffusers (`HookRegistry`), which its own context parallelism uses as well: they wrap a
submodule's forward, so that compiled blocks see them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import finalize, ref

import torch
from diffusers.hooks.group_offloading import _is_group_offload_enabled
from diffusers.hooks.hooks import HookRegistry, ModelHook
from torch import Tensor, nn

from seqpar.adapter import ops
from seqpar.adapter.attention import SplitAttention
from seqpar.adapter.changes import Changes
from seqpar.adapter.cuts import Boundary, Cuts, Cutting, CutTokens, Joint, parameters, submodules
from seqpar.adapter.forward import Ranks
from seqpar.adapter.seats import Seat, missed, refuse_backend

OURS = "seqpar"  # the names of our hooks begin with it
READS = f"{OURS} reads others"  # the name of the hook that looks at what an attention module is given
CHECKS = f"{OURS} checks"  # the name of the hook that checks what an attention module with a user's forward calls
Which = int | tuple[int | None, ...]
"""A cut by its number in a `Cutter`, or one for each element of a tuple; compilers trace plain numbers."""


class Cutter:
    """Cuts and gathers the tensors of a place; all submodules of a path share one, and so their compiled code."""

    def __init__(self, ranks: Ranks, place: Boundary, use: str) -> None:
        self.ranks, self._use = ranks, use
        self._cuts: list[CutTokens] = []
        self._gathers = tuple(place.gathers.values())
        self.gathers = tuple((index, which) for which, index in enumerate(place.gathers))
        self.inputs = tuple((name, self._which(how)) for name, how in place.inputs.items())
        self.outputs = tuple((index, self._which(how)) for index, how in place.outputs.items())
        self.number = ops.NUMBERS.add(self)

    def _which(self, how: Cutting | None) -> Any:
        if not isinstance(how, CutTokens):
            return None if how is None else tuple(self._which(one) for one in how)
        self._cuts.append(how)
        return len(self._cuts) - 1

    def value(self, value: Any, which: Which) -> Any:
        """Return a tensor, or a tuple, list or dict of tensors, with this rank's tokens; other values unchanged."""
        if isinstance(value, Tensor) and isinstance(which, int):
            compiling = torch.compiler.is_compiling()
            return ops.cut(value, self.number, which) if compiling else self.ranks.cut(value, self._cuts[which])
        if isinstance(value, (list, tuple)):
            each = which if isinstance(which, tuple) else (which,) * len(value)
            parts = [x if one is None else self.value(x, one) for x, one in zip(value, each, strict=True)]
            return tuple(parts) if isinstance(value, tuple) else parts
        if isinstance(value, dict):
            return {key: self.value(x, which) for key, x in value.items()}
        return value

    def gather(self, x: Tensor, which: int) -> Tensor:
        """Return a tensor with the tokens of all ranks."""
        if self.ranks.now is None:  # the transformer runs whole, outside of a body's call
            return x
        if not torch.compiler.is_compiling():
            return self.gather_by_number(x, which)
        gather = self._gathers[which]
        return ops.gather(x, self.number, which, gather.dim, self.ranks.total(gather.stream, self._use))

    def gather_by_number(self, x: Tensor, which: int) -> Tensor:
        """Return a tensor with the tokens of all ranks; see `seqpar.adapter.ops`."""
        return self.ranks.gather(x, self._gathers[which], f"{self._use} output {which}")

    def cut_by_number(self, x: Tensor, which: int) -> Tensor:
        """Return this rank's tokens; see `seqpar.adapter.ops`."""
        return self.ranks.cut(x, self._cuts[which])

    def size_by_number(self, x: Tensor, which: int) -> list[int]:
        """Return the shape of this rank's tokens; see `seqpar.adapter.ops`."""
        cut, shape, parts = self._cuts[which], list(x.shape), self.ranks.axis.size
        if (cut.dims is None or len(shape) == cut.dims) and not shape[cut.dim] == 1 < parts:
            # the size of `Shard`, without a comparison: a compiler that keeps sizes open would have to decide it
            shape[cut.dim] = (shape[cut.dim] + parts - 1 - self.ranks.axis.rank) // parts
        return shape


class BoundaryHook(ModelHook):
    """Cuts a submodule's inputs and outputs, and gathers its outputs."""

    def __init__(self, cutter: Cutter, names: Sequence[str]) -> None:
        super().__init__()
        self._cutter = cutter
        self._inputs = tuple((name, names.index(name), which) for name, which in cutter.inputs)

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Cut the inputs."""
        changed = list(args)
        for name, index, which in self._inputs:
            if name in kwargs:
                kwargs[name] = self._cutter.value(kwargs[name], which)
            elif index < len(changed):
                changed[index] = self._cutter.value(changed[index], which)
        return tuple(changed), kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Cut or gather the outputs."""
        if not self._cutter.outputs and not self._cutter.gathers:
            return output
        alone = isinstance(output, Tensor)
        outputs = [output] if alone else list(output)
        for index, which in self._cutter.outputs:
            outputs[index] = self._cutter.value(outputs[index], which)
        for index, which in self._cutter.gathers:
            outputs[index] = self._cutter.gather(outputs[index], which)
        return outputs[0] if alone else tuple(outputs)


class ReadsHook(ModelHook):
    """Tells a split attention whether its module is given tokens besides its own.

    A module that is given its own tokens twice (as Lumina 2's are) reads no others.
    """

    def __init__(self, attention: SplitAttention, names: Sequence[str]) -> None:
        super().__init__()
        self._attention = attention
        self._places = {name: index for index, name in enumerate(names)}

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Look at the inputs."""
        own, other = (self._argument(name, args, kwargs) for name in ("hidden_states", "encoder_hidden_states"))
        self._attention.reads = other is not None and other is not own
        return args, kwargs

    def _argument(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        index = self._places.get(name, len(args))
        return kwargs.get(name, args[index] if index < len(args) else None)


class ChecksHook(ModelHook):
    """Checks that an attention module has reached split attention, where its forward is not diffusers' own.

    It is inside of all other hooks: those of caches may call no forward.
    """

    def __init__(self, seat: Seat) -> None:
        super().__init__()
        self._attention, self._path = seat.attention, seat.path

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Forget what was reached before."""
        self._attention.reached = False
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Raise ValueError if it was not reached, although tokens are split."""
        attention = self._attention
        return (
            output if attention.reached or not attention.splits else missed(output, type(module).__name__, self._path)
        )


def _is_hooked(module: nn.Module) -> bool:
    """Return whether a module's forward is the outermost hook of diffusers, and not one that was put in its place."""
    forward: Any = vars(module).get("forward")
    return getattr(getattr(forward, "func", None), "__module__", None) == HookRegistry.__module__


def _computes_itself(module: nn.Module) -> bool:
    """Return whether a module's forward, inside of all hooks, is not diffusers' own."""
    forward: Any = module.forward
    if _is_hooked(module):
        registry: Any = vars(module)["_diffusers_hook"]
        inner = registry.hooks[CHECKS].fn_ref if CHECKS in registry.hooks else registry._fn_refs[0]
        forward = inner.original_forward or inner.forward
    code = getattr(forward, "__func__", forward)  # `functools.wraps` changes its `__module__`, and not its globals
    return getattr(code, "__globals__", {}).get("__name__", "").partition(".")[0] != "diffusers"


def _register_innermost(registry: Any, hook: ModelHook, name: str) -> None:
    """Register a hook that the hooks of others call, unless a user's forward is around these."""
    module, outer, inside = registry._module_ref, registry._module_ref.forward, _is_hooked(registry._module_ref)
    registry.register_hook(hook, name)
    if not inside:
        return
    first, call = registry._fn_refs[0], module.forward
    calls = "forward" if first.original_forward is None else "original_forward"
    hook.fn_ref.forward, module.forward = getattr(first, calls), outer
    setattr(first, calls, call)
    for order in (registry._hook_order, registry._fn_refs):
        order.insert(0, order.pop())
    registry.hooks = {name: registry.hooks.pop(name), **registry.hooks}


def refuse_backends(module: nn.Module) -> None:
    """Raise ValueError if an attention backend is set in any of a transformer's processors."""
    for one in module.modules():
        refuse_backend(getattr(one, "processor", None))


def is_offloaded(module: nn.Module) -> bool:
    """Return whether hooks of accelerate or diffusers move a transformer's weights between host and GPU."""
    return hasattr(module, "_hf_hook") or _is_group_offload_enabled(module)


Hooked = tuple["ref[nn.Module]", str]  # a submodule and the name of our hook on it


def _unhook(hooked: list[Hooked]) -> None:
    """Remove our hooks from the submodules that still exist, and empty the list."""
    while hooked:
        reference, name = hooked.pop()
        if (module := reference()) is not None:
            _remove(HookRegistry.check_if_exists_or_initialize(module), name)


def _remove(registry: HookRegistry, name: str) -> None:
    """Remove a hook, but no forward that a user has put in the place of all hooks.

    diffusers forgets what the next hook around it calls, if that computes a forward of its own.
    """
    module: Any = registry._module_ref
    replaced = None if _is_hooked(module) else vars(module).get("forward")
    names = [*registry.hooks, ""]
    around = registry.hooks.get(names[names.index(name) + 1]) if name in registry.hooks else None
    forward = around.fn_ref.forward if around is not None else None
    registry.remove_hook(name, recurse=False)
    if around is not None and around.fn_ref.original_forward is not None:
        around.fn_ref.original_forward, around.fn_ref.forward = around.fn_ref.forward, forward
    if replaced is not None:
        module.forward = replaced


def _is_outermost(module: nn.Module) -> bool:
    """Return whether a hook of ours is around those of others."""
    return next(reversed(vars(module)["_diffusers_hook"].hooks), "").startswith(OURS)


class Installed:
    """What was put on one transformer; `refresh` follows processors that were replaced, `remove` takes all off.

    A submodule may live longer than its transformer: diffusers keeps Qwen-Image's rotary embedding in a cache for ever.
    Its hook would keep the exchanges and their buffers alive, too, so hooks are also removed when this object goes.
    """

    def __init__(self, module: nn.Module, cuts: Cuts, ranks: Ranks, changes: Changes) -> None:
        self._module, self._cuts, self._ranks, self._changes = module, cuts, ranks, changes
        self._followed = -1  # the count of changes up to which the module was followed
        self._hooked: list[Hooked] = []
        finalize(self, _unhook, self._hooked).atexit = False
        self._seats: list[Seat] = []
        self._split: dict[Joint, SplitAttention] = {}
        for path, joint in cuts.attention.items():
            if joint not in self._split:
                self._split[joint] = SplitAttention(ranks, joint, path)
        try:
            self.refresh()
        except ValueError:
            self.remove()
            raise

    def refresh(self) -> None:
        """Put hooks and attention on what has changed since the last call; ValueError if a backend was set.

        What this puts on counts as no change. After an error it is tried again in the next call.
        """
        count = self._changes.count()
        if count == self._followed:
            return
        self._take_seats()
        self._hook()
        for seat in self._seats:
            seat.refresh()
        self._changes.accept()
        self._followed = count

    def _take_seats(self) -> None:
        """Find the attention modules; those that were replaced get their own processors back."""
        names = {one: name for name, one in self._module.named_modules()}
        before = {(seat.module, seat.attention): seat for seat in self._seats}
        self._seats = []
        for path, joint in self._cuts.attention.items():
            split = self._split[joint]
            modules = submodules(self._module, path)
            self._seats += [before.pop((one, split), None) or Seat(names[one], one, split) for one in modules]
        for seat in before.values():
            seat.leave()

    def _hook(self) -> None:
        """Hook the places, anew where a layer was replaced, as adapters do, or where another hook is around ours.

        Inside of a hook that skips a block, ours would not cut and gather the tokens that pass the block by. The inputs
        of the transformer itself are cut before its forward.
        """
        places = [(one, path) for path in self._cuts.places if path for one in submodules(self._module, path)]
        readers = [seat for seat in self._seats if not seat.attention.joint.streams]
        checked = [seat for seat in self._seats if _computes_itself(seat.module)]
        outer = [*((one, f"{OURS} {path}") for one, path in places), *((seat.module, READS) for seat in readers)]
        wanted = [*((ref(one), name) for one, name in outer), *((ref(seat.module), CHECKS) for seat in checked)]
        in_place = all(_is_outermost(one) for one, _ in outer) if wanted == self._hooked else False
        if in_place and all(_is_hooked(seat.module) for seat in checked):
            return
        _unhook(self._hooked)
        cutters = {path: Cutter(self._ranks, place, path) for path, place in self._cuts.places.items() if path}
        hooks = [BoundaryHook(cutters[path], parameters(one) if cutters[path].inputs else []) for one, path in places]
        more = [ReadsHook(seat.attention, parameters(seat.module)) for seat in readers]
        for (module, name), hook in zip(outer, (*hooks, *more), strict=True):
            HookRegistry.check_if_exists_or_initialize(module).register_hook(hook, name)
        for seat in checked:
            _register_innermost(HookRegistry.check_if_exists_or_initialize(seat.module), ChecksHook(seat), CHECKS)
        self._hooked += wanted

    def remove(self) -> None:
        """Take off hooks and attention; modules get their own processors back, with settings that were changed."""
        _unhook(self._hooked)
        for seat in self._seats:
            seat.leave()
        self._seats, self._followed = [], -1
