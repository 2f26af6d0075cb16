"""The hooks that cut and gather tensors at a transformer's submodules, and look at what attention modules are given.

They are hooks of diffusers (`HookRegistry`), which its own context parallelism uses as well: they wrap a submodule's
forward, so that compiled blocks see them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from diffusers.hooks.hooks import ModelHook
from torch import Tensor, nn

from seqpar.families._cuts import Boundary, CutJoined, Cutting, CutTokens
from seqpar.transformer import ops
from seqpar.transformer.attention import SplitAttention
from seqpar.transformer.forward import Ranks
from seqpar.transformer.seats import Seat, missed

OURS = "seqpar"  # the names of our hooks begin with it
READS = f"{OURS} reads others"  # the name of the hook that looks at what an attention module is given
CHECKS = f"{OURS} checks"  # the name of the hook that checks what an attention module with a user's forward calls
FUSED = f"{OURS} computes"  # the name of the hook that computes a block by a function of ours
Which = int | tuple[int | None, ...]
"""A cut by its number in a `Cutter`, or one for each element of a tuple; compilers trace plain numbers."""


class Cutter:
    """Cuts and gathers the tensors of a place; all submodules of a path share one, and so their compiled code."""

    def __init__(self, ranks: Ranks, place: Boundary, use: str) -> None:
        self.ranks, self._use = ranks, use
        self._cuts: list[CutTokens | CutJoined] = []
        self._gathers = tuple(place.gathers.values())
        self.gathers = tuple((index, which) for which, index in enumerate(place.gathers))
        self.inputs = tuple((name, self._which(how)) for name, how in place.inputs.items())
        self.numbers, self.takes = place.numbers, bool(place.inputs or place.numbers)
        self.outputs = tuple((index, self._which(how)) for index, how in place.outputs.items())
        self.number = ops.NUMBERS.add(self)

    def _which(self, how: Cutting | None) -> Any:
        if not isinstance(how, (CutTokens, CutJoined)):
            return None if how is None else tuple(self._which(one) for one in how)
        self._cuts.append(how)
        return len(self._cuts) - 1

    def value(self, value: Any, which: Which) -> Any:
        """Return a tensor, or a tuple, list or dict of tensors, with this rank's tokens; other values unchanged."""
        if isinstance(value, Tensor) and isinstance(which, int):
            compiling = torch.compiler.is_compiling()
            return ops.cut(value, self.number, which) if compiling else self.cut_by_number(value, which)
        if isinstance(value, (list, tuple)):
            each = which if isinstance(which, tuple) else (which,) * len(value)
            parts = [x if one is None else self.value(x, one) for x, one in zip(value, each, strict=True)]
            return tuple(parts) if isinstance(value, tuple) else parts
        if isinstance(value, dict):
            return {key: self.value(x, which) for key, x in value.items()}
        return value

    def on_device(self, value: Any) -> Any:
        """Return a tensor of one number on the host as one on the mesh's device, without a copy; others unchanged."""
        device = self.ranks.mesh.device
        if not isinstance(value, Tensor) or value.device.type != "cpu" or device.type == "cpu" or not value.numel():
            return value
        first = value.flatten()[0]
        return torch.full_like(value, first.item(), device=device) if bool((value == first).all()) else value

    def gather(self, x: Tensor, which: int) -> Tensor:
        """Return a tensor with the tokens of all ranks."""
        if self.ranks.now is None:  # the transformer runs whole, outside of a body's call
            return x
        if not torch.compiler.is_compiling():
            return self.gather_by_number(x, which)
        gather = self._gathers[which]
        return ops.gather(x, self.number, which, gather.dim, self.ranks.total(gather.stream, self._use))

    def gather_by_number(self, x: Tensor, which: int) -> Tensor:
        """Return a tensor with the tokens of all ranks; see `seqpar.transformer.ops`."""
        return self.ranks.gather(x, self._gathers[which], f"{self._use} output {which}")

    def cut_by_number(self, x: Tensor, which: int) -> Tensor:
        """Return this rank's tokens; see `seqpar.transformer.ops`."""
        cut = self._cuts[which]
        return self.ranks.cut_joined(x, cut) if isinstance(cut, CutJoined) else self.ranks.cut(x, cut)

    def size_by_number(self, x: Tensor, which: int) -> list[int]:
        """Return the shape of this rank's tokens; see `seqpar.transformer.ops`."""
        cut, shape, parts = self._cuts[which], list(x.shape), self.ranks.axis.size
        assert isinstance(cut, CutTokens)  # a joined one is of an input of the transformer, which is not compiled
        if (cut.dims is None or len(shape) == cut.dims) and not shape[cut.dim] == 1 < parts:
            # the size of `Shard`, without a comparison: a compiler that keeps sizes open would have to decide it
            shape[cut.dim] = (shape[cut.dim] + parts - 1 - self.ranks.axis.rank) // parts
        return shape


class BoundaryHook(ModelHook):
    """Cuts a submodule's inputs and outputs, and gathers its outputs."""

    def __init__(self, cutter: Cutter, names: Sequence[str]) -> None:
        super().__init__()
        self._cutter = cutter
        changes = [(name, partial(cutter.value, which=which)) for name, which in cutter.inputs]
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
        if self._attention.reached or not self._attention.splits:
            return output
        return missed(output, type(module).__name__, self._path)
