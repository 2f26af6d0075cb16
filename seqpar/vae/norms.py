"""Rules of norms: statistics over the strips of all ranks, and one kernel for a norm and the SiLU that follows it.

Moments of groups are combined in the order of the ranks, so that all ranks get the same bits. `normed` and `sum_of` are
what `seqpar.vae.blocks` calls in place of several functions of torch; the function mode sees them like those.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.overrides import handle_torch_function

from seqpar.kernels import group_norm as kernels
from seqpar.kernels import residual
from seqpar.kernels.channel_norm import channel_norm
from seqpar.vae.cut import Strip

Biased = tuple[Tensor, Tensor | None]
"""A picture (N, C, ...), and a bias (C,) that is still to be added to it, or None."""


def normed(x_NC: Tensor, norm: nn.Module, silu: bool = False, shift_C: Tensor | None = None) -> Tensor:
    """Return the norm of x + shift, (N, C, ...), by diffusers' module of a norm, followed by SiLU if `silu`.

    norm: a GroupNorm, or an RMSNorm over channels with `gamma` and `bias`, which takes no shift.
    """
    return handle_torch_function(normed, (x_NC,), x_NC, norm, silu, shift_C)


def sum_of(first: Biased, second: Biased) -> Tensor:
    """Return the sum of two pictures and their biases, rounded once."""
    return handle_torch_function(sum_of, (first[0],), first, second)


def apply_normed(
    strip: Strip, function: Any, x_NC: Tensor, norm: Any, silu: bool = False, shift_C: Tensor | None = None
) -> Tensor:
    """Apply the rule of `normed`."""
    if isinstance(norm, nn.GroupNorm):
        affine = kernels.Affine(norm.weight, norm.bias, norm.eps, shift_C)
        return _group_norm(strip, x_NC, norm.num_groups, affine, silu)
    bias = norm.bias.flatten() if isinstance(norm.bias, Tensor) else None
    return channel_norm(kernels.dense(x_NC)[0], norm.gamma.flatten(), bias, silu)


def group_norm(
    strip: Strip,
    function: Any,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Apply the rule of `torch.nn.functional.group_norm` to a strip (N, C, ...)."""
    return _group_norm(strip, input, num_groups, kernels.Affine(weight, bias, eps), silu=False)


def _group_norm(strip: Strip, x_NC: Tensor, groups: int, affine: kernels.Affine, silu: bool) -> Tensor:
    x_NC, _ = kernels.dense(x_NC)
    moments_NG3 = kernels.moments(x_NC, groups, affine.shift_C)
    if strip.cut.axis.size > 1:
        moments_NG3 = kernels.combine(strip.exchanges.every(moments_NG3))
    return kernels.normalise(x_NC, moments_NG3, affine, silu)


def apply_sum(strip: Strip, function: Any, first: Biased, second: Biased) -> Tensor:
    """Apply the rule of `sum_of`, which is local."""
    (x, _), (y, _) = first, second
    if (first[1] is None and second[1] is None) or x.stride() != y.stride() or x.dtype != y.dtype:
        return with_bias(*first) + with_bias(*second)
    return residual.add(first, second)


def adds_apart(x: Tensor, bias: Tensor | None) -> bool:
    """Return whether a kernel of ours adds the bias of a convolution of x: in channels-last memory.

    cuDNN's convolutions as torch calls them add no bias, so torch needs a pass of its own, too.
    """
    return bias is not None and bias.dtype == x.dtype and kernels.places_last(x) is False


def with_bias(y_NC: Tensor, bias_C: Tensor | None) -> Tensor:
    """Return the output y of a convolution with its bias, which is added in place."""
    if bias_C is None:
        return y_NC
    if kernels.places_last(y_NC) is False:
        return residual.add((y_NC, bias_C), None, y_NC)
    return y_NC.add_(bias_C.view(-1, *[1] * (y_NC.ndim - 2)))


def over_channels(strip: Strip, x: Tensor, dims: Any) -> None:
    """Refuse a reduction over rows or columns. The last dim is channels if the two before it are the strip."""
    dims = {dim - x.ndim if dim >= 0 else dim for dim in dims}
    if dims == {-1} and x.ndim >= 4 and strip.cut.fits(x[..., 0]):
        return
    if dims & {-1, -2}:
        strip.refuse(f"got a reduction of {tuple(x.shape)} over dims {sorted(dims)}, which include rows or columns")


def normalize(
    strip: Strip, function: Any, input: Tensor, p: float = 2.0, dim: int = 1, *more: Any, **named: Any
) -> Tensor:
    """Apply the rule of `torch.nn.functional.normalize`, which is local over channels."""
    over_channels(strip, input, (dim,))
    return function(input, p, dim, *more, **named)


def layer_norm(strip: Strip, function: Any, input: Tensor, normalized_shape: Any, *more: Any, **named: Any) -> Tensor:
    """Apply the rule of `torch.nn.functional.layer_norm`, which is local over channels in the last dim."""
    over_channels(strip, input, range(-len(normalized_shape), 0))
    return function(input, normalized_shape, *more, **named)


def mean(strip: Strip, function: Any, input: Tensor, dim: Any = None, *more: Any, **named: Any) -> Tensor:
    """Apply the rule of `Tensor.mean`, which is local over channels and frames."""
    over_channels(strip, input, range(input.ndim) if dim is None else dim if isinstance(dim, tuple) else (dim,))
    return function(input, dim, *more, **named)
