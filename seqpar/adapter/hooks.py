"""Installs cuts, gathers and attention on a transformer's submodules, and removes them again.

Cuts and gathers are hooks of diffusers (`HookRegistry`), which its own context parallelism uses as well: they wrap a
submodule's forward, so that compiled blocks see them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from diffusers.hooks.hooks import HookRegistry, ModelHook
from torch import Tensor, nn

from seqpar.adapter import ops
from seqpar.adapter.attention import BACKEND, Around, SplitAttention
from seqpar.adapter.cuts import Cut, Cuts, Cutting, Joint, Place, parameters, submodules
from seqpar.adapter.forward import Ranks
from seqpar.shard import Shard

NAME = "seqpar"


class Cutter:
    """Cuts the tensors of a place; one for all submodules of a path, so that compiled blocks can share their code."""

    def __init__(self, ranks: Ranks, cuts: Sequence[Cut]) -> None:
        self.ranks, self._cuts = ranks, tuple(cuts)
        self.number = ops.NUMBERS.add(self)

    def cut_value(self, value: Any, how: Cutting) -> Any:
        """Return a tensor, or a tuple, list or dict of tensors, with this rank's tokens; other values unchanged."""
        if isinstance(value, Tensor) and isinstance(how, Cut):
            compiling = torch.compiler.is_compiling()
            return ops.cut(value, self.number, self._cuts.index(how)) if compiling else self.ranks.cut(value, how)
        if isinstance(value, (list, tuple)):
            each = how if isinstance(how, tuple) else (how,) * len(value)
            made = [x if cut is None else self.cut_value(x, cut) for x, cut in zip(value, each, strict=True)]
            return tuple(made) if isinstance(value, tuple) else made
        if isinstance(value, dict):
            return {key: self.cut_value(x, how) for key, x in value.items()}
        return value

    def cut_by_number(self, x: Tensor, which: int) -> Tensor:
        """Return this rank's tokens; see `seqpar.adapter.ops`."""
        return self.ranks.cut(x, self._cuts[which])

    def size_by_number(self, x: Tensor, which: int) -> list[int]:
        """Return the shape of this rank's tokens; see `seqpar.adapter.ops`."""
        cut, shape, parts = self._cuts[which], list(x.shape), self.ranks.axis.size
        if (cut.dims is None or len(shape) == cut.dims) and not shape[cut.dim] == 1 < parts:
            share, rest = divmod(shape[cut.dim], parts)
            shape[cut.dim] = share + (1 if self.ranks.axis.rank < rest else 0)
        return shape


def cutter(ranks: Ranks, place: Place) -> Cutter:
    """Return what cuts the inputs and outputs of a place."""
    every = [*place.inputs.values(), *place.outputs.values()]
    return Cutter(ranks, [cut for one in every for cut in (one if isinstance(one, tuple) else (one,)) if cut])


class PlaceHook(ModelHook):
    """Cuts a submodule's inputs and outputs, and gathers its outputs."""

    def __init__(self, cutter: Cutter, place: Place, names: Sequence[str], use: str) -> None:
        super().__init__()
        self._cutter, self._place, self._use = cutter, place, use
        self._inputs = tuple((name, names.index(name), how) for name, how in place.inputs.items())

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Cut the inputs."""
        changed = list(args)
        for name, index, how in self._inputs:
            if name in kwargs:
                kwargs[name] = self._cutter.cut_value(kwargs[name], how)
            elif index < len(changed):
                changed[index] = self._cutter.cut_value(changed[index], how)
        return tuple(changed), kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Cut or gather the outputs."""
        alone = isinstance(output, Tensor)
        made = [output] if alone else list(output)
        for index, how in self._place.outputs.items():
            made[index] = self._cutter.cut_value(made[index], how)
        for index, gather in self._place.gathers.items():
            made[index] = self._cutter.ranks.gather(made[index], gather, f"{self._use} output {index}")
        return made[0] if alone else tuple(made)


