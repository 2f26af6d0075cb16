"""Norms and biases that are computed when it is known what follows them, so that they need no pass of their own.

The rule of a norm returns a tensor without memory and keeps how to make its values. If SiLU is the next function that
takes this tensor, one kernel does both and the tensor itself never gets memory; before any other function the values
are written. The rule of a convolution leaves out the bias in the same way: a norm or a sum that is next adds it, and
before any other function it is added in place. This is safe inside a `TorchFunctionMode`, which sees every function
that reads a tensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from seqpar.kernels.channel_norm import channel_norm
from seqpar.kernels.group_norm import Affine, normalise
from seqpar.kernels.residual import add
from seqpar.vae.known import METADATA, PLACES, writes


class Unwritten(Protocol):
    """How to make the values of a tensor from those of x."""

    @property
    def x(self) -> Tensor:
        """Return what is read."""
        ...

    def write(self, out: Tensor, silu: bool = False) -> None:
        """Write the values into `out`, with SiLU if asked."""
        ...


@dataclass(frozen=True)
class GroupNorm:
    """GroupNorm of x, (N, C, ...), by moments (N, G, 3) that are known."""

    x: Tensor
    moments: Tensor
    affine: Affine

    def write(self, out: Tensor, silu: bool = False) -> None:
        """Write the norm into `out`, which has x's strides."""
        normalise(self.x, self.moments, self.affine, silu, out)


@dataclass(frozen=True)
class ChannelNorm:
    """RMSNorm of x, (N, C, ...), over its channels."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None

    def write(self, out: Tensor, silu: bool = False) -> None:
        """Write the norm into `out`, which has x's strides."""
        channel_norm(self.x, self.weight, self.bias, silu, out)


@dataclass(frozen=True)
class Biased:
    """x, (N, C, ...) in channels-last memory, plus a bias (C,); the tensor that waits for it shares x's memory."""

    x: Tensor
    bias: Tensor

    def write(self, out: Tensor, silu: bool = False) -> None:
        """Write the sum into `out`, which may be x."""
        add((self.x, self.bias), None, silu, out)


class Later:
    """The tensors of one decode whose values are not written yet."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[weakref.ref[Tensor], Unwritten]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, like: Tensor, how: Unwritten) -> Tensor:
        """Return a tensor like this one, without memory; nothing is kept of it once its last user drops it."""
        out = torch.empty_like(like)
        out.untyped_storage().resize_(0)
        return self.keep(out, how)

    def keep(self, x: Tensor, how: Unwritten) -> Tensor:
        """Return x; whoever reads it gets what `how` writes."""
        key, kept = id(x), self._kept
        self._kept[key] = weakref.ref(x, lambda gone: kept.pop(key, None)), how
        return x

    def how(self, x: Any) -> Unwritten | None:
        """Return how to make the values of x, or None if they are written."""
        found = self._kept.get(id(x))
        return found[1] if found is not None and found[0]() is x else None

    def write(self, x: Tensor, silu: bool = False) -> None:
        """Give x memory and values, with SiLU if asked."""
        how = self._kept.pop(id(x))[1]
        if isinstance(how, Biased):  # a norm that waits may read x as it is now
            for reference, other in [*self._kept.values()]:
                reader = reference()
                if other.x is how.x and reader is not None:
                    self.write(reader)
        if not isinstance(how, Biased):
            x.untyped_storage().resize_(x.element_size() * x.numel())
        how.write(x, silu)

    def settle(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Write what a function may read: its arguments, or everything if it writes, maybe into a norm's input."""
        if not self._kept or function in METADATA or function in PLACES:
            return
        if writes(function, args, kwargs):
            self.finish()
        for x in tensors((args, kwargs)):
            if self.how(x) is not None:
                self.write(x)

    def finish(self) -> None:
        """Write everything that somebody still has."""
        for reference, _ in [*self._kept.values()]:
            x = reference()
            if x is not None and self.how(x) is not None:  # what another one reads is written before it
                self.write(x)

    def drop(self) -> None:
        """Forget everything after an error; a tensor without memory becomes empty, so that it can be printed."""
        for reference, how in [*self._kept.values()]:
            x = reference()
            if x is not None and not isinstance(how, Biased):
                x.data = x.new_empty(0)
        self._kept.clear()


def tensors(given: Any) -> Iterator[Tensor]:
    """Return all tensors among arguments, also those in lists, tuples and dicts."""
    if isinstance(given, Tensor):
        yield given
    elif isinstance(given, (list, tuple)):
        for each in given:
            yield from tensors(each)
    elif isinstance(given, dict):
        yield from tensors([*given.values()])
