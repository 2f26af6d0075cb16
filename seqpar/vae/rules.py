"""What each function does to a strip: the table of rules by function, and the rules of convolutions and reductions.

A rule is called in place of the function. Functions that are in neither `RULES` nor `known.LOCAL` are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from seqpar.kernels import upsample
from seqpar.vae import edges
from seqpar.vae.attention import attention
from seqpar.vae.norms import add, biased, divide, group_norm, left_out, norm_of_channels, over_channels, silu
from seqpar.vae.padding import pad_strip
from seqpar.vae.place import Place

Rule = Callable[[Place, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


@dataclass(frozen=True)
class Settings:
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


def taken(input: Tensor, *settings: Any, **named: Any) -> tuple[Tensor, Settings]:
    """Return the input of conv2d or conv3d, and what they take besides, from their arguments."""
    return input, Settings(*settings, **named)


def convolve(place: Place, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Apply the rule of conv2d and conv3d: padding along the cut dim becomes rows of the neighbours."""
    return _convolve(place, function, *taken(*args, **kwargs))


def _convolve(place: Place, function: Callable[..., Any], input: Tensor, given: Settings) -> Tensor:
    at, weight = place.cut.dim, given.weight
    if isinstance(given.padding, str) or input.ndim != weight.ndim:
        shape = tuple(input.shape)
        place.refuse(f"got a convolution of {shape} with padding {given.padding!r}, expected numbers and a batch")
    pad, reach = given.along(given.padding)[at], (weight.shape[at] - 1) * given.along(given.dilation)[at]
    held, bias = (given.bias, None) if left_out(place, input, given.bias) else (None, given.bias)

    def apply(x: Tensor, pad: int) -> Tensor:
        return function(x, weight, bias, given.stride, given.padded(at, pad), given.dilation, given.groups)

    if pad > 0 or reach == 0:
        place.check(input)
    elif place.halo(input) is None:
        place.refuse(f"got a convolution over {reach + 1} rows without padding, of a tensor that was not padded")
    out = _with_halo(place, input, (pad, reach, given.along(given.stride)[at]), apply) if pad else apply(input, 0)
    place.check(out)
    return out if held is None else biased(place, out, held)


def _with_halo(
    place: Place, strip: Tensor, sizes: tuple[int, int, int], apply: Callable[[Tensor, int], Tensor]
) -> Tensor:
    """Return the convolution of a strip with rows of its neighbours; sizes: padding, rows of the kernel - 1, stride.

    apply: the convolution of a tensor with so many rows of zeros on both sides.
    """
    pad = sizes[0]
    if place.cut.axis.size == 1:
        return apply(strip, pad)
    if edges.fits(place, strip, *sizes):
        return edges.convolve(place, strip, pad, apply)
    return apply(pad_strip(place, strip, {place.cut.dim: (pad, pad)}), 0)


def pad(place: Place, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Apply the rule of `torch.nn.functional.pad`: only padding along the cut dim needs the neighbours."""
    return _pad(place, function, *args, **kwargs)


def _pad(
    place: Place,
    function: Callable[..., Any],
    input: Tensor,
    pad: Any,
    mode: str = "constant",
    value: float | None = None,
) -> Tensor:
    pads = {-1 - index: (pad[2 * index], pad[2 * index + 1]) for index in range(len(pad) // 2)}
    if pads.get(place.cut.dim, (0, 0)) == (0, 0):
        return function(input, pad, mode, value)
    if min(pad) < 0:
        place.refuse(f"got padding {tuple(pad)}, expected no negative numbers")
    place.check(input)
    return pad_strip(place, input, pads, mode, value or 0.0)


def interpolate(place: Place, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Apply the rule of `torch.nn.functional.interpolate`: a nearest one by whole factors is local."""
    return _interpolate(place, function, *args, **kwargs)


def _interpolate(
    place: Place,
    function: Callable[..., Any],
    input: Tensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    *more: Any,
    **named: Any,
) -> Tensor:
    factors = scale_factor if isinstance(scale_factor, (tuple, list)) else [scale_factor]
    if size is not None or mode not in ("nearest", "nearest-exact") or any(f != int(f) for f in factors):
        place.refuse(f"got interpolation {mode!r} to {size or scale_factor}, expected the nearest by whole factors")
    place.check(input)
    if input.ndim == 4 and {*factors} == {2}:
        return upsample.double(input)
    return function(input, size, scale_factor, mode, *more, **named)


def normalize(place: Place, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Apply the rule of `torch.nn.functional.normalize`, which is local over channels."""

    def rule(input: Tensor, p: float = 2.0, dim: int = 1, *more: Any, **named: Any) -> Tensor:
        _over_channels(place, input, (dim,))
        return function(input, p, dim, *more, **named)

    return rule(*args, **kwargs)


def mean(place: Place, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Apply the rule of `Tensor.mean`, which is local over channels and frames."""

    def rule(input: Tensor, dim: Any = None, *more: Any, **named: Any) -> Tensor:
        _over_channels(place, input, range(input.ndim) if dim is None else dim if isinstance(dim, tuple) else (dim,))
        return function(input, dim, *more, **named)

    return rule(*args, **kwargs)


def layer_norm(place: Place, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Apply the rule of `torch.nn.functional.layer_norm`, which is local over channels in the last dim."""

    def rule(input: Tensor, normalized_shape: Any, *more: Any, **named: Any) -> Tensor:
        _over_channels(place, input, range(-len(normalized_shape), 0))
        return function(input, normalized_shape, *more, **named)

    return rule(*args, **kwargs)


def dropout(place: Place, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the input of `torch.nn.functional.dropout`; a dropout that is active is refused."""

    def rule(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if training and p:
            place.refuse("got an active dropout, which would draw other numbers for a strip; call eval()")
        return input

    return rule(*args, **kwargs)


def _over_channels(place: Place, x: Tensor, dims: Any) -> None:
    """Refuse a reduction over rows or columns. The last dim is channels if the two before it are the strip."""
    dims = {dim - x.ndim if dim >= 0 else dim for dim in dims}
    if dims == {-1} and x.ndim >= 4 and place.cut.fits(x[..., 0]):
        return
    if dims & {-1, -2}:
        place.refuse(f"got a reduction of {tuple(x.shape)} over dims {sorted(dims)}, which include rows or columns")


RULES: Mapping[Callable[..., Any], Rule] = {
    F.conv2d: convolve,
    F.conv3d: convolve,
    F.pad: pad,
    F.group_norm: group_norm,
    F.silu: silu,
    over_channels: norm_of_channels,
    torch.Tensor.add: add,
    torch.add: add,
    torch.Tensor.div: divide,
    F.layer_norm: layer_norm,
    F.normalize: normalize,
    torch.Tensor.mean: mean,
    F.scaled_dot_product_attention: attention,
    F.interpolate: interpolate,
    F.dropout: dropout,
}

TAKERS = frozenset({F.group_norm, F.silu, torch.Tensor.add, torch.add})
"""Functions whose rules take tensors that are not written yet; before all others these are written."""
