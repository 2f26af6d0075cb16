"""The functions that wait: each returns a `Pending` tensor where its input is pending or large, else NotImplemented.

All of them compute an output row from the same row of their inputs, or from row // factor (nearest upsampling).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from seqpar.kernels.channel_norm import channel_norm
from seqpar.kernels.group_norm import Affine, normalise
from seqpar.vae.norms import over_channels
from seqpar.vae.pending import HERE, Chain, Pending, Step, Work, computed, real

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


class Turning(Protocol):
    """What rules need of `seqpar.vae.turns.Turns`."""

    dim: int
    work: Work
    held_bytes: int
    place: Any

    def large(self, x: Any, grows: float = 1.0) -> bool:
        """See `Turns.large`."""
        ...

    def exceeds(self, elements: int, dtype: torch.dtype) -> bool:
        """See `Turns.exceeds`."""
        ...

    def keep(self, made: Pending) -> Pending:
        """See `Turns.keep`."""
        ...


def chain_of(turns: Turning, x: Tensor) -> Chain:
    """Return the chain of a tensor, which is empty for one that has its values."""
    if isinstance(x, Pending) and x.value is None and not x.padding and x.chain is not None:
        return x.chain
    return Chain(settled(turns, x), (), turns.dim)


def settled(turns: Turning, x: Any) -> Any:
    """Return `real(x)`; values that the rules of a strip have put off (`seqpar.vae.later`) are written first."""
    x = real(x)
    if turns.place is not None and isinstance(x, Tensor):
        x.detach()  # any function that reads x lets `StripMode` write it
    return x


def later(
    turns: Turning, x: Tensor, function: Callable[..., Tensor], args: Args, shape: Any = None, dtype: Any = None
) -> Pending:
    """Return `function(*args)` as a pending tensor; HERE stands for x among the arguments."""
    return extended(turns, x, Step(function, args), shape, dtype)


def extended(turns: Turning, x: Tensor, step: Step, shape: Any = None, dtype: Any = None) -> Pending:
    """Return a tensor with one more step; shape and dtype: those of the result where they are not those of x."""
    return _put(turns, chain_of(turns, x), step, tuple(shape or x.shape), dtype or x.dtype)


def _put(turns: Turning, before: Chain, step: Step, shape: tuple[int, ...], dtype: torch.dtype) -> Pending:
    with torch._C.DisableTorchFunction():
        chain = Chain(before.source, (*before.steps, step), turns.dim)
        return turns.keep(Pending.of(chain, shape, dtype, turns.work))


@dataclass(frozen=True)
class Norm:
    """A group norm by known moments (N, G, 3), for a strip of its input."""

    moments: Tensor
    affine: Affine
    silu: bool = False

    def __call__(self, strip: Tensor) -> Tensor:
        """Return the norm of a strip."""
        if strip.is_meta:
            return torch.empty_like(strip).copy_(strip)
        return normalise(strip, self.moments, self.affine, self.silu)


@dataclass(frozen=True)
class ChannelNorm:
    """An RMS norm over channels, for a strip of its input."""

    weight: Tensor
    bias: Tensor | None
    silu: bool = False

    def __call__(self, strip: Tensor) -> Tensor:
        """Return the norm of a strip."""
        if strip.is_meta:
            return torch.empty_like(strip).copy_(strip)
        return channel_norm(strip, self.weight, self.bias, self.silu)


def over_channels_later(turns: Turning, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Apply an RMS norm of channels later."""
    x, weight, bias = args
    if not waits(turns, x):
        return NotImplemented
    return later(turns, x, ChannelNorm(weight.flatten(), None if bias is None else bias.flatten()), (HERE,))


def waits(turns: Turning, x: Any) -> bool:
    """Return whether functions of x should wait: it waits itself, or it is large."""
    return isinstance(x, Pending) or turns.large(x)


# Rules ---------------------------------------------------------------------------------------------------------


