"""Installs cuts, gathers and attention on a transformer's submodules, and removes them again.

Cuts and gathers are hooks of diffusers (`HookRegistry`), which its own context parallelism uses as well: they wrap a
submodule's forward, so that compiled blocks see them.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from functools import wraps
from typing import Any
from weakref import finalize, ref

import torch
from diffusers.hooks.hooks import HookRegistry, ModelHook
from diffusers.models.attention_processor import SD3IPAdapterJointAttnProcessor2_0
from torch import Tensor, nn

from seqpar.adapter import ops
from seqpar.adapter.attention import BACKEND, Around, SplitAttention
from seqpar.adapter.cuts import Cut, Cuts, Cutting, Joint, Place, parameters, submodules
from seqpar.adapter.forward import Ranks
from seqpar.adapter.processors import OWN, own_of

READS = "seqpar reads others"  # the name of the hook that looks at what an attention module is given
CARRIED = frozenset((OWN, "_parallel_config", "_attention_backend", "seqpar_attention"))
Which = int | tuple[int | None, ...]
"""A cut by its number in a `Cutter`, or one for each element of a tuple; compilers trace plain numbers."""


class Cutter:
    """Cuts and gathers the tensors of a place; all submodules of a path share one, and so their compiled code."""

    def __init__(self, ranks: Ranks, place: Place, use: str) -> None:
        self.ranks, self._use = ranks, use
        self._cuts: list[Cut] = []
        self._gathers = tuple(place.gathers.values())
        self.gathers = tuple((index, which) for which, index in enumerate(place.gathers))
        self.inputs = tuple((name, self._which(how)) for name, how in place.inputs.items())
        self.outputs = tuple((index, self._which(how)) for index, how in place.outputs.items())
        self.number = ops.NUMBERS.add(self)

    def _which(self, how: Cutting | None) -> Any:
        if not isinstance(how, Cut):
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
            made = [x if one is None else self.value(x, one) for x, one in zip(value, each, strict=True)]
            return tuple(made) if isinstance(value, tuple) else made
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


class PlaceHook(ModelHook):
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
        made = [output] if alone else list(output)
        for index, which in self._cutter.outputs:
            made[index] = self._cutter.value(made[index], which)
        for index, which in self._cutter.gathers:
            made[index] = self._cutter.gather(made[index], which)
        return made[0] if alone else tuple(made)


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
        own, other = (self._given(name, args, kwargs) for name in ("hidden_states", "encoder_hidden_states"))
        self._attention.reads = other is not None and other is not own
        return args, kwargs

    def _given(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        index = self._places.get(name, len(args))
        return kwargs.get(name, args[index] if index < len(args) else None)


def carrying(own: Any, attention: SplitAttention, kinds: dict[type, type], processor: Any) -> Any:
    """Return a copy of a processor that computes its attention by `attention`; own: that of the attention module.

    A copy, because one processor may serve several modules, which need not join the ranks alike. A processor that
    knows no dispatcher gets a class that derives from its own and runs it inside of `Around`, with the same parameters,
    because attention modules look at them. kinds: the classes that were made; processors of one class share one, so
    that compiled blocks share their code.
    """
    made, kind = copy(processor), type(processor)
    vars(made)[OWN] = own  # not by setattr: a processor that is a module would count the other as its part
    if hasattr(processor, "_parallel_config"):
        made._parallel_config, made._attention_backend = attention, BACKEND
        return made
    if kind not in kinds:

        @wraps(kind.__call__)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            with Around(self.seqpar_attention):
                return kind.__call__(self, *args, **kwargs)

        kinds[kind] = type(f"Split{kind.__name__}", (kind,), {"__call__": call})
    made.__class__, made.seqpar_attention = kinds[kind], attention
    return made


def refuse_backend(processor: Any) -> None:
    """Raise ValueError if a user has set an attention backend, which a parallelized transformer does not use."""
    named = getattr(processor, "__dict__", {}).get("_attention_backend")
    if named is not None and named is not BACKEND:
        raise ValueError(
            f"got attention backend {getattr(named, 'value', named)} for a parallelized transformer, expected none; "
            f"call its reset_attention_backend(), and name the attention with local= of parallelize"
        )


def _refuse_own_keys(processor: Any) -> None:
    """Raise ValueError for SD3's IP-adapter: it puts the keys of a rank's image tokens beside those of the picture.

    Its second attention would then see this rank's tokens only, and nothing in its call tells that they are split.
    """
    if isinstance(processor, SD3IPAdapterJointAttnProcessor2_0):
        raise ValueError(
            "got SD3's IP-adapter on several ranks, expected none: its attention to the picture also reads the image's "
            "keys, of which each rank has a part; call unload_ip_adapter(), or use cfg= or data= ranks instead"
        )


def refuse_backends(module: nn.Module) -> None:
    """Raise ValueError if an attention backend is set in any of a transformer's processors."""
    for one in module.modules():
        refuse_backend(getattr(one, "processor", None))