class AroundHook(ModelHook):
    """Runs an attention module whose processor knows no dispatcher inside of `Around`."""

    def __init__(self, attention: SplitAttention) -> None:
        super().__init__()
        self._attention = attention

    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward."""
        with Around(self._attention):
            return self.fn_ref.original_forward(*args, **kwargs)


class Installed:
    """What was put on one transformer; `refresh` follows processors that were replaced, `remove` takes all off."""

    def __init__(self, module: nn.Module, cuts: Cuts, ranks: Ranks) -> None:
        self._hooked: list[nn.Module] = []
        self._carried: list[tuple[nn.Module, SplitAttention, Any, dict[str, Any]]] = []
        for path, place in cuts.places.items():
            if path:
                self._place(module, path, place, ranks)
        split: dict[Joint, SplitAttention] = {}
        for path, joint in cuts.attention.items():
            attention = split.setdefault(joint, SplitAttention(ranks, joint, path))
            for one in submodules(module, path):
                self._attention(one, attention)
        self._check_shared(module)

    def _place(self, module: nn.Module, path: str, place: Place, ranks: Ranks) -> None:
        shared = cutter(ranks, place)
        for one in submodules(module, path):
            names = parameters(one) if place.inputs else []
            self._hook(one, PlaceHook(shared, place, names, path), f"{NAME} cuts {path}")

    def _hook(self, module: nn.Module, hook: ModelHook, name: str) -> None:
        HookRegistry.check_if_exists_or_initialize(module).register_hook(hook, name)
        self._hooked.append(module)

    def _attention(self, module: Any, attention: SplitAttention) -> None:
        processor = module.processor
        if hasattr(processor, "_parallel_config"):
            before = {name: vars(processor)[name] for name in CARRIED if name in vars(processor)}
            processor._parallel_config, processor._attention_backend = attention, BACKEND
            self._carried.append((module, attention, processor, before))
        else:
            self._hook(module, AroundHook(attention), f"{NAME} attention")

    def _check_shared(self, module: nn.Module) -> None:
        """Raise ValueError if one processor serves attention that joins the ranks and attention that does not."""
        ours = {id(one): attention for one, attention, _, _ in self._carried}
        roles: dict[int, set[int]] = {}
        for one in module.modules():
            if (processor := getattr(one, "processor", None)) is not None and hasattr(processor, "_parallel_config"):
                roles.setdefault(id(processor), set()).add(id(ours.get(id(one))))
        if any(len(found) > 1 for found in roles.values()):
            self.remove()
            raise ValueError(
                "got one attention processor for modules with different roles, expected one for each module; "
                "set them with set_attn_processor({name: processor, ...})"
            )

    def refresh(self) -> None:
        """Put attention on the processors that have replaced others since."""
        for index, (module, attention, processor, _) in enumerate(self._carried):
            current: Any = module.processor
            if current is processor and current._parallel_config is attention:
                continue
            if not hasattr(current, "_parallel_config"):
                raise ValueError(
                    f"got a new processor {type(current).__name__}, which cannot carry attention over several ranks, "
                    f"expected one that calls diffusers' dispatcher; set it before the transformer is made parallel"
                )
            before = {name: vars(current)[name] for name in CARRIED if name in vars(current)}
            current._parallel_config, current._attention_backend = attention, BACKEND
            self._carried[index] = module, attention, current, before

    def remove(self) -> None:
        """Take off hooks and attention; processors get back what they carried."""
        for module in self._hooked:
            registry = HookRegistry.check_if_exists_or_initialize(module)
            for name in [name for name in registry.hooks if name.startswith(NAME)]:
                registry.remove_hook(name, recurse=False)
        for _, _, processor, before in self._carried:
            for name in CARRIED:
                vars(processor).pop(name, None)
            vars(processor).update(before)
        self._hooked, self._carried = [], []


CARRIED = ("_parallel_config", "_attention_backend")
