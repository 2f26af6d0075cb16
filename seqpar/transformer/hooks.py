"""What `parallelize` puts on a transformer: hooks that cut and gather tokens, and functions in place of forwards.

They are hooks of diffusers (`HookRegistry`), which its own context parallelism uses as well: they wrap a submodule's
forward.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any
from weakref import finalize, ref

import torch
from diffusers.hooks.hooks import HookRegistry, ModelHook
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from seqpar.families._cuts import (
    HOME,
    Boundary,
    CutJoined,
    Cuts,
    Cutting,
    CutTokens,
    check_joined,
    parameters,
    submodules,
)
from seqpar.mesh.mesh import Mesh
from seqpar.planner.plan import Plan
from seqpar.transformer.attention import AttentionHook, BlockWatch, ShardedAttention, parts_of_users
from seqpar.transformer.blocks import FusedBlocks
from seqpar.transformer.calibration import Calibration
from seqpar.transformer.changes import Changes
from seqpar.transformer.foreign import ForeignCode, own_forward, refuse, refuse_compiled, refuse_late
from seqpar.transformer.forward import CallState
from seqpar.transformer.internals import hooks_on, is_hooked, is_outermost, register_innermost, unregister
from seqpar.transformer.step_cache import StepCache, StepCaching
from seqpar.types.protocols import Qkv8

OURS = "seqpar"  # the names of our hooks begin with it
ATTENTION = f"{OURS} attention"  # the name of the hook of an attention module that joins the ranks
STEPS = f"{OURS} step cache"  # the name of the hook of a block that a step cache may leave out
FUSED = f"{OURS} computes"  # the name of the hook that computes a block by a function of `seqpar.families`


def shard(state: CallState, value: Any, how: Cutting) -> Any:
    """Return a tensor, or a tuple, list or dict of tensors, with this rank's tokens; other values unchanged."""
    if isinstance(value, Tensor) and isinstance(how, CutJoined):
        return state.cut_joined(value, how)
    if isinstance(value, Tensor) and isinstance(how, CutTokens):
        return state.cut(value, how)
    if isinstance(value, (list, tuple)):
        cuts = how if isinstance(how, tuple) else (how,) * len(value)
        parts = [x if cut is None else shard(state, x, cut) for x, cut in zip(value, cuts, strict=True)]
        return tuple(parts) if isinstance(value, tuple) else parts
    if isinstance(value, dict):
        return {key: shard(state, x, how) for key, x in value.items()}
    return value


def on_device(state: CallState, value: Any) -> Any:
    """Return a tensor of one number on the host as one on the mesh's device, without a copy; others unchanged."""
    device = state.mesh.device
    if not isinstance(value, Tensor) or value.device.type != "cpu" or device.type == "cpu" or not value.numel():
        return value
    first = value.flatten()[0]
    return torch.full_like(value, first.item(), device=device) if bool((value == first).all()) else value


class ShardHook(ModelHook):
    """Cuts a submodule's inputs and outputs, and gathers its outputs. path: of the submodule; gathers of two submodules
    have buffers of their own.
    """

    def __init__(self, state: CallState, place: Boundary, path: str, module: nn.Module) -> None:
        super().__init__()
        self.state, self._place, self._path = state, place, path
        names = parameters(module) if place.inputs or place.numbers or place.grouped else []
        changes = [(name, partial(shard, state, how=how)) for name, how in place.inputs.items()]
        changes += [(name, partial(on_device, state)) for name in place.numbers]
        self._missing = (0, 0)  # the numbers of tokens before and after this rank's in their groups
        if place.grouped:
            of = place.grouped
            changes += [(of.rows, partial(self._of_groups, of.stream)), (of.tokens, self._filled)]
        self._inputs = tuple((name, names.index(name), change) for name, change in changes)
        for name in place.constants:
            held = getattr(module, name)
            setattr(module, name, pytree.tree_map_only(Tensor, lambda x: x.to(state.mesh.device), held))

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        changed = list(args)
        for name, index, change in self._inputs:
            if name in kwargs:
                kwargs[name] = change(kwargs[name])
            elif index < len(changed):
                changed[index] = change(changed[index])
        return tuple(changed), kwargs

    def _of_groups(self, stream: str, rows: Tensor) -> Tensor:
        self._missing = (0, 0)
        if not self.state.active:
            return rows
        groups, self._missing = self.state.groups(stream, rows.shape[1])
        return rows[:, groups]

    def _filled(self, x: Tensor) -> Tensor:
        return nn.functional.pad(x, (0, 0, *self._missing)) if any(self._missing) else x

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        if any(self._missing):
            before, after = self._missing
            output = output[:, before : output.shape[1] - after]
        if not self._place.outputs and not self._place.gathers:
            return output
        alone = isinstance(output, Tensor)
        outputs = [output] if alone else list(output)
        for index, how in self._place.outputs.items():
            outputs[index] = shard(self.state, outputs[index], how)
        if self.state.active:  # otherwise the transformer runs whole, outside of a sharded forward
            for index, how in self._place.gathers.items():
                outputs[index] = self.state.gather(outputs[index], how, f"{self._path} output {index}")
        return outputs[0] if alone else tuple(outputs)

    def retire(self) -> None:
        """Change nothing from now on; a user's forward may still call the one around which this hook was."""
        self._place, self._inputs = Boundary(), ()


