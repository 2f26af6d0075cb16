"""What each function does to a strip: rules by function, and the mode in which diffusers' modules run on a strip.

The modules and their weights stay diffusers' own, so there is no copy of a model that could differ. A rule is called in
place of the function, with the strip, the function and its arguments. Functions that are in neither `RULES` nor
`known.LOCAL` are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name

from seqpar.kernels import upsample
from seqpar.vae import edges, norms
from seqpar.vae.attention import attention
from seqpar.vae.cut import Strip
from seqpar.vae.known import LOCAL
from seqpar.vae.padding import pad_strip

Rule = Callable[..., Any]
"""Takes a `Strip`, the function, and the function's own arguments; returns what the function does on the strip."""


@dataclass(frozen=True)
class ConvolutionSettings:
    """What conv2d and conv3d take besides their input, under torch's names."""

    weight: Tensor
    bias: Tensor | None = None
    stride: Any = 1
    padding: Any = 0
    dilation: Any = 1
    groups: int = 1

    def along(self, value: Any) -> tuple[int, ...]:
        """Return a value for each dim of the kernel."""
        count = self.weight.ndim - 2
        return (value,) * count if isinstance(value, int) else tuple(value) * (count // len(value))

    def padded(self, dim: int, pad: int) -> tuple[int, ...]:
        """Return the padding, with another one along a dim that is counted from the end."""
        pads = [*self.along(self.padding)]
        pads[dim] = pad
        return tuple(pads)


def convolve(strip: Strip, function: Any, input: Tensor, *settings: Any, **named: Any) -> Tensor:
    """Apply the rule of conv2d and conv3d: padding along the cut dim becomes rows of the neighbours."""
    at, own = strip.cut.dim, ConvolutionSettings(*settings, **named)
    weight, apart = own.weight, norms.adds_apart(input, own.bias)
    if isinstance(own.padding, str) or input.ndim != weight.ndim:
        shape = tuple(input.shape)
        strip.refuse(f"got a convolution of {shape} with padding {own.padding!r}, expected numbers and a batch")
    pad, reach = own.along(own.padding)[at], (weight.shape[at] - 1) * own.along(own.dilation)[at]

    def apply(x: Tensor, pad: int) -> Tensor:
        bias = None if apart else own.bias
        return function(x, weight, bias, own.stride, own.padded(at, pad), own.dilation, own.groups)

    if pad > 0 or reach == 0:
        strip.check(input)
    elif not strip.is_padded(input):
        strip.refuse(f"got a convolution over {reach + 1} rows without padding, of a tensor that was not padded")
    out = _with_halo(strip, input, (pad, reach, own.along(own.stride)[at]), apply) if pad else apply(input, 0)
    strip.check(out)
    return norms.with_bias(out, own.bias) if apart else out


def _with_halo(strip: Strip, x: Tensor, sizes: tuple[int, int, int], apply: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Return the convolution of a strip x with rows of its neighbours; sizes: padding, rows of the kernel - 1, stride.

    apply: the convolution of a tensor with so many rows of zeros on both sides.
    """
    pad = sizes[0]
    if strip.cut.axis.size == 1:
        return apply(x, pad)
    if edges.fits(strip, x, *sizes):
        return edges.convolve(strip, x, pad, apply)
    return apply(pad_strip(strip, x, {strip.cut.dim: (pad, pad)}), 0)


def pad(
    strip: Strip, function: Any, input: Tensor, pad: Any, mode: str = "constant", value: float | None = None
) -> Tensor:
    """Apply the rule of `torch.nn.functional.pad`: only padding along the cut dim needs the neighbours."""
    pads = {-1 - index: (pad[2 * index], pad[2 * index + 1]) for index in range(len(pad) // 2)}
    if pads.get(strip.cut.dim, (0, 0)) == (0, 0):
        return function(input, pad, mode, value)
    if min(pad) < 0:
        strip.refuse(f"got padding {tuple(pad)}, expected no negative numbers")
    strip.check(input)
    return pad_strip(strip, input, pads, mode, value or 0.0)


def interpolate(
    strip: Strip,
    function: Any,
    input: Tensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    *more: Any,
    **named: Any,
) -> Tensor:
    """Apply the rule of `torch.nn.functional.interpolate`: a nearest one by whole factors is local."""
    factors = scale_factor if isinstance(scale_factor, (tuple, list)) else [scale_factor]
    if size is not None or mode not in ("nearest", "nearest-exact") or any(f != int(f) for f in factors):
        strip.refuse(f"got interpolation {mode!r} to {size or scale_factor}, expected the nearest by whole factors")
    strip.check(input)
    if input.ndim == 4 and {*factors} == {2}:
        return upsample.double(input)
    return function(input, size, scale_factor, mode, *more, **named)


def dropout(
    strip: Strip, function: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    """Return the input of `torch.nn.functional.dropout`; a dropout that is active is refused."""
    if training and p:
        strip.refuse("got an active dropout, which would draw other numbers for a strip; call eval()")
    return input


RULES: Mapping[Callable[..., Any], Rule] = {
    F.conv2d: convolve,
    F.conv3d: convolve,
    F.pad: pad,
    F.group_norm: norms.group_norm,
    F.layer_norm: norms.layer_norm,
    F.normalize: norms.normalize,
    torch.Tensor.mean: norms.mean,
    norms.normed: norms.apply_normed,
    norms.sum_of: norms.apply_sum,
    F.scaled_dot_product_attention: attention,
    F.interpolate: interpolate,
    F.dropout: dropout,
}


class StripMode(TorchFunctionMode):
    """While it is entered, torch functions of this thread act on this rank's strip. It computes no gradients.

    Raises ValueError for a function that has no rule and is not known to act on each pixel alone.
    """

    def __init__(self, strip: Strip) -> None:
        super().__init__()
        self._strip = strip

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function's rule, or the function itself where it is local."""
        rule = RULES.get(func)
        if rule is not None:
            return rule(self._strip, func, *args, **(kwargs or {}))
        if func not in LOCAL:
            name = resolve_name(func) or getattr(func, "__name__", repr(func))
            self._strip.refuse(f"got the function {name}, which has no rule for strips")
        return func(*args, **(kwargs or {}))