def activation(turns: Turning, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Apply an activation to each value later."""
    if not isinstance(args[0], Pending):
        return NotImplemented
    chain = chain_of(turns, args[0])
    last = chain.steps[-1].function if chain.steps else None
    if func is F.silu and isinstance(last, Norm | ChannelNorm):
        before = Chain(chain.source, chain.steps[:-1], chain.dim)
        return _put(turns, before, Step(replace(last, silu=True), (HERE,)), args[0].shape, args[0].dtype)
    return later(turns, args[0], lambda x: func(x, *args[1:], **kwargs), (HERE,))


def dropout(turns: Turning, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Return the input where dropout is off."""
    return NotImplemented if kwargs.get("training", _at(args, 2, True)) else args[0]


def arithmetic(turns: Turning, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Add, subtract, multiply or divide later: two tensors of one shape, or a tensor and what all its rows share."""
    if kwargs or len(args) != 2 or not any(waits(turns, x) for x in args):
        return NotImplemented
    left, right = args
    swap = not waits(turns, left)
    base, other = (right, left) if swap else (left, right)
    if isinstance(other, Tensor) and other.shape == base.shape:
        other = _operand(turns, other)
    elif not _is_shared(other := settled(turns, other), base, turns.dim):
        return NotImplemented
    with torch._C.DisableTorchFunction():
        dtype = torch.result_type(left, right)
    return later(turns, base, func, (other, HERE) if swap else (HERE, other), dtype=dtype)


def _operand(turns: Turning, x: Tensor) -> Tensor | Chain:
    """Return the chain of an operand that waits for a convolution, or the values of any other one."""
    found = chain_of(turns, x)
    return found if found.depth else settled(turns, x)


def _is_shared(other: Any, base: Tensor, dim: int) -> bool:
    """Return whether an operand is a number or a tensor that is the same for all rows and leaves the shape alone."""
    if not isinstance(other, Tensor):
        return isinstance(other, int | float)
    fits = other.ndim <= base.ndim and torch.broadcast_shapes(other.shape, base.shape) == base.shape
    return fits and (other.ndim < -dim or other.shape[dim] == 1)


def cast(turns: Turning, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Convert to another dtype later; nothing is to do where dtype and device stay."""
    x, *rest = args
    if kwargs or not waits(turns, x) or len(rest) > 1:
        return NotImplemented
    target = rest[0] if rest else torch.float32
    target = target.dtype if isinstance(target, Tensor) and func is Tensor.type_as else target
    if target in (x.dtype, x.device):
        return x
    if not isinstance(target, torch.dtype):
        return NotImplemented
    return later(turns, x, Tensor.to, (HERE, target), dtype=target)


def normalize(turns: Turning, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Normalise over channels later, as the RMS norms of Wan and Qwen-Image do."""
    given = dict(zip(("input", "p", "dim", "eps", "out"), args, strict=False)) | kwargs
    x = given.pop("input")
    if given.get("dim", 1) != 1 or given.get("out") is not None or not waits(turns, x):
        return NotImplemented
    return later(turns, x, lambda strip: F.normalize(strip, **given), (HERE,))


def upsample(turns: Turning, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Repeat rows and columns later, where the factors are whole numbers."""
    given = dict(zip(("input", "size", "scale_factor", "mode"), args, strict=False)) | kwargs
    x, size, factor, mode = (given.get(name) for name in ("input", "size", "scale_factor", "mode"))
    if mode not in (None, "nearest", "nearest-exact") or not isinstance(x, Tensor):
        return NotImplemented
    old, count = x.shape[2:], x.ndim - 2
    new = _sizes(size, factor, old) if size is not None or factor is not None else None
    if new is None or len(new) != count or any(b % a for a, b in zip(old, new, strict=True)):
        return NotImplemented
    factors = [b // a for a, b in zip(old, new, strict=True)]
    grows = torch.Size(factors).numel()
    if not (isinstance(x, Pending) or turns.large(x, grows)):
        return NotImplemented
    if chain_of(turns, x).depth:  # its values are fewer than those that wait
        x = settled(turns, x)
    scales = tuple(map(float, factors))
    step = Step(
        lambda strip: F.interpolate(strip, scale_factor=scales, mode=mode or "nearest"), (HERE,), factors[turns.dim]
    )
    return extended(turns, x, step, (*x.shape[:2], *new))


def _sizes(size: Any, factor: Any, old: torch.Size) -> list[int] | None:
    """Return the sizes after an upsampling, or None where a factor is no whole number."""
    wanted = size if factor is None else factor
    every = [*wanted] if isinstance(wanted, list | tuple) else [wanted] * len(old)
    if factor is None:
        return [int(x) for x in every]
    return [int(x) * n for x, n in zip(every, old, strict=True)] if all(float(x).is_integer() for x in every) else None


def pad(turns: Turning, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Add zeros later: the convolution that follows adds them to each strip."""
    given = dict(zip(("input", "pad", "mode", "value"), args, strict=False)) | kwargs
    x, padding = given["input"], tuple(given["pad"])
    if given.get("mode", "constant") != "constant" or given.get("value") or not waits(turns, x):
        return NotImplemented
    if min(padding) < 0 or len(padding) > 6 or not any(padding):
        return x if not any(padding) else NotImplemented
    chain = replace(chain_of(turns, x))  # one of its own, which counts as a reference to the source
    with torch._C.DisableTorchFunction():
        inner = Pending.of(chain, tuple(x.shape), x.dtype, turns.work)
        return turns.keep(inner.padded(padding))


def index(turns: Turning, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Take some frames (or channels) later."""
    x, key = args
    entries = key if isinstance(key, tuple) else (key,)
    if not isinstance(x, Pending) or len(entries) > x.ndim or not all(isinstance(e, slice) for e in entries):
        return NotImplemented
    if any(e != slice(None) for e in entries[x.ndim - 2 :]):
        return NotImplemented
    with torch._C.DisableTorchFunction():
        shape = x.as_subclass(Tensor)[key].shape
    return later(turns, x, Tensor.__getitem__, (HERE, key), shape)


def concatenate(turns: Turning, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Join a pending tensor with others along frames or channels later."""
    given = dict(zip(("tensors", "dim"), args, strict=False)) | kwargs
    tensors, dim = [*given["tensors"]], given.get("dim", 0)
    first = next((x for x in tensors if isinstance(x, Pending)), None)
    if first is None or dim % first.ndim >= first.ndim - 2 or any(x.ndim != first.ndim for x in tensors):
        return NotImplemented
    shape = list(first.shape)
    shape[dim] = sum(x.shape[dim] for x in tensors)
    if any(x.dtype != first.dtype for x in tensors):
        return NotImplemented
    parts = [HERE if x is first else settled(turns, x) for x in tensors]
    return later(turns, first, torch.cat, (parts, dim), shape)


def copied(turns: Turning, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Return the values of a pending tensor, which are a copy already; contiguous changes nothing that waits."""
    x = args[0]
    if kwargs or len(args) > 1 or not isinstance(x, Pending):
        return NotImplemented
    if func is Tensor.contiguous:
        return x
    if x.padding or x.value is not None or chain_of(turns, x).depth:
        return NotImplemented
    with torch._C.DisableTorchFunction():
        return computed(chain_of(turns, x), tuple(x.shape), x.dtype, turns.work.strip_bytes)


def _at(args: Args, index: int, default: Any) -> Any:
    return args[index] if len(args) > index else default


_operators = ("add", "sub", "mul", "truediv", "radd", "rmul")
_named = ("add", "sub", "mul", "div")
LAZY: dict[Any, Callable[[Any, Any, Args, Kwargs], Any]] = {
    **dict.fromkeys((F.silu, F.relu, F.gelu, F.leaky_relu, torch.relu), activation),
    **{getattr(Tensor, f"__{name}__"): arithmetic for name in _operators},
    **{getattr(owner, name): arithmetic for name in _named for owner in (torch, Tensor)},
    **dict.fromkeys((Tensor.float, Tensor.to, Tensor.type_as), cast),
    **dict.fromkeys((Tensor.clone, torch.clone, Tensor.contiguous), copied),
    F.dropout: dropout,
    F.normalize: normalize,
    F.interpolate: upsample,
    F.pad: pad,
    torch.cat: concatenate,
    over_channels: over_channels_later,
    Tensor.__getitem__: index,
}
