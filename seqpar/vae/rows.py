"""Convolutions and group norms of `seqpar.vae.turns`: they compute strips of rows of a source that may be pending."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from seqpar.kernels import group_norm as kernels
from seqpar.kernels._triton import fused
from seqpar.vae.lazy import Args, Kwargs, Norm, Turning, chain_of, extended, settled
from seqpar.vae.norms import combine
from seqpar.vae.pending import HERE, Chain, Pending, Read, Step, real, size_of, spare, strips
from seqpar.vae.rules import Settings, taken

DEPTH = 2  # convolutions that wait one for the other, at most; each is computed again for whatever reads its output
FLAT = 4  # dims of pictures; convolutions of videos do not wait, because caches of frames read their outputs again


@dataclass(frozen=True)
class Convolution:
    """A convolution of a chain, the source of another one.

    given: the shape of its input. padding: (before, after) of each dim, from the last dim backwards, as in `F.pad`.
    before, after: the neighbours' rows where other ranks have them.
    """

    function: Any
    chain: Chain
    given: tuple[int, ...]
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

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the output."""
        dims = range(2 - len(self.given), 0)
        sizes = ((self.given[dim] + sum(self.edges(dim)) - self.span(dim)) // self.stride[dim] + 1 for dim in dims)
        return self.given[0], self.weight.shape[0], *sizes

    @property
    def largest(self) -> int:
        """Return the bytes of its input or output, whichever has more."""
        values = max(torch.Size(self.given).numel(), torch.Size(self.shape).numel())
        return max(self.chain.largest, values * self.weight.element_size())

    def needs(self, low: int, high: int) -> tuple[int, int]:
        """Return the first and last + 1 input row of output rows [low, high), which may be beyond the input."""
        dim = self.chain.dim
        first, last = (row * self.stride[dim] - self.edges(dim)[0] for row in (low, high - 1))
        return first, last + self.span(dim)

    def reads(self, low: int, high: int) -> Iterator[Read]:
        """Yield what `rows` reads, without the neighbours' rows."""
        first, last = self.needs(low, high)
        yield from self.chain.reads(max(first, 0), min(last, self.given[self.chain.dim]))

    def rows(self, low: int, high: int) -> Tensor:
        """Return output rows [low, high)."""
        dim, rows = self.chain.dim, self.given[self.chain.dim]
        first, last = self.needs(low, high)
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
        return self._apply(piece, around)

    def _apply(self, piece: Tensor, around: list[int]) -> Tensor:
        """Convolve a piece with zeros around it: the convolution adds those that are alike on two sides, uncopied."""
        pairs = [*zip(around[::2], around[1::2], strict=True)]
        own = [low if low == high else 0 for low, high in pairs]
        rest = [n - pad for pair, pad in zip(pairs, own, strict=True) for n in pair]
        padded = F.pad(piece, rest) if any(rest) else piece
        return self.function(padded, self.weight, self.bias, self.stride, own[::-1], self.dilation, self.groups)

    def _beyond(self) -> tuple[Tensor | None, Tensor | None]:
        return self.before, self.after


def convolve(turns: Turning, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Convolve in strips if the input is pending or large, or the output is large."""
    x, given = taken(*args, **kwargs)
    if x.ndim != given.weight.ndim or isinstance(given.padding, str):
        return NotImplemented
    x = _shallow(turns, x)
    made = _described(turns, func, x, given)
    with torch._C.DisableTorchFunction():
        if not (isinstance(x, Pending) or turns.large(x) or turns.exceeds(torch.Size(made.shape).numel(), x.dtype)):
            return NotImplemented
        if turns.place is not None and not _is_alike(turns, made):
            return NotImplemented
        chain = Chain(_with_halo(turns, made), (), turns.dim)
        out = turns.keep(Pending.of(chain, made.shape, made.weight.dtype, turns.work))
        if turns.place is not None:
            turns.place.check(out)
    return out if out.ndim == FLAT else real(out)


def _shallow(turns: Turning, x: Tensor) -> Tensor:
    """Return the input of a convolution, computed if it waits for `DEPTH` convolutions already."""
    return settled(turns, x) if isinstance(x, Pending) and x.chain is not None and x.chain.depth >= DEPTH else x


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
        _inner(x),
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


def _is_alike(turns: Turning, made: Convolution) -> bool:
    """Return whether each output row lies at an input row, so that the strips of ranks stay strips of the same rows."""
    return made.stride[turns.dim] == 1 and made.given[turns.dim] == made.shape[turns.dim]


def _with_halo(turns: Turning, made: Convolution) -> Convolution:
    """Return a convolution that knows the neighbours' rows at the inner edges of this rank's strip."""
    rows, (before, after) = made.given[turns.dim], made.edges(turns.dim)
    if turns.place is None or not (before or after) or turns.place.cut.axis.size == 1:
        return made
    cut = turns.place.cut
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
    x = given["input"]
    if not turns.large(x):
        return NotImplemented
    if not _stays(turns, x):
        x = settled(turns, x)
    with torch._C.DisableTorchFunction():
        moments_NG3 = _moments(turns, x, given["num_groups"])
        if turns.place is not None:
            moments_NG3 = combine(turns.place, moments_NG3)
        affine = kernels.Affine(given.get("weight"), given.get("bias"), given.get("eps", 1e-5))
    return extended(turns, x, Step(Norm(moments_NG3, affine), (HERE,)))


def _stays(turns: Turning, x: Tensor) -> bool:
    """Return whether a tensor should wait longer although its statistics must be computed now.

    It waits for less than `DEPTH` convolutions, and has more bytes than are to be held and than it would free.
    """
    if not isinstance(x, Pending) or x.chain is None or x.padding or not 0 < x.chain.depth < DEPTH:
        return False
    with torch._C.DisableTorchFunction():
        return size_of(x) > max(turns.held_bytes, sum(map(size_of, spare(x))))


def _moments(turns: Turning, x: Tensor, groups: int) -> Tensor:
    """Return count, mean and M2 of each group (N, G, 3), from those of strips; the strips themselves are dropped."""
    chain = chain_of(turns, x)
    if fused(x) and not chain.depth:  # the kernel has no temporaries
        return kernels.moments(x, groups)
    largest = max(size_of(x), chain.largest)
    bounds = [*strips(x.shape[turns.dim], largest, turns.work.strip_bytes)]
    if not x.is_meta:
        return kernels.combine(torch.stack([kernels.moments(chain.rows(low, high), groups) for low, high in bounds]))
    for low, high in bounds:  # a prediction: one pass
        torch.sum(chain.rows(low, high))
    return torch.empty(x.shape[0], groups, 3, dtype=torch.float32, device=x.device)
