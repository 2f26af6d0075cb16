"""The hooks that cut and gather tensors at a transformer's submodules, and look at what attention modules are given.

They are hooks of diffusers (`HookRegistry`), which its own context parallelism uses as well: they wrap a submodule's
forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from diffusers.hooks.hooks import ModelHook
from torch import Tensor, nn

from seqpar.families._cuts import Boundary, CutJoined, Cutting, CutTokens, GatherTokens
from seqpar.transformer.attention import SplitAttention
from seqpar.transformer.forward import Ranks
from seqpar.transformer.seats import Seat, missed

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
