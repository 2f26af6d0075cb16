"""Makes a model of this package compute with the weights of a diffusers module, which stays their owner.

A weight of ours that is one weight of the module shares its memory. A fused weight (q, k and v in one matrix) is made
once, and the module's weights become views of its rows, so that the module's state dict, `save_pretrained` and LoRA's
`fuse_lora` go on working, and what is written there is what our model reads. At most one layer is held twice meanwhile.
When it wins: always, for a model that is loaded by diffusers; a second copy of FLUX.1's weights would take 24 GB.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from seqpar.adapter import adapters
from seqpar.types.fused import Matrix
from seqpar.types.keys import KeyMap
from seqpar.weights.checkpoint import Checkpoint, check


@dataclass(frozen=True)
class Holder:
    """The module that holds a parameter, below adapters' layers, and the parameter's name there."""

    owner: nn.Module
    name: str

    @property
    def parameter(self) -> Tensor:
        """Return the parameter that is there now."""
        return self.owner.get_parameter(self.name)


def places(module: nn.Module) -> dict[str, Holder]:
    """Return key -> holder of all parameters, under the keys that they have without adapters."""
    return {
        f"{prefix}.{name}" if prefix else name: Holder(owner, name)
        for prefix, owner in adapters.without_adapters(module)
        for name, parameter in owner._parameters.items()
        if parameter is not None
    }


def check_places(model: nn.Module, name: str, holders: Mapping[str, Holder], keys: KeyMap) -> None:
    """Raise ValueError if the module's parameters do not make those of `model`, by their keys and shapes.

    Each source must be one parameter unchanged, or the rows of several.
    """
    shapes = {key: tuple(holder.parameter.shape) for key, holder in holders.items()}
    check(model, Checkpoint(name, shapes, lambda key: holders[key].parameter), keys)
    for ours, source in keys.sources.items():
        parts = [torch.empty(shapes[key], device="meta") for key in source.keys]
        if len(parts) == 1 and source.combine(*parts) is not parts[0]:
            raise ValueError(f"got {source.keys[0]}, which {ours} holds in another form, expected it unchanged")
        if len(parts) > 1 and source.combine(*parts).shape != torch.cat(parts).shape:
            raise ValueError(f"got {', '.join(source.keys)}, which {ours} holds in another form, expected their rows")


@torch.no_grad()
def adopt(model: nn.Module, holders: Mapping[str, Holder], keys: KeyMap) -> None:
    """Make the parameters of `model` share memory with the module's, which become views of the fused ones.

    It can be repeated, and then makes only those anew whose parts are no longer neighbours in memory, as after the
    module was moved or a weight was replaced.
    """
    for name, source in keys.sources.items():
        put(model, name, rows([holders[key].parameter for key in source.keys]))


@torch.no_grad()
def merge(
    model: nn.Module, module: nn.Module, keys: KeyMap, scale: float, before: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Put weights with merged adapters in place of those that adapters touch; return them by the names of `model`.

    Call it after `adopt`, which puts the module's own weights back. They are computed in fp32 and rounded once.
    scale: see `adapters.merged`. before: what the last call returned; its memory is written again where it fits, so
    that a change of scales alone keeps all addresses.
    """
    where, merged = _rows_of(places(module), keys), {}
    for path, layer in adapters.layers(module):
        if not adapters.active(layer):
            continue
        for kind, value in zip(("weight", "bias"), adapters.merged(layer, scale), strict=True):
            if value is not None:
                ours, mine = where[f"{path}.{kind}"]
                if ours not in merged:
                    merged[ours] = copied_into(model.get_parameter(ours), before.get(ours))
                merged[ours][mine].copy_(value)
    for name, tensor in merged.items():
        put(model, name, tensor)
    return merged


def with_adapters(layers: Sequence[nn.Module], own: Matrix, scale: float, room: Matrix | None) -> Matrix:
    """Return a copy of a matrix with the active adapters of its layers, computed in fp32 and rounded once.

    scale: see `adapters.merged`. room: a copy whose memory is written again.
    """
    weight_FE = copied_into(own.weight, None if room is None else room.weight)
    bias_F = None if own.bias is None else copied_into(own.bias, None if room is None else room.bias)
    start = 0
    for layer in layers:
        base: Any = adapters.base_of(layer)
        mine = slice(start, start + len(base.weight))
        weight, bias = adapters.merged(layer, scale) if adapters.active(layer) else (None, None)
        if weight is not None:
            weight_FE[mine].copy_(weight)
        if bias is not None and bias_F is not None:
            bias_F[mine].copy_(bias)
        start = mine.stop
    return Matrix(weight_FE, bias_F)


def _rows_of(holders: Mapping[str, Holder], keys: KeyMap) -> dict[str, tuple[str, slice]]:
    """Return key of the module -> (name of the model's parameter, the rows of it that the key makes)."""
    where = {}
    for ours, source in keys.sources.items():
        start = 0
        for key in source.keys:
            end = start + len(holders[key].parameter)
            where[key], start = (ours, slice(start, end)), end
    return where


def copied_into(like: Tensor, room: Tensor | None) -> Tensor:
    """Return a copy of a tensor, in the memory that is there already if it fits."""
    fits = room is not None and (room.shape, room.dtype, room.device) == (like.shape, like.dtype, like.device)
    copied = room if fits and room is not None else torch.empty_like(like)
    return copied.copy_(like)


def rows(parts: Sequence[Tensor]) -> Tensor:
    """Return the tensor that is some parameters one below the other; several become views of it."""
    if len(parts) == 1:
        return parts[0].detach()
    whole = joined(parts)
    if whole is None:
        whole = torch.cat([part.detach() for part in parts])
        for part, mine in zip(parts, whole.split([len(part) for part in parts]), strict=True):
            part.data = mine
    return whole


def joined(parts: Sequence[Tensor]) -> Tensor | None:
    """Return the tensor whose rows the parts are, without a copy, or None if they do not lie one after the other."""
    first, end = parts[0].detach(), parts[0].data_ptr()
    for part in parts:
        same = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not (same and part.is_contiguous() and part.data_ptr() == end and part.dtype == first.dtype):
            return None
        end += part.numel() * part.element_size()
    return first.as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride(), first.storage_offset())


def put(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Make a tensor the parameter of this name, without a copy and without gradients."""
    path, _, attribute = name.rpartition(".")
    model.get_submodule(path)._parameters[attribute] = nn.Parameter(tensor, requires_grad=False)
