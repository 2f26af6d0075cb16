"""The hooks that cut and gather tensors at a transformer's submodules, and look at what attention modules are given.

They are hooks of diffusers (`HookRegistry`), which its own context parallelism uses as well: they wrap a submodule's
forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any
from weakref import finalize, ref

import torch
from diffusers.hooks.hooks import HookRegistry, ModelHook
from torch import Tensor, nn

from seqpar.families._cuts import (
    Boundary,
    CutJoined,
    Cuts,
    Cutting,
    CutTokens,
    GatherTokens,
    Joint,
    check_joined,
    parameters,
    submodules,
)
from seqpar.transformer.attention import Seat, SplitAttention, missed
from seqpar.transformer.blocks import FusedBlocks
from seqpar.transformer.changes import Changes
from seqpar.transformer.foreign import refuse_compiled
from seqpar.transformer.forward import Ranks
from seqpar.transformer.watch import BlockWatch, parts_of_users

OURS = "seqpar"  # the names of our hooks begin with it
READS = f"{OURS} reads others"  # the name of the hook that looks at what an attention module is given
CHECKS = f"{OURS} checks"  # the name of the hook that checks what an attention module with a user's forward calls
FUSED = f"{OURS} computes"  # the name of the hook that computes a block by a function of ours


class Cutter:
    """Cuts and gathers the tensors of a place, which several submodules of one path may share."""

    def __init__(self, ranks: Ranks, place: Boundary, use: str) -> None:
        self.ranks, self._use = ranks, use
        self.inputs, self.outputs = tuple(place.inputs.items()), tuple(place.outputs.items())
        self.gathers = tuple(place.gathers.items())
        self.numbers, self.takes = place.numbers, bool(place.inputs or place.numbers)

    def value(self, value: Any, how: Cutting) -> Any:
        """Return a tensor, or a tuple, list or dict of tensors, with this rank's tokens; other values unchanged."""
        if isinstance(value, Tensor) and isinstance(how, CutJoined):
            return self.ranks.cut_joined(value, how)
        if isinstance(value, Tensor) and isinstance(how, CutTokens):
            return self.ranks.cut(value, how)
        if isinstance(value, (list, tuple)):
            cuts = how if isinstance(how, tuple) else (how,) * len(value)
            parts = [x if cut is None else self.value(x, cut) for x, cut in zip(value, cuts, strict=True)]
            return tuple(parts) if isinstance(value, tuple) else parts
        if isinstance(value, dict):
            return {key: self.value(x, how) for key, x in value.items()}
        return value

    def on_device(self, value: Any) -> Any:
        """Return a tensor of one number on the host as one on the mesh's device, without a copy; others unchanged."""
        device = self.ranks.mesh.device
        if not isinstance(value, Tensor) or value.device.type != "cpu" or device.type == "cpu" or not value.numel():
            return value
        first = value.flatten()[0]
        return torch.full_like(value, first.item(), device=device) if bool((value == first).all()) else value

    def gather(self, x: Tensor, index: int, gather: GatherTokens) -> Tensor:
        """Return a tensor with the tokens of all ranks. index: which of the place's outputs it is."""
        if self.ranks.now is None:  # the transformer runs whole, outside of a body's call
            return x
        return self.ranks.gather(x, gather, f"{self._use} output {index}")


