"""Tensors that do not exist yet: a source and the row-local functions that make the tensor from it, strip by strip.

A `Pending` stands for the result of a norm, an activation, an upsampling, a sum or a convolution until something needs
its values. A convolution takes them a strip of rows at a time, so that the tensor never exists whole. The source is a
tensor with values or a convolution (`Rows`) of another chain, whose rows are computed when they are read.
When it wins: where memory is short; a value that is used twice is computed twice.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from seqpar.vae.known import METADATA
from seqpar.vae.layout import memory_format

HERE = object()  # stands for the value of the step before, among the arguments of a step


Read = tuple[Tensor, int, int]
"""A tensor with values, and the first and last + 1 of the rows that are read of it."""


class Rows(Protocol):
    """A convolution that is not computed yet, as the source of a chain."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of its output."""
        ...

    @property
    def chain(self) -> Chain:
        """Return what it reads."""
        ...

    @property
    def largest(self) -> int:
        """Return the bytes of its input or output, whichever has more."""
        ...

    def rows(self, low: int, high: int) -> Tensor:
        """Return rows [low, high) of its output."""
        ...

    def reads(self, low: int, high: int) -> Iterator[Read]:
        """Yield what `rows` reads."""
        ...


@dataclass(frozen=True)
class Step:
    """A function whose output rows depend on the same rows of its inputs, or on row // scale where it upsamples.

    args: HERE for the value of the step before, chains and tensors of as many rows, and what all rows share.
    """

    function: Callable[..., Tensor]
    args: tuple[Any, ...]
    scale: int = 1

    def __call__(self, strip: Tensor, dim: int, rows: tuple[int, int, int]) -> Tensor:
        """Return the function of a strip. rows: the strip's first and last + 1 row, and the number of all rows."""
        low, high, whole = rows

        def given(x: Any) -> Any:
            if isinstance(x, Chain):
                return x.rows(low, high)
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

    source: Tensor | Rows
    steps: tuple[Step, ...]
    dim: int

    def rows(self, low: int, high: int) -> Tensor:
        """Return rows [low, high) of the result."""
        spans, whole = self._spans(low, high), self.source.shape[self.dim]
        low, high = spans[0]
        source = self.source
        strip = source.narrow(self.dim, low, high - low) if isinstance(source, Tensor) else source.rows(low, high)
        for step, (low, high), (first, last) in zip(self.steps, spans, spans[1:], strict=False):
            strip = step(strip, self.dim, (low, high, whole))
            strip = strip.narrow(self.dim, first - low * step.scale, last - first)
            whole *= step.scale
        return strip

    def reads(self, low: int, high: int) -> Iterator[Read]:
        """Yield the tensors of which `rows` reads rows, and these rows."""
        spans, whole, ndim = self._spans(low, high), self.source.shape[self.dim], len(self.source.shape)
        if isinstance(self.source, Tensor):
            yield self.source, *spans[0]
        else:
            yield from self.source.reads(*spans[0])
        for step, span in zip(self.steps, spans, strict=False):
            for x in tree_leaves(step.args):
                if isinstance(x, Chain):
                    yield from x.reads(*span)
                elif _has_rows(x, ndim, self.dim, whole):
                    yield x, *span
            whole *= step.scale

    def _spans(self, low: int, high: int) -> list[tuple[int, int]]:
        """Return the rows of the source and of the result of each step that rows [low, high) of the result need."""
        spans = [(low, high)]
        for step in reversed(self.steps):
            low, high = low // step.scale, -(-high // step.scale)
            spans.append((low, high))
        return spans[::-1]

    @property
    def operands(self) -> list[Chain]:
        """Return the chains that its steps take besides."""
        return [x for step in self.steps for x in tree_leaves(step.args) if isinstance(x, Chain)]

    @property
    def depth(self) -> int:
        """Return how many convolutions follow one another until the result."""
        own = 0 if isinstance(self.source, Tensor) else 1 + self.source.chain.depth
        return max([own, *(x.depth for x in self.operands)])

    @property
    def largest(self) -> int:
        """Return the bytes of the largest tensor that is there or computed in strips; without results of steps."""
        own = size_of(self.source) if isinstance(self.source, Tensor) else self.source.largest
        return max([own, *(x.largest for x in self.operands)])

    @property
    def like(self) -> Tensor:
        """Return the tensor with values at its beginning, for the device and the memory format."""
        return self.source if isinstance(self.source, Tensor) else self.source.chain.like


@dataclass(frozen=True)
class Work:
    """What the tensors of one decoding share: the size of a strip, and the pending tensors that somebody still has."""

    strip_bytes: int
    alive: WeakValueDictionary[int, Pending]


