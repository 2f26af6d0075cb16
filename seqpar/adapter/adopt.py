"""Makes a model of this package compute with the weights of a diffusers module, which stays their owner.

A weight of ours that is one weight of the module shares its memory. A fused weight (q, k and v in one matrix) is made
once, and the module's weights become views of its rows, so that the module's state dict, `save_pretrained` and LoRA's
`fuse_lora` go on working, and what is written there is what our model reads. At most one layer is held twice meanwhile.
When it wins: always, for a model that is loaded by diffusers; a second copy of FLUX.1's weights would take 24 GB.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from seqpar.adapter.adapters import without_adapters
from seqpar.weights.checkpoint import Checkpoint, KeyMap, Source, check


@dataclass(frozen=True)
class Place:
    """Where a parameter of a module lives, below adapters' layers: `owner` holds it under `name`."""

    owner: nn.Module
    name: str

    @property
    def parameter(self) -> Tensor:
        """Return the parameter that is there now."""
        found = self.owner._parameters[self.name]
        assert found is not None
        return found


def places(module: nn.Module) -> dict[str, Place]:
    """Return key -> place of all parameters, under the keys that they have without adapters."""
    return {
        f"{prefix}.{name}" if prefix else name: Place(owner, name)
        for prefix, owner in without_adapters(module)
        for name, parameter in owner._parameters.items()
        if parameter is not None
    }


def check_places(model: nn.Module, name: str, found: Mapping[str, Place], keys: KeyMap) -> None:
    """Raise ValueError if the module's parameters do not make those of `model`, by their keys and shapes.

    Each source must be one parameter unchanged, or the rows of several.
    """
    shapes = {key: tuple(place.parameter.shape) for key, place in found.items()}
    check(model, Checkpoint(name, shapes, lambda key: found[key].parameter), keys)
    for ours, source in keys.sources.items():
        parts = [torch.empty(shapes[key], device="meta") for key in source.keys]
        if len(parts) == 1 and source.combine(*parts) is not parts[0]:
            raise ValueError(f"got {source.keys[0]}, which {ours} holds in another form, expected it unchanged")
        if len(parts) > 1 and source.combine(*parts).shape != torch.cat(parts).shape:
            raise ValueError(f"got {', '.join(source.keys)}, which {ours} holds in another form, expected their rows")


@torch.no_grad()
def adopt(model: nn.Module, found: Mapping[str, Place], keys: KeyMap) -> None:
    """Make the parameters of `model` share memory with the module's, which become views of the fused ones.

    It can be repeated, and then makes only those anew whose parts are no longer neighbours in memory, as after the
    module was moved or a weight was replaced.
    """
    for name, source in keys.sources.items():
        put(model, name, shared(found, source))


def shared(found: Mapping[str, Place], source: Source) -> Tensor:
    """Return the tensor that is the source's parameters one below the other; several become views of it."""
    parts = [found[key].parameter for key in source.keys]
    if len(parts) == 1:
        return parts[0].detach()
    whole = joined(parts)
    if whole is None:
        whole = torch.cat([part.detach() for part in parts])
        for part, rows in zip(parts, whole.split([len(part) for part in parts]), strict=True):
            part.data = rows
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


def drop(model: nn.Module) -> None:
    """Let go of all weights, so that their memory is the module's alone: parameters become empty ones of no device."""
    for name, parameter in list(model.named_parameters()):
        put(model, name, torch.empty_like(parameter, device="meta"))
