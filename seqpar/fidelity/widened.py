"""Lets a model compute in a wider data type without a second copy of its weights, and compares weights between ranks.

A weight is converted when a layer reads it and freed after its use, so that the reference of a comparison takes the
memory of one layer besides the model's own weights.
When it wins: where a model's weights in fp32 would not fit beside those that are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from seqpar.mesh import Mesh

# the methods by which models make their modulation. A timestep is rounded to the model's data type on its way there,
# which changes the modulation more than all blocks round; every way of computing does so alike, and the reference, too
MODULATED = ("modulate", "modulate_call")
ROUNDED = ("pooled_projections",)  # their arguments that have the model's data type
PLACES = 1 << 24  # values of a weight that are summed at a time, which takes 16 bytes for each
SPREAD = 0x1E3779B97F4A7C15  # odd and large, so that the factors of neighbours have nothing in common
LEAST = 2  # bytes of a floating-point weight that can be converted as it is; smaller ones are quantised


@contextmanager
def full_precision() -> Iterator[None]:
    """Turn TF32 off in matrix products and convolutions."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


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

    The weights themselves stay as they are. Models of this package compute their modulation as always, see `MODULATED`.
    Raises ValueError for quantised weights.
    """
    models = list({id(model): model for model in models}.values())
    layers = [layer for model in models for layer in model.modules()]
    for layer in layers:
        _refuse_quantised(layer)
    before = [(layer, layer._parameters, layer._buffers) for layer in layers]
    wider = [(layer, _Wide(own, dtype), _Wide(buffers, dtype)) for layer, own, buffers in before]

    def narrow(work: Callable[[], Any]) -> Any:
        _put(before)
        try:
            return work()
        finally:
            _put(wider)

    try:
        _put(wider)
        for model in models:
            _modulate_as_always(model, narrow, dtype)
        yield
    finally:
        _put(before)
        for model in models:
            for name in MODULATED:
                vars(model).pop(name, None)


def _put(tables: Iterable[tuple[nn.Module, dict[str, Any], dict[str, Any]]]) -> None:
    for layer, parameters, buffers in tables:
        vars(layer)["_parameters"], vars(layer)["_buffers"] = parameters, buffers


def _modulate_as_always(model: nn.Module, narrow: Callable[[Callable[[], Any]], Any], dtype: torch.dtype) -> None:
    """Let a model compute its modulation from its own weights, and widen what that returns."""
    for name in MODULATED:
        own: Any = getattr(type(model), name, None)
        if own is not None:
            vars(model)[name] = partial(_modulated, model, own, narrow, dtype)


def _modulated(
    model: nn.Module, own: Any, narrow: Any, dtype: torch.dtype, *args: Any, **kwargs: Any
) -> dict[str, Tensor]:
    def work() -> Mapping[str, Tensor]:
        theirs = next(model.parameters()).dtype
        given = {key: _narrowed(x, theirs) if key in ROUNDED else x for key, x in kwargs.items()}
        args_ = [_narrowed(x, theirs) if index > 1 else x for index, x in enumerate(args)]
        return own(model, *args_, **given)

    return {name: wide(x, dtype) for name, x in narrow(work).items()}


def _narrowed(x: Any, dtype: torch.dtype) -> Any:
    return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x


def _refuse_quantised(layer: nn.Module) -> None:
    for name, x in layer._parameters.items():
        if x is not None and (type(x) is not nn.Parameter or not x.is_floating_point() or x.itemsize < LEAST):
            raise ValueError(
                f"got {type(layer).__name__}.{name}, a {type(x).__name__} of {x.dtype}, expected weights of 16 bits or "
                f"more: quantised weights cannot be compared with full precision"
            )


def other_weights(mesh: Mesh, model: nn.Module) -> str | None:
    """Return in words which weight of which rank has other values than rank 0's, or None.

    Sums of all bits, each times a number of its place, are compared, which takes one pass over the weights. Every rank
    must call this at the same time.
    """
    every = mesh.collect({name: _sum(x) for name, x in model.named_parameters()}, dict[str, int])
    for rank, sums in enumerate(every):
        different = next((name for name, value in every[0].items() if sums.get(name) != value), None)
        if different is not None or sums.keys() != every[0].keys():
            return f"rank {rank} has other weights than rank 0: {different or 'other names'}"
    return None


def _sum(x: Tensor) -> int:
    """Return a sum of a weight's bits in which every place counts differently, modulo 2^64.

    The factors are odd, so that any change of one value changes the sum; those of two places are never equal.
    """
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits, total, start = x.detach().contiguous().view(-1).view(kinds[x.itemsize]), 0, 0
    for part in bits.split(PLACES):
        factors = torch.arange(start, start + len(part), device=x.device).mul_(2 * SPREAD).add_(1)
        total += int((factors * part).sum())
        start += len(part)
    return total % 2**64