class Pending(Tensor):
    """A tensor without memory of its own: shape, dtype and device are right, and `real` computes its values."""

    chain: Chain | None
    padding: tuple[int, ...]
    work: Work
    value: Tensor | None

    @staticmethod
    def of(chain: Chain, shape: torch.Size | tuple[int, ...], dtype: torch.dtype, work: Work) -> Pending:
        """Return the tensor that a chain makes."""
        made = torch.empty(1, dtype=dtype, device=chain.like.device).expand(shape).as_subclass(Pending)
        made.chain, made.padding, made.work, made.value = chain, (), work, None
        return made

    def padded(self, padding: tuple[int, ...]) -> Pending:
        """Return this tensor with zeros around it, as `torch.nn.functional.pad` adds them."""
        assert self.chain is not None
        shape = list(self.shape)
        for index, amount in enumerate(padding):
            shape[-1 - index // 2] += amount
        made = Pending.of(self.chain, tuple(shape), self.dtype, self.work)
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
            shape = _unpadded(tuple(x.shape), x.padding)
            over = next((each for each in spare(x) if _fits(each, shape, x.dtype)), None)
            value = computed(x.chain, shape, x.dtype, x.work.strip_bytes, over)
        x.value = F.pad(value, x.padding) if x.padding else value
        x.chain = None
    return x.value


def _unpadded(shape: tuple[int, ...], padding: tuple[int, ...]) -> tuple[int, ...]:
    sizes = list(shape)
    for index, amount in enumerate(padding):
        sizes[-1 - index // 2] -= amount
    return tuple(sizes)


def _fits(x: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    return tuple(x.shape) == shape and x.dtype == dtype


def computed(
    chain: Chain, shape: tuple[int, ...], dtype: torch.dtype, strip_bytes: int, over: Tensor | None = None
) -> Tensor:
    """Return the result of a chain. over: write it over this tensor, which the chain may read and nothing else."""
    out = empty(shape, dtype, chain.like) if over is None else over
    bounds = [*strips(shape[chain.dim], max(size_of(out), chain.largest), strip_bytes)]
    waiting: deque[tuple[int, Tensor]] = deque()  # strips of `over` whose rows the next strips read, and their places
    for (low, high), following in zip(bounds, [*bounds[1:], None], strict=True):
        waiting.append((low, chain.rows(low, high)))
        needed = shape[chain.dim]
        if over is not None and following is not None:
            needed = min((first for x, first, _ in chain.reads(*following) if x is over), default=needed)
        while waiting and waiting[0][0] + waiting[0][1].shape[chain.dim] <= needed:
            place, strip = waiting.popleft()
            out.narrow(chain.dim, place, strip.shape[chain.dim]).copy_(strip)
            del strip
    return out


def spare(x: Pending) -> list[Tensor]:
    """Return the tensors that only the chain of a pending tensor refers to, so that they may be overwritten.

    References are counted in the same way for a new tensor that only a chain refers to.
    """
    assert x.chain is not None
    times = Counter(map(id, _held(x.chain, set())))
    alive = [each for each in [*x.work.alive.values()] if each is not x and each.chain is not None]
    others = {id(each) for other in alive if other.chain is not None for each in _held(other.chain, set())}
    del alive
    found = [*{id(each): each for each in _held(x.chain, set())}.values()]
    once = _references([torch.empty(1, device=x.chain.like.device)], 0)
    counts = [_references(found, at) for at in range(len(found))]
    alone = [count == (once[0] + times[id(each)], once[1]) for each, count in zip(found, counts, strict=True)]
    return [each for each, free in zip(found, alone, strict=True) if free and id(each) not in others]


def _held(chain: Chain, seen: set[int]) -> Iterator[Tensor]:
    """Yield the tensors that a chain refers to, each as often as its parts refer to it."""
    if id(chain) in seen:
        return
    seen.add(id(chain))
    if isinstance(chain.source, Tensor):
        yield chain.source
    elif id(chain.source) not in seen:
        seen.add(id(chain.source))
        yield from _held(chain.source.chain, seen)
    for step in chain.steps:
        if id(step) not in seen:
            seen.add(id(step))
            for x in tree_leaves(step.args):
                if isinstance(x, Tensor):
                    yield x
                elif isinstance(x, Chain):
                    yield from _held(x, seen)


def _references(tensors: list[Tensor], at: int) -> tuple[int, int]:
    """Return the number of references to a tensor in a list, and to its storage."""
    storage = torch._C._storage_Use_Count(tensors[at].untyped_storage()._cdata)
    return sys.getrefcount(tensors[at]), storage


def size_of(x: Tensor) -> int:
    """Return the bytes of a tensor's values."""
    return x.numel() * x.element_size()


def empty(shape: tuple[int, ...], dtype: torch.dtype, like: Tensor) -> Tensor:
    """Return memory for a result, channels-last where the source is."""
    wanted = memory_format(like) if len(shape) == like.ndim else torch.contiguous_format
    return torch.empty(shape, dtype=dtype, device=like.device, memory_format=wanted)


def strips(rows: int, total_bytes: int, strip_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield (first, last + 1) of strips of at most `strip_bytes` and at least one row."""
    count = max(1, strip_bytes * rows // max(1, total_bytes))
    yield from ((low, min(low + count, rows)) for low in range(0, rows, count))