class TableHook(ShardHook):
    """Besides, lets a submodule make on the mesh's device what it makes on the host (`Boundary.on_device`)."""

    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        forward: Any = self.fn_ref.original_forward
        with torch.device(self.state.mesh.device):
            return forward(*args, **kwargs)


class ShardedModule:
    """A transformer with what is put on it; it stays the owner of its weights and is changed by hooks only.

    native: whether functions of `seqpar.families` may compute its blocks. calibration: of GEMMs in 8 bits. attention:
    how attention modules are rounded to 8 bits, by path. forward: computes a call from its arguments by their names.
    takes_note: whether that is a function of the family, which takes `NOTE`. cache: leaves out blocks of similar steps.
    Raises ValueError, the same on every rank, if the tokens cannot be split.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh,
        plan: Plan,
        cuts: Cuts,
        native: bool = False,
        calibration: Calibration | None = None,
        attention: Mapping[str, Qkv8] | None = None,
        cache: StepCache | None = None,
    ) -> None:
        self._eight = dict(attention or {})
        self.module, self.cuts, self._native = module, cuts, native
        self.state, self._changes = CallState(mesh, plan), Changes(module)
        self.steps = None if cache is None else StepCaching(cache, module, self.state)
        self.forward: Callable[..., Any] = own_forward(module)
        self.takes_note, self._theirs = False, None
        self._followed: Hashable = None  # the changes up to which the module was followed
        # A submodule may live longer than its transformer: diffusers caches Qwen-Image's rotary embedding for ever. Its
        # hook would keep the exchanges and their buffers alive, so hooks are also removed when this object goes.
        self._hooked = list[tuple[ref[nn.Module], str]]()  # a submodule, and the name of our hook on it
        finalize(self, _unhook, self._hooked).atexit = False
        self._attention = dict[nn.Module, AttentionHook]()
        self.watch = BlockWatch(self.state, {})
        self.fused = FusedBlocks(module, self.state, native, calibration, partial(_parts, ref(self)))
        self._look()
        try:
            self.follow()
        except ValueError:
            self._remove()
            raise

    # What a call depends on ---------------------------------------------------------------------------------------

    def key(self) -> Hashable:
        """Follow what was replaced, and return a key that stays equal while a captured call is valid.

        Weights, adapters, attention processors and exchanges are then unchanged. Raises ValueError if the module as it
        is now cannot be computed; another rank may find nothing wrong.
        """
        refuse_late(self.module)
        self.follow()
        scale = self.fused.scale if self.fused.merged else None
        return self.state.exchanges.state, self.module.training, self._followed, scale

    def version(self) -> Hashable:
        """Return a key that also changes with weights that are written in place."""
        ways = self.fused.eight, self.fused.on, self.state.eight
        return self.module.training, self._changes.count(), self._changes.values(), *ways

    def texts(self) -> Mapping[str, str]:
        """Return what must be equal on all ranks, as it was at the last `key`: what computes, and adapters."""
        count = self.attentions_in_8_bits if self.state.eight else 0
        attention = f", {count} of {len(self._attention)} attentions in 8 bits" if count else ""
        cache = "" if self.steps is None else f", step cache {self.steps.options}"
        return {"computation": self.fused.text() + attention + cache, **self._changes.texts()}

    @property
    def attentions_in_8_bits(self) -> int:
        """The number of attention modules with numbers for 8 bits."""
        return sum(hook.eight is not None for hook in self._attention.values())

    @property
    def keeps_masks(self) -> bool:
        """Whether attention of a user gets the masks of a call: on one rank it may compute without torch's."""
        return self.state.axis.size == 1 and any(hook.is_foreign for hook in self._attention.values())

    @property
    def is_eight(self) -> bool:
        """Whether GEMMs or attention are computed in 8 bits."""
        return self.fused.is_copied or (self.state.eight and bool(self._eight))

    @property
    def foreign(self) -> ForeignCode:
        """Third-party code on the module, as it was at the last `key`."""
        return self._changes.foreign()

    def why_eager(self) -> str | None:
        """Return why no call can be captured as a CUDA graph, or None."""
        if self.cuts.forward(self.module) is not None and not self.takes_note:
            return f"the forward of {type(self.module).__name__} may read values on the host, or copy them from it"
        return self.cuts.why_eager(self.module)

    def end_copies(self) -> None:
        """Compute adapters by their own layers from now on; collective, if one of the ranks lacks memory."""
        self.fused.end_copies()
        self._changes.accept()  # weights of other blocks may have become views of one matrix

    # Hooks --------------------------------------------------------------------------------------------------------

    def follow(self) -> None:
        """Put hooks on what has changed since the last call; what this puts on counts as no change.

        ValueError if a backend was set, or for attention that would see the tokens of one rank only. After an error it
        is tried again in the next call.
        """
        if self._changed() == self._followed:
            return
        refuse_compiled(self.module)
        if self.state.axis.size > 1:
            check_joined(self.module, self.cuts)
        self._find_attention()
        self.fused.refresh(self.foreign.hooks, self._attention)
        self._hook()
        for part, hook in self._attention.items():
            hook.follow(part)
        self.watch.remove()
        self.watch = BlockWatch(self.state, parts_of_users(self.module))
        self._look()
        self._changes.accept()
        self._followed = self._changed()

    def _changed(self) -> Hashable:
        # weights in 8 bits are copies, which do not follow what is written to the weights
        count = self._changes.count()
        return (count, self._changes.values()) if self.fused.is_copied else count

    def release(self) -> None:
        """Take all off and free the exchanges; collective. The next call puts all on again."""
        self._remove()
        self.fused = FusedBlocks(
            self.module, self.state, self._native, self.fused.calibration, partial(_parts, ref(self))
        )
        self.state.exchanges.release()

    def _remove(self) -> None:
        _unhook(self._hooked)
        self.watch.remove()
        self._attention, self._followed = {}, None

    def _look(self) -> None:
        # The transformer's own forward may be replaced on its class at any time. On several ranks, what does not
        # compute each token by itself is refused, or printed where it may not.
        foreign = self.foreign
        if (theirs := own_forward(self.module)) != self._theirs:
            # the family's forward takes the place of one as diffusers wrote it alone
            plain = type(self.module).__module__.startswith(HOME) and not any(one.path == "" for one in foreign.hooks)
            forward = self.cuts.forward(self.module) if plain else None
            self.forward = theirs if forward is None else partial(forward, self.module)
            self.takes_note, self._theirs = forward is not None, theirs
        refuse(self.module, self.state.mesh, self.cuts.why_not(self.module), foreign)
        if self.state.axis.size > 1 and foreign.named:
            self.state.say(
                f"each rank's tokens alone pass {foreign.named}; where that needs all tokens results are wrong: "
                f"seqpar.verify tells"
            )

    def _find_attention(self) -> None:
        paths = {part: name for name, part in self.module.named_modules()}
        before, self._attention = self._attention, {}
        joints = {hook.attention.joint: hook.attention for hook in before.values()}
        for path, joint in self.cuts.attention.items():
            attention = joints.setdefault(joint, ShardedAttention(self.state, joint, path))
            for part in submodules(self.module, path):
                hook = before.get(part)
                keeps = hook is not None and hook.attention is attention
                at = paths[part]
                self._attention[part] = hook if keeps else AttentionHook(attention, part, at, self._eight.get(at))

    def _hook(self) -> None:
        # Again where a layer was replaced, as adapters do, or where another hook is around ours: inside of a hook that
        # skips a block, ours would not cut and gather the tokens that pass the block by. The inputs of the transformer
        # itself are cut before its forward.
        places = [(part, path) for path in self.cuts.places if path for part in submodules(self.module, path)]
        steps = {} if self.steps is None else self.steps.hooks(self.module)
        for hook in steps.values():
            hook.fused = self.fused
        fused = {part: hook for part, hook in self.fused.hooks.items() if part not in steps}
        hooks: tuple[tuple[Mapping[nn.Module, Any], str], ...]
        hooks = ((self._attention, ATTENTION), (steps, STEPS), (fused, FUSED))
        inner = [(part, name) for inside, name in hooks for part in inside]
        wanted = [(ref(part), name) for part, name in (*((part, f"{OURS} {path}") for part, path in places), *inner)]
        in_place = wanted == self._hooked and all(is_outermost(part, OURS) for part, _ in places)
        if in_place and all(is_hooked(part) for part, _ in inner):
            return
        _unhook(self._hooked)
        paths = {part: name for name, part in self.module.named_modules()}
        for part, path in places:
            place = self.cuts.places[path]
            hook = (TableHook if place.on_device else ShardHook)(self.state, place, paths[part], part)
            HookRegistry.check_if_exists_or_initialize(part).register_hook(hook, f"{OURS} {path}")
        for inside, name in hooks:
            for part, hook in inside.items():
                register_innermost(part, hook, name)
        self._hooked += wanted


def _parts(sharded: ref[ShardedModule]) -> Mapping[nn.Module, int]:
    # of a step cache; a strong reference would be a cycle, which keeps the exchanges until the garbage collector runs
    owner = sharded()
    return {} if owner is None or owner.steps is None else owner.steps.parts(owner.module)


def _unhook(hooked: list[tuple[ref[nn.Module], str]]) -> None:
    # from the submodules that still exist
    while hooked:
        reference, name = hooked.pop()
        if (module := reference()) is not None:
            if isinstance(hook := hooks_on(module).get(name), ShardHook):
                hook.retire()
            unregister(module, name)
