"""Norms on strips: statistics over all ranks, and modules that compute a norm and the SiLU after it in one kernel.

Moments of groups are combined in the order of the ranks, so that all ranks get the same bits. `normed` and `sum_of`
stand for several functions of torch; `StripMode` sees them like those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function

from seqpar.kernels import group_norm as kernels
from seqpar.kernels import images
from seqpar.kernels.group_norm import places_last
from seqpar.vae import known
from seqpar.vae.strips import Strip


@contextmanager
def fewer_passes(vae: nn.Module) -> Iterator[None]:
    """While it is entered, modules of a VAE compute by the functions below.

    Modules whose `forward` was replaced, to load weights for example, are left alone. The VAE object changes meanwhile
    (and `ParallelVAE` sets its `use_tiling`), so two threads must not call one VAE at the same time.
    """
    changed: list[nn.Module] = []
    try:
        for owner in vae.modules():
            for module, forward in _forwards(owner).items():
                module.forward = forward
                changed.append(module)
        yield
    finally:
        for module in changed:
            del module.forward


def _forwards(module: Any) -> dict[nn.Module, Callable[..., Tensor]]:
    name = type(module).__name__
    if name in FORWARDS and not _replaced(module.modules()):
        return {module: partial(FORWARDS[name], module)}
    if name in known.ACTIVATED:
        activation, *before = (getattr(module, child) for child in known.ACTIVATED[name])
        if not _replaced((activation, *before)):
            return {activation: lambda x: x, **{norm: partial(_activated, norm) for norm in before}}
    return {}


def _replaced(modules: Iterable[nn.Module]) -> bool:
    return any("forward" in vars(module) for module in modules)


def picture_block(block: Any, input_tensor: Tensor, temb: None = None) -> Tensor:
    """`forward` of a VAE's ResnetBlock2D, without a timestep, for an image (N, C, H, W)."""
    hidden, bias = _without_bias(block.conv1, normed(input_tensor, block.norm1, True))
    hidden = block.dropout(normed(hidden, block.norm2, True, bias))
    hidden, bias = _without_bias(block.conv2, hidden)
    shortcut = input_tensor, None
    if block.conv_shortcut is not None:
        shortcut = _without_bias(block.conv_shortcut, input_tensor)
    out = sum_of(shortcut, (hidden, bias))
    return out if block.output_scale_factor == 1 else out / block.output_scale_factor


def video_block(block: Any, x: Tensor, feat_cache: list[Any] | None = None, feat_idx: Any = None) -> Tensor:
    """`forward` of a residual block of Wan or Qwen-Image for some frames (N, C, T, H, W).

    feat_cache: the last frames of the input of each convolution. feat_idx: a list of one number, the next convolution.
    """
    shortcut = (x, None) if isinstance(block.conv_shortcut, nn.Identity) else _causal(block.conv_shortcut, x, None)
    hidden, before = _cached(normed(x, block.norm1, True), feat_cache, feat_idx)
    hidden = block.dropout(normed(block.conv1(hidden, before), block.norm2, True))
    hidden, before = _cached(hidden, feat_cache, feat_idx)
    hidden, bias = _causal(block.conv2, hidden, before)
    return sum_of((hidden, bias), shortcut)


def _without_bias(conv: nn.Conv2d, x: Tensor) -> Biased:
    if not adds_apart(x, conv.bias):
        return conv(x), None
    y = F.conv2d(x, conv.weight, None, conv.stride, conv.padding, conv.dilation, conv.groups)
    return (y, conv.bias) if places_last(y) is False else (with_bias(y, conv.bias), None)


