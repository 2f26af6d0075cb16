"""Tensors that do not exist yet: a source and the row-local functions that make the tensor from it, strip by strip.

A `Pending` stands for the result of a norm, an activation, an upsampling or a sum until something needs its values. A
convolution takes them a strip of rows at a time, so that the tensor never exists whole. When it wins: where memory is
short; a value that is used twice is computed twice.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map

from seqpar.vae.known import METADATA
from seqpar.vae.layout import memory_format

HERE = object()  # stands for the value of the step before, among the arguments of a step


@dataclass(frozen=True)
class Step:
    """A function whose output rows depend on the same rows of its inputs, or on row // scale where it upsamples."""

    function: Callable[..., Tensor]
    args: tuple[Any, ...]
    scale: int = 1

    def __call__(self, strip: Tensor, dim: int, rows: tuple[int, int, int]) -> Tensor:
        """Return the function of a strip. rows: the strip's first and last + 1 row, and the number of all rows."""
        low, high, whole = rows

        def given(x: Any) -> Any:
            if x is HERE:
                return strip
            return x.narrow(dim, low, high - low) if _has_rows(x, strip.ndim, dim, whole) else x

        return self.function(*tree_map(given, self.args))


def _has_rows(x: Any, ndim: int, dim: int, rows: int) -> bool:
    """Return whether an argument has a row for each row of the value, unlike weights, which all rows share."""
    return isinstance(x, Tensor) and x.ndim == ndim and x.shape[dim] == rows > 1


@dataclass(frozen=True)
class Chain:
    """A source and the steps after it; dim: that of the rows, counted from the end."""

    source: Tensor
    steps: tuple[Step, ...]
    dim: int

    def rows(self, low: int, high: int) -> Tensor:
        """Return rows [low, high) of the result."""
        bounds = [(low, high)]
        for step in reversed(self.steps):
            low, high = low // step.scale, -(-high // step.scale)
            bounds.append((low, high))
        whole, strip = self.source.shape[self.dim], self.source.narrow(self.dim, low, high - low)
        for step, (first, last) in zip(self.steps, reversed(bounds[:-1]), strict=True):
            strip = step(strip, self.dim, (low, high, whole))
            strip = strip.narrow(self.dim, first - low * step.scale, last - first)
            low, high, whole = first, last, whole * step.scale
        return strip


class Pending(Tensor):
    """A tensor without memory of its own: shape, dtype and device are right, and `real` computes its values."""

    chain: Chain | None
    padding: tuple[int, ...]
    strip_bytes: int
    value: Tensor | None

    @staticmethod
    def of(chain: Chain, shape: torch.Size | tuple[int, ...], dtype: torch.dtype, strip_bytes: int) -> Pending:
        """Return the tensor that a chain makes. strip_bytes: the size of the strips in which `real` computes it."""
        made = torch.empty(1, dtype=dtype, device=chain.source.device).expand(shape).as_subclass(Pending)
        made.chain, made.padding, made.strip_bytes, made.value = chain, (), strip_bytes, None
        return made

    def padded(self, padding: tuple[int, ...]) -> Pending:
        """Return this tensor with zeros around it, as `torch.nn.functional.pad` adds them."""
        assert self.chain is not None
        shape = list(self.shape)
        for index, amount in enumerate(padding):
            shape[-1 - index // 2] += amount
        made = Pending.of(self.chain, tuple(shape), self.dtype, self.strip_bytes)
        made.padding = padding
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute the values first if they matter; this is what happens where no `Turns` is active."""
        if func in METADATA:
            with torch._C.DisableTorchFunction():
                return func(*args, **(kwargs or {}))
        return func(*tree_map(real, args), **tree_map(real, kwargs or {}))


def real(x: Any) -> Any:
    """Return a tensor with values in place of a pending one, and anything else as it is."""
    if not isinstance(x, Pending):
        return x
    if x.value is None:
        assert x.chain is not None
        with torch._C.DisableTorchFunction():
            value = computed(x.chain, _unpadded(tuple(x.shape), x.padding), x.dtype, x.strip_bytes)
        x.value = F.pad(value, x.padding) if x.padding else value
        x.chain = None
    return x.value


def _unpadded(shape: tuple[int, ...], padding: tuple[int, ...]) -> tuple[int, ...]:
    sizes = list(shape)
    for index, amount in enumerate(padding):
        sizes[-1 - index // 2] -= amount
    return tuple(sizes)


def computed(chain: Chain, shape: tuple[int, ...], dtype: torch.dtype, strip_bytes: int, over: bool = True) -> Tensor:
    """Return the result of a chain. over: write it over the chain's source if nothing else refers to that."""
    source, same = chain.source, all(step.scale == 1 for step in chain.steps)
    fits = over and same and tuple(source.shape) == shape and source.dtype == dtype
    del source
    out = chain.source if fits and is_spare(chain) else empty(shape, dtype, chain.source)
    for low, high in strips(shape[chain.dim], out.numel() * out.element_size(), strip_bytes):
        out.narrow(chain.dim, low, high - low).copy_(chain.rows(low, high))
    return out


def is_spare(chain: Chain) -> bool:
    """Return whether the chain is all that refers to its source and the source's memory, so that it may be overwritten.

    References are counted in the same way for a new tensor that only a chain refers to.
    """
    return _references(chain) == _references(Chain(torch.empty(1, device=chain.source.device), (), chain.dim))


def _references(chain: Chain) -> tuple[int, int]:
    """Return the number of references to the source of a chain, and to its storage."""
    storage = torch._C._storage_Use_Count(chain.source.untyped_storage()._cdata)
    return sys.getrefcount(chain.source), storage


def empty(shape: tuple[int, ...], dtype: torch.dtype, like: Tensor) -> Tensor:
    """Return memory for a result, channels-last where the source is."""
    wanted = memory_format(like) if len(shape) == like.ndim else torch.contiguous_format
    return torch.empty(shape, dtype=dtype, device=like.device, memory_format=wanted)


def strips(rows: int, total_bytes: int, strip_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield (first, last + 1) of strips of at most `strip_bytes` and at least one row."""
    count = max(1, strip_bytes * rows // max(1, total_bytes))
    yield from ((low, min(low + count, rows)) for low in range(0, rows, count))