class BoundaryHook(ModelHook):
    """Cuts a submodule's inputs and outputs, and gathers its outputs."""

    def __init__(self, cutter: Cutter, names: Sequence[str]) -> None:
        super().__init__()
        self._cutter = cutter
        changes = [(name, partial(cutter.value, how=how)) for name, how in cutter.inputs]
        changes += [(name, cutter.on_device) for name in cutter.numbers]
        self._inputs = tuple((name, names.index(name), change) for name, change in changes)

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Cut the inputs, and make those that are numbers of the host on the device."""
        changed = list(args)
        for name, index, change in self._inputs:
            if name in kwargs:
                kwargs[name] = change(kwargs[name])
            elif index < len(changed):
                changed[index] = change(changed[index])
        return tuple(changed), kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Cut or gather the outputs."""
        if not self._cutter.outputs and not self._cutter.gathers:
            return output
        alone = isinstance(output, Tensor)
        outputs = [output] if alone else list(output)
        for index, how in self._cutter.outputs:
            outputs[index] = self._cutter.value(outputs[index], how)
        for index, how in self._cutter.gathers:
            outputs[index] = self._cutter.gather(outputs[index], index, how)
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
        if self._attention.reached or not self._attention.splits:
            return output
        raise missed(type(module).__name__, self._path)


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

    def __init__(self, module: nn.Module, cuts: Cuts, ranks: Ranks, changes: Changes, fused: bool) -> None:
        self._module, self._cuts, self._ranks, self._changes = module, cuts, ranks, changes
        self.fused = FusedBlocks(module, ranks, fused)
        self._followed = -1  # the count of changes up to which the module was followed
        self._hooked: list[Hooked] = []
        finalize(self, _unhook, self._hooked).atexit = False
        self._seats: list[Seat] = []
        self._split: dict[Joint, SplitAttention] = {}
        self.watch = BlockWatch(ranks, {})
        for path, joint in cuts.attention.items():
            if joint not in self._split:
                self._split[joint] = SplitAttention(ranks, joint, path)
        try:
            self.refresh()
        except ValueError:
            self.remove()
            raise

    def refresh(self) -> None:
        """Put hooks and attention on what has changed since the last call.

        ValueError if a backend was set, or for attention that would see the tokens of one rank only.

        What this puts on counts as no change. After an error it is tried again in the next call.
        """
        count = self._changes.count()
        if count == self._followed:
            return
        refuse_compiled(self._module)
        if self._ranks.axis.size > 1:
            check_joined(self._module, self._cuts)
        self._take_seats()
        self.fused.refresh(self._changes.foreign().hooks, {seat.module: seat.attention for seat in self._seats})
        self._hook()
        for seat in self._seats:
            seat.refresh()
        self.watch.remove()
        self.watch = BlockWatch(self._ranks, parts_of_users(self._module))
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
        inner = [*((seat.module, CHECKS) for seat in checked), *((block, FUSED) for block in self.fused.hooks)]
        wanted = [(ref(one), name) for one, name in (*outer, *inner)]
        in_place = all(_is_outermost(one) for one, _ in outer) if wanted == self._hooked else False
        if in_place and all(_is_hooked(one) for one, _ in inner):
            return
        _unhook(self._hooked)
        cutters = {path: Cutter(self._ranks, place, path) for path, place in self._cuts.places.items() if path}
        hooks = [BoundaryHook(cutters[path], parameters(one) if cutters[path].takes else []) for one, path in places]
        more = [ReadsHook(seat.attention, parameters(seat.module)) for seat in readers]
        for (module, name), hook in zip(outer, (*hooks, *more), strict=True):
            HookRegistry.check_if_exists_or_initialize(module).register_hook(hook, name)
        for seat in checked:
            _register_innermost(HookRegistry.check_if_exists_or_initialize(seat.module), ChecksHook(seat), CHECKS)
        self._hook_blocks()
        self._hooked += wanted

    def _hook_blocks(self) -> None:
        """Put the hooks of blocks inside of all others; what they are around is the block's own forward."""
        for block, hook in self.fused.hooks.items():
            _register_innermost(HookRegistry.check_if_exists_or_initialize(block), hook, FUSED)
            calls: Any = hook.fn_ref
            own = calls.original_forward = calls.forward  # kept by the partial: a user's forward may call an old one
            calls.forward = partial(hook.compute, own, block)

    def remove(self) -> None:
        """Take off hooks and attention; modules get their own processors back, with settings that were changed."""
        _unhook(self._hooked)
        self.watch.remove()
        for seat in self._seats:
            seat.leave()
        self._seats, self._followed = [], -1