@dataclass
class Seat:
    """An attention module, and the processor that it has in place of its own."""

    module: Any
    attention: SplitAttention
    ours: Any = None


Hooked = tuple["ref[nn.Module]", str]  # a submodule and the name of our hook on it


def _unhook(hooked: list[Hooked]) -> None:
    """Remove our hooks from the submodules that still exist, and empty the list."""
    while hooked:
        found, name = hooked.pop()
        if (module := found()) is not None:
            HookRegistry.check_if_exists_or_initialize(module).remove_hook(name, recurse=False)


class Installed:
    """What was put on one transformer; `refresh` follows processors that were replaced, `remove` takes all off.

    A submodule may live longer than its transformer: diffusers keeps Qwen-Image's rotary embedding in a cache for ever.
    Its hook would keep the exchanges and their buffers alive, too, so hooks are also removed when this object goes.
    """

    def __init__(self, module: nn.Module, cuts: Cuts, ranks: Ranks) -> None:
        self._module, self._cuts, self._ranks = module, cuts, ranks
        self._hooked: list[Hooked] = []
        finalize(self, _unhook, self._hooked).atexit = False
        self._seats: list[Seat] = []
        self._kinds: dict[type, type] = {}
        split: dict[Joint, SplitAttention] = {}
        for path, joint in cuts.attention.items():
            if joint not in split:
                split[joint] = SplitAttention(ranks, joint, path)
            self._seats += [Seat(one, split[joint]) for one in submodules(module, path)]
        try:
            self.refresh()
        except ValueError:
            self.remove()
            raise

    def _places(self) -> list[tuple[nn.Module, str]]:
        """Return (submodule, path) of every place; the inputs of the transformer itself are cut before its forward."""
        return [(one, path) for path in self._cuts.places if path for one in submodules(self._module, path)]

    def _hook(self) -> None:
        """Hook the places, anew where a layer was replaced, as adapters do by layers around it."""
        places, seats = self._places(), [seat for seat in self._seats if not seat.attention.joint.streams]
        modules = [*(one for one, _ in places), *(seat.module for seat in seats)]
        names = [*(f"seqpar {path}" for _, path in places), *(READS for _ in seats)]
        wanted = list(zip(map(ref, modules), names, strict=True))
        if wanted == self._hooked:
            return
        _unhook(self._hooked)
        shared = {path: Cutter(self._ranks, place, path) for path, place in self._cuts.places.items() if path}
        hooks: list[ModelHook] = [
            PlaceHook(shared[path], parameters(one) if self._cuts.places[path].inputs else []) for one, path in places
        ]
        hooks += [ReadsHook(seat.attention, parameters(seat.module)) for seat in seats]
        for module, name, hook in zip(modules, names, hooks, strict=True):
            HookRegistry.check_if_exists_or_initialize(module).register_hook(hook, name)
            self._hooked.append((ref(module), name))

    def refresh(self) -> None:
        """Put hooks and attention on what is new since the last call; ValueError if an attention backend was set."""
        self._hook()
        for seat in self._seats:
            processor = seat.module.processor
            refuse_backend(processor)
            if self._ranks.axis.size > 1:
                _refuse_own_keys(processor)
            if processor is not seat.ours:
                own = own_of(processor)
                replaced = seat.attention.joint.processor
                seat.ours = carrying(own, seat.attention, self._kinds, replaced() if replaced else own)
                seat.module.processor = seat.ours
            elif hasattr(processor, "_parallel_config") and processor._attention_backend is not BACKEND:
                processor._attention_backend = BACKEND  # `reset_attention_backend` has removed it

    def remove(self) -> None:
        """Take off hooks and attention; modules get their own processors back, with settings that were changed."""
        _unhook(self._hooked)
        for seat in self._seats:
            processor = seat.module.processor
            own = own_of(processor)
            if own is not processor and seat.attention.joint.processor is None:
                vars(own).update({name: value for name, value in vars(processor).items() if name not in CARRIED})
            seat.module.processor = own
        self._seats = []
