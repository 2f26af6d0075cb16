"""Blocks of diffusers' VAEs with fewer passes over a picture: a norm with its SiLU, a sum with the biases before it.

Each function computes what the `forward` of diffusers' class does, on diffusers' own module and its weights, inside a
`StripMode`. A group norm and the SiLU after it are one kernel. In channels-last memory the biases of the convolutions
before a group norm or a sum are added by those. Wan and Qwen-Image write an RMSNorm as seven functions, with
conversions to fp32 in between; here it is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqpar.kernels.group_norm import places_last
from seqpar.vae.norms import Biased, adds_apart, normed, sum_of, with_bias


@contextmanager
def fewer_passes(vae: nn.Module) -> Iterator[None]:
    """While it is entered, modules of a VAE compute by the functions below.

    Modules of which one has another `forward` by somebody else, to load its weights for example, are left alone. The
    VAE object itself is changed meanwhile (and `ParallelVAE` sets its `use_tiling`), so two threads must not call one
    VAE at the same time.
    """
    changed: list[nn.Module] = []
    try:
        for module in vae.modules():
            for each, forward in _forwards(module).items():
                each.forward = forward
                changed.append(each)
        yield
    finally:
        for module in changed:
            del module.forward


def _forwards(module: Any) -> dict[nn.Module, Callable[..., Tensor]]:
    """Return modules, this one or children of it, with what takes the place of their `forward`."""
    name = type(module).__name__
    if name in FORWARDS and not _replaced(module.modules()):
        return {module: partial(FORWARDS[name], module)}
    if name in ACTIVATED:
        activation, *before = (getattr(module, each) for each in ACTIVATED[name])
        if not _replaced((activation, *before)):
            return {activation: _unchanged, **{norm: partial(_normed, norm, True) for norm in before}}
    return {}


def _replaced(modules: Iterable[nn.Module]) -> bool:
    return any("forward" in vars(module) for module in modules)


def picture_block(block: Any, input_tensor: Tensor, temb: None = None) -> Tensor:
    """Return what a ResnetBlock2D of a VAE, which has no embedding of a timestep, makes of a picture (N, C, H, W)."""
    hidden, bias = _without_bias(block.conv1, normed(input_tensor, block.norm1, True))
    hidden = block.dropout(normed(hidden, block.norm2, True, bias))
    hidden, bias = _without_bias(block.conv2, hidden)
    shortcut = input_tensor, None
    if block.conv_shortcut is not None:
        shortcut = _without_bias(block.conv_shortcut, input_tensor)
    out = sum_of(shortcut, (hidden, bias))
    return out if block.output_scale_factor == 1 else out / block.output_scale_factor


def video_block(block: Any, x: Tensor, feat_cache: list[Any] | None = None, feat_idx: Any = None) -> Tensor:
    """Return what a residual block of Wan or Qwen-Image makes of some frames (N, C, T, H, W).

    feat_cache: the last frames of the input of each convolution. feat_idx: a list of one number, the next convolution.
    """
    shortcut = (x, None) if isinstance(block.conv_shortcut, nn.Identity) else _causal(block.conv_shortcut, x, None)
    hidden, before = _cached(normed(x, block.norm1, True), feat_cache, feat_idx)
    hidden = block.dropout(normed(block.conv1(hidden, before), block.norm2, True))
    hidden, before = _cached(hidden, feat_cache, feat_idx)
    hidden, bias = _causal(block.conv2, hidden, before)
    return sum_of((hidden, bias), shortcut)


def _without_bias(conv: nn.Conv2d, x: Tensor) -> Biased:
    """Return the convolution of x, and its bias if that is still to be added."""
    if not adds_apart(x, conv.bias):
        return conv(x), None
    y = F.conv2d(x, conv.weight, None, conv.stride, conv.padding, conv.dilation, conv.groups)
    return (y, conv.bias) if places_last(y) is False else (with_bias(y, conv.bias), None)


def _causal(conv: Any, x: Tensor, before: Tensor | None) -> Biased:
    """Return a causal convolution after the frames `before`, and its bias if that is still to be added."""
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
    """Return the input of a convolution and the frames before it; the last frames of x are kept for the next call."""
    if feat_cache is None:
        return x, None
    index, last = feat_idx[0], x[:, :, -CACHED:].clone()
    before = feat_cache[index]
    if last.shape[2] < CACHED and before is not None:
        last = torch.cat([before[:, :, -1:], last], dim=2)
    feat_cache[index], feat_idx[0] = last, index + 1
    return x, before


def _unchanged(x: Tensor) -> Tensor:
    return x


def _normed(norm: Any, silu: bool, x: Tensor) -> Tensor:
    return normed(x, norm, silu)


def _rms_norm(norm: Any, x: Tensor) -> Tensor:
    return normed(x, norm) if norm.channel_first else type(norm).forward(norm, x)


def _upsample(module: Any, x: Tensor) -> Tensor:
    """Upsample in x's dtype; a nearest one only copies, so that the bits are those of a conversion to fp32 and back.

    fp64 is left to diffusers, which rounds it to fp32.
    """
    if not module.mode.startswith("nearest") or x.dtype == torch.float64:
        return type(module).forward(module, x)
    return F.interpolate(x, size=module.size, scale_factor=module.scale_factor, mode=module.mode)


CACHED = 2  # frames that a causal convolution of Wan or Qwen-Image keeps of its input
FORWARDS: dict[str, Callable[..., Tensor]] = {
    "ResnetBlock2D": picture_block,
    **dict.fromkeys(("WanResidualBlock", "QwenImageResidualBlock"), video_block),
    **dict.fromkeys(("WanRMS_norm", "QwenImageRMS_norm"), _rms_norm),
    **dict.fromkeys(("WanUpsample", "QwenImageUpsample"), _upsample),
}
"""Class of diffusers -> what takes the place of its `forward`, with the module as the first argument."""
ACTIVATED = {
    **dict.fromkeys(
        ("Encoder", "Decoder", "HunyuanVideoEncoder3D", "HunyuanVideoDecoder3D"), ("conv_act", "conv_norm_out")
    ),
    **dict.fromkeys(
        ("WanEncoder3d", "WanDecoder3d", "QwenImageEncoder3d", "QwenImageDecoder3d"), ("nonlinearity", "norm_out")
    ),
    "HunyuanVideoResnetBlockCausal3D": ("nonlinearity", "norm1", "norm2"),
}
"""Class of diffusers -> the name of its SiLU, and those of the norms that are the only ones before it."""
