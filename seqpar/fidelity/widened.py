"""Lets a model compute in a wider data type without a second copy of its weights, and compares weights between ranks.

A weight is converted when a layer reads it and freed after its use, so that the reference of a comparison takes the
memory of one layer besides the model's own weights.
When it wins: where a model's weights in fp32 would not fit beside those that are compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from seqpar.mesh import Mesh

LEAST = 2  # bytes of a floating-point weight that can be converted as it is; smaller ones are quantised


class _Wide(dict[str, Any]):
    """A module's parameters or buffers by name; each one is converted at the moment it is read."""

    def __init__(self, own: dict[str, Any], dtype: torch.dtype) -> None:
        super().__init__(own)
        self._dtype = dtype

    def __getitem__(self, name: str) -> Any:
        return wide(super().__getitem__(name), self._dtype)

    def items(self) -> Any:
        """Yield names and converted tensors, one after the other, because all at once would fill the memory."""
        return ((name, self[name]) for name in self)

    def values(self) -> Any:
        """Yield converted tensors; see `items`."""
        return (self[name] for name in self)


def wide(x: Any, dtype: torch.dtype) -> Any:
    """Return a floating-point tensor in at least this data type, and any other value unchanged."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return x
    return x.detach().to(torch.promote_types(x.dtype, dtype))


@contextmanager
def widened(models: Iterable[nn.Module], dtype: torch.dtype) -> Iterator[None]:
    """Let all layers of some models read their weights in this data type or a wider one.

    The weights themselves stay as they are. Raises ValueError for quantised weights.
    """
    layers = [layer for model in models for layer in model.modules()]
    for layer in layers:
        _refuse_quantised(layer)
    before = [(vars(layer), layer._parameters, layer._buffers) for layer in layers]
    try:
        for named, parameters, buffers in before:
            named["_parameters"], named["_buffers"] = _Wide(parameters, dtype), _Wide(buffers, dtype)
        yield
    finally:
        for named, parameters, buffers in before:
            named["_parameters"], named["_buffers"] = parameters, buffers


def _refuse_quantised(layer: nn.Module) -> None:
    for name, x in layer._parameters.items():
        if x is not None and (type(x) is not nn.Parameter or not x.is_floating_point() or x.itemsize < LEAST):
            raise ValueError(
                f"got {type(layer).__name__}.{name}, a {type(x).__name__} of {x.dtype}, expected weights of 16 bits or "
                f"more: quantised weights cannot be compared with full precision"
            )


def other_weights(mesh: Mesh, model: nn.Module) -> str | None:
    """Return in words which weight of which rank has other values than rank 0's, or None.

    Sums of all bits are compared, which takes one pass over the weights. Every rank must call this at the same time.
    """
    every = mesh.collect({name: _sum(x) for name, x in model.named_parameters()})
    for rank, sums in enumerate(every):
        different = next((name for name, value in every[0].items() if sums.get(name) != value), None)
        if different is not None or sums.keys() != every[0].keys():
            return f"rank {rank} has other weights than rank 0: {different or 'other names'}"
    return None


def _sum(x: Tensor) -> int:
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return int(x.detach().contiguous().view(kinds[x.itemsize]).sum(dtype=torch.int64))
