"""Convolutions and group norms of `seqpar.vae.turns`: they compute strips of rows of a source that may be pending."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from seqpar.kernels import group_norm as kernels
from seqpar.kernels._triton import fused
from seqpar.vae.lazy import Args, Kwargs, Norm, Turning, chain_of, extended, settled
from seqpar.vae.norms import combine
from seqpar.vae.pending import HERE, Chain, Pending, Step, empty, real, strips
from seqpar.vae.rules import Settings, taken


@dataclass(frozen=True)
class Convolution:
    """A convolution of a chain. padding: (before, after) of each dim, from the last dim backwards, as in `F.pad`."""

    function: Any
    chain: Chain
    weight: Tensor
    bias: Tensor | None
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    before: Tensor | None = None
    after: Tensor | None = None

    def edges(self, dim: int) -> tuple[int, int]:
        """Return how much is padded before and after along a dim."""
        return self.padding[-2 * dim - 2], self.padding[-2 * dim - 1]

    def span(self, dim: int) -> int:
        """Return the number of input rows of one output row."""
        return (self.weight.shape[dim] - 1) * self.dilation[dim] + 1

    def shape(self, given: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the output for an input of this shape."""
        dims = range(2 - len(given), 0)
        sizes = ((given[dim] + sum(self.edges(dim)) - self.span(dim)) // self.stride[dim] + 1 for dim in dims)
        return given[0], self.weight.shape[0], *sizes

    def strip(self, low: int, high: int, rows: int) -> Tensor:
        """Return output rows [low, high) from an input of `rows` rows."""
        dim, step = self.chain.dim, self.stride[self.chain.dim]
        first = low * step - self.edges(dim)[0]
        last = (high - 1) * step - self.edges(dim)[0] + self.span(dim)
        piece = self.chain.rows(max(first, 0), min(last, rows))
        missing = max(-first, 0), max(last - rows, 0)
        around = list(self.padding)
        around[-2 * dim - 2 : -2 * dim] = [
            0 if x is not None else n for n, x in zip(missing, self._beyond(), strict=True)
        ]
        if missing[0] and self.before is not None:
            piece = torch.cat([self.before.narrow(dim, self.before.shape[dim] - missing[0], missing[0]), piece], dim)
        if missing[1] and self.after is not None:
            piece = torch.cat([piece, self.after.narrow(dim, 0, missing[1])], dim)
        padded = F.pad(piece, around) if any(around) else piece
        return self.function(padded, self.weight, self.bias, self.stride, 0, self.dilation, self.groups)

    def _beyond(self) -> tuple[Tensor | None, Tensor | None]:
        return self.before, self.after


def convolve(turns: Turning, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Convolve in strips if the input is pending or large, or the output is large."""
    x, given = taken(*args, **kwargs)
    if x.ndim != given.weight.ndim or isinstance(given.padding, str):
        return NotImplemented
    made = _described(turns, func, x, given)
    with torch._C.DisableTorchFunction():
        shape = made.shape(_inner(x))
        if not (isinstance(x, Pending) or turns.large(x) or turns.exceeds(torch.Size(shape).numel(), x.dtype)):
            return NotImplemented
    if turns.place is not None and not _is_alike(turns, made, _inner(x), shape):
        return NotImplemented
    with torch._C.DisableTorchFunction():
        return turns.convolved(_in_strips(turns, made, _inner(x), shape))


def _described(turns: Turning, func: Any, x: Tensor, given: Settings) -> Convolution:
    own = given.along(given.padding)
    padding = [0] * (2 * len(own))
    if isinstance(x, Pending) and x.value is None and x.padding and x.chain is not None:
        padding[: len(x.padding)] = x.padding
        chain = x.chain
    else:
        chain = chain_of(turns, x)
    padding = [n + own[-1 - i // 2] for i, n in enumerate(padding)]
    return Convolution(
        func,
        chain,
        real(given.weight),
        given.bias,
        given.along(given.stride),
        tuple(padding),
        given.along(given.dilation),
        given.groups,
    )


def _inner(x: Tensor) -> tuple[int, ...]:
    """Return the shape of the input without the padding that waits."""
    shape = list(x.shape)
    if isinstance(x, Pending) and x.value is None:
        for place, amount in enumerate(x.padding):
            shape[-1 - place // 2] -= amount
    return tuple(shape)


def _is_alike(turns: Turning, made: Convolution, given: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Return whether each output row lies at an input row, so that the strips of ranks stay strips of the same rows."""
    return made.stride[turns.dim] == 1 and given[turns.dim] == shape[turns.dim]


def _in_strips(turns: Turning, made: Convolution, given: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
    dim, rows = turns.dim, given[turns.dim]
    out = empty(shape, made.weight.dtype, made.chain.source)
    if turns.place is not None:
        turns.place.check(out)
        made = _with_halo(turns, made, rows)
    row = max(
        torch.Size(given).numel() * out.element_size() // shape[dim], out.numel() * out.element_size() // shape[dim]
    )
    for low, high in strips(shape[dim], row * shape[dim], turns.strip_bytes):
        out.narrow(dim, low, high - low).copy_(made.strip(low, high, rows))
    return out


def _with_halo(turns: Turning, made: Convolution, rows: int) -> Convolution:
    """Return a convolution that knows the neighbours' rows at the inner edges of this rank's strip."""
    cut, (before, after) = turns.place.cut, made.edges(turns.dim)
    if not (before or after) or cut.axis.size == 1:
        return made
    if min(cut.shares(rows)) < max(before, after):
        turns.place.refuse(f"got strips of {min(cut.shares(rows))} rows, expected at least {max(before, after)}")
    first, last = made.chain.rows(0, max(after, 1)), made.chain.rows(rows - max(before, 1), rows)
    above = None if cut.first or not before else torch.empty_like(last)
    below = None if cut.last or not after else torch.empty_like(first)
    turns.place.exchanges.swap(
        first=first if after and not cut.first else None,
        last=last if before and not cut.last else None,
        before=above,
        after=below,
    )
    return replace(made, before=above, after=below)


# Group norms ---------------------------------------------------------------------------------------------------


def normalise(turns: Turning, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Take the statistics of a group norm now, strip by strip, and apply it later."""
    given = dict(zip(("input", "num_groups", "weight", "bias", "eps"), args, strict=False)) | kwargs
    if not turns.large(given["input"]):
        return NotImplemented
    x = settled(turns, given["input"])
    with torch._C.DisableTorchFunction():
        moments_NG3 = _moments(turns, x, given["num_groups"])
        if turns.place is not None:
            moments_NG3 = combine(turns.place, moments_NG3)
        affine = kernels.Affine(given.get("weight"), given.get("bias"), given.get("eps", 1e-5))
    return extended(turns, x, Step(Norm(moments_NG3, affine), (HERE,)))


def _moments(turns: Turning, x: Tensor, groups: int) -> Tensor:
    """Return count, mean and M2 of each group (N, G, 3), from those of strips."""
    if x.is_meta:  # a prediction: one pass
        torch.sum(x)
        return x.new_empty(x.shape[0], groups, 3, dtype=torch.float32)
    if fused(x):  # the kernel has no temporaries
        return kernels.moments(x, groups)
    bounds = strips(x.shape[turns.dim], x.numel() * x.element_size(), turns.strip_bytes)
    parts = [kernels.moments(x.narrow(turns.dim, low, high - low), groups) for low, high in bounds]
    return kernels.combine(torch.stack(parts))