def _causal(conv: Any, x: Tensor, before: Tensor | None) -> Biased:
    if not adds_apart(x, conv.bias):
        return conv(x, before), None
    frames, rows, columns = conv.kernel_size
    if before is not None:
        x = torch.cat([before, x], dim=2)
    missing = frames - 1 - (0 if before is None else before.shape[2])
    if rows > 1:
        x = F.pad(x, (columns // 2, columns // 2, rows // 2, rows // 2, missing, 0))
    y = F.conv3d(x, conv.weight, None, conv.stride)
    return (y, conv.bias) if places_last(y) is False else (with_bias(y, conv.bias), None)


def _cached(x: Tensor, feat_cache: list[Any] | None, feat_idx: Any) -> tuple[Tensor, Tensor | None]:
    """Return the input of a convolution and the frames before it; the cache takes the last frames of x."""
    if feat_cache is None:
        return x, None
    index, last = feat_idx[0], x[:, :, -CACHED:].clone()
    before = feat_cache[index]
    if last.shape[2] < CACHED and before is not None:
        last = torch.cat([before[:, :, -1:], last], dim=2)
    feat_cache[index], feat_idx[0] = last, index + 1
    return x, before


def _activated(norm: Any, x: Tensor) -> Tensor:
    return normed(x, norm, True)


def _rms_norm(norm: Any, x: Tensor) -> Tensor:
    return normed(x, norm) if norm.channel_first else type(norm).forward(norm, x)


def _upsample(module: Any, x: Tensor) -> Tensor:
    """Upsample in x's dtype; a nearest one only copies, so that the bits are those of a conversion to fp32 and back.

    fp64 is left to diffusers, which rounds it to fp32.
    """
    if not module.mode.startswith("nearest") or x.dtype == torch.float64:
        return type(module).forward(module, x)
    return F.interpolate(x, size=module.size, scale_factor=module.scale_factor, mode=module.mode)


CACHED = 2  # frames that a causal convolution keeps of its input
FORWARDS: dict[str, Callable[..., Tensor]] = {
    **dict.fromkeys(known.IMAGE_BLOCKS, picture_block),
    **dict.fromkeys(known.VIDEO_BLOCKS, video_block),
    **dict.fromkeys(known.CHANNEL_NORMS, _rms_norm),
    **dict.fromkeys(known.UPSAMPLINGS, _upsample),
}
"""Class of diffusers -> the function in place of its `forward`, with the module as the first argument."""


Biased = tuple[Tensor, Tensor | None]
"""An image (N, C, ...), and a bias (C,) that is still to be added to it, or None."""


def normed(x_NC: Tensor, norm: nn.Module, silu: bool = False, shift_C: Tensor | None = None) -> Tensor:
    """Apply a norm of diffusers to x + shift, (N, C, ...), then SiLU if `silu`.

    norm: a GroupNorm, or an RMSNorm over channels with `gamma` and `bias`, which takes no shift.
    """
    return handle_torch_function(normed, (x_NC,), x_NC, norm, silu, shift_C)


def sum_of(first: Biased, second: Biased) -> Tensor:
    """Return the sum of two images and their biases, rounded once."""
    return handle_torch_function(sum_of, (first[0],), first, second)


def apply_normed(
    strip: Strip, function: Any, x_NC: Tensor, norm: Any, silu: bool = False, shift_C: Tensor | None = None
) -> Tensor:
    if isinstance(norm, nn.GroupNorm):
        affine = kernels.Affine(norm.weight, norm.bias, norm.eps, shift_C)
        return _group_norm(strip, x_NC, norm.num_groups, affine, silu)
    bias = norm.bias.flatten() if isinstance(norm.bias, Tensor) else None
    return images.channel_norm(kernels.dense(x_NC)[0], norm.gamma.flatten(), bias, silu)


def group_norm(
    strip: Strip,
    function: Any,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    return _group_norm(strip, input, num_groups, kernels.Affine(weight, bias, eps), silu=False)


def _group_norm(strip: Strip, x_NC: Tensor, groups: int, affine: kernels.Affine, silu: bool) -> Tensor:
    x_NC, _ = kernels.dense(x_NC)
    moments_NG3 = kernels.moments(x_NC, groups, affine.shift_C)
    if strip.cut.axis.size > 1:
        moments_NG3 = kernels.combine(strip.exchanges.gathered(moments_NG3))
    return kernels.normalise(x_NC, moments_NG3, affine, silu)


def apply_sum(strip: Strip, function: Any, first: Biased, second: Biased) -> Tensor:
    (x, _), (y, _) = first, second
    if (first[1] is None and second[1] is None) or x.stride() != y.stride() or x.dtype != y.dtype:
        return with_bias(*first) + with_bias(*second)
    return images.add(first, second)


def adds_apart(x: Tensor, bias: Tensor | None) -> bool:
    """Return whether seqpar's kernel adds the bias of a convolution of x: in channels-last memory.

    cuDNN's convolutions as torch calls them add no bias, so torch needs a separate pass, too.
    """
    return bias is not None and bias.dtype == x.dtype and kernels.places_last(x) is False


def with_bias(y_NC: Tensor, bias_C: Tensor | None) -> Tensor:
    """Add a bias to the output y of a convolution, in place."""
    if bias_C is None:
        return y_NC
    if kernels.places_last(y_NC) is False:
        return images.add((y_NC, bias_C), None, y_NC)
    return y_NC.add_(bias_C.view(-1, *[1] * (y_NC.ndim - 2)))


def over_channels(strip: Strip, x: Tensor, dims: Any) -> None:
    """Raise for a reduction over rows or columns. The last dim is channels if the two before it are the strip."""
    dims = {dim - x.ndim if dim >= 0 else dim for dim in dims}
    if dims == {-1} and x.ndim >= 4 and strip.cut.fits(x[..., 0]):
        return
    if dims & {-1, -2}:
        strip.refuse(f"got a reduction of {tuple(x.shape)} over dims {sorted(dims)}, which include rows or columns")


def normalize(
    strip: Strip, function: Any, input: Tensor, p: float = 2.0, dim: int = 1, *args: Any, **kwargs: Any
) -> Tensor:
    over_channels(strip, input, (dim,))
    return function(input, p, dim, *args, **kwargs)


def layer_norm(strip: Strip, function: Any, input: Tensor, normalized_shape: Any, *args: Any, **kwargs: Any) -> Tensor:
    over_channels(strip, input, range(-len(normalized_shape), 0))
    return function(input, normalized_shape, *args, **kwargs)


def mean(strip: Strip, function: Any, input: Tensor, dim: Any = None, *args: Any, **kwargs: Any) -> Tensor:
    over_channels(strip, input, range(input.ndim) if dim is None else dim if isinstance(dim, tuple) else (dim,))
    return function(input, dim, *args, **kwargs)
