"""RMSNorm over the channels of a picture or video, with SiLU if it follows: x / |x| * sqrt(C) * weight + bias.

It reads the input once and writes the result once (4 bytes for each element in bf16).
The decoders of Wan and Qwen-Image write it as a conversion to fp32, `F.normalize`, a conversion back, two products, a
sum and SiLU: seven passes, of which two are in fp32. It computes in fp32 (fp64 for fp64) and rounds once. A place's
bits do not depend on the number of places.
"""

# pyright: reportPossiblyUnboundVariable=false
# (kernels branch only on values that are known at compile time)

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from seqpar.kernels._triton import compiled, fused, jit, tl, triton
from seqpar.kernels.group_norm import activated, dense
from seqpar.types.protocols import state_dtype

SMALLEST = 1e-12  # norms are at least this, as in F.normalize
WIDEST = 2048  # channels that a program keeps in registers

# shapes that tests check: samples, channels, places
CASES: tuple[tuple[int, ...], ...] = (
    (1, 32, 8, 8),
    (2, 24, 3, 5, 7),  # channels that are no power of 2, and places that no vector divides
    (1, 96, 2, 8, 16),
    (1, 384, 2, 90, 160),
    (1, 96, 4, 720, 1280),
)


def channel_norm(x_NC: Tensor, weight_C: Tensor, bias_C: Tensor | None = None, silu: bool = False) -> Tensor:
    """Return the norm of x, (N, C, ...), over its channels, with SiLU if `silu`, in x's dtype and memory format."""
    taken = fused(x_NC, weight_C, bias_C) and x_NC.shape[1] <= WIDEST
    return (launch if taken else reference)(x_NC, weight_C, bias_C, silu)


def reference(x_NC: Tensor, weight_C: Tensor, bias_C: Tensor | None = None, silu: bool = False) -> Tensor:
    wide, each = x_NC.to(state_dtype(x_NC.dtype)), (-1, *[1] * (x_NC.dim() - 2))
    wide = F.normalize(wide, dim=1, eps=SMALLEST) * x_NC.shape[1] ** 0.5 * weight_C.to(wide.dtype).view(each)
    wide = wide if bias_C is None else wide + bias_C.to(wide.dtype).view(each)
    return torch.empty_like(x_NC).copy_(F.silu(wide) if silu else wide)


def launch(x_NC: Tensor, weight_C: Tensor, bias_C: Tensor | None = None, silu: bool = False) -> Tensor:
    x_NC, last = dense(x_NC)
    samples, channels = x_NC.shape[:2]
    if weight_C.shape != (channels,) or (bias_C is not None and bias_C.shape != (channels,)):
        shapes = [tuple(z.shape) for z in (weight_C, bias_C) if z is not None]
        raise ValueError(f"got weights of shapes {shapes}, expected ({channels},)")
    out = torch.empty_like(x_NC)
    if out.numel():
        width, places = triton.next_power_of_2(channels), x_NC.numel() // (samples * channels)
        # contiguous memory is read in pieces of neighbouring places, sample by sample; channels-last memory in one
        kernel, split, elements = (plane_norm_kernel, samples, 16384) if last else (pixel_norm_kernel, 1, 8192)
        rows, length = max(1, elements // width), samples * places // split
        blocks, root = triton.cdiv(length, rows), float(channels) ** 0.5
        constants: dict[str, Any] = {"C": channels, "WIDTH": width, "ROWS": rows, "num_warps": 8}
        options = {**constants, "SILU": silu, "MACHINE": compiled(kernel), "enable_fp_fusion": True}
        kernel[(split * blocks,)](x_NC, weight_C, bias_C, out, root, SMALLEST, length, blocks, **options)
    return out


@jit
def plane_norm_kernel(
    x,
    weight,
    bias,
    out,
    root,
    smallest,
    length,
    blocks,
    C: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    SILU: tl.constexpr,
    MACHINE: tl.constexpr,
):
    # contiguous memory: a program keeps all channels of neighbouring places in registers
    sample, first = tl.program_id(0) // blocks, tl.program_id(0) % blocks * ROWS
    place = first + tl.arange(0, ROWS)[None, :]
    channel = tl.arange(0, WIDTH)[:, None]
    at = (sample.to(tl.int64) * C + channel) * length + place
    inside = (channel < C) & (place < length)
    value = tl.load(x + at, inside, 0.0, eviction_policy="evict_first").to(tl.float32)
    value *= root / tl.maximum(tl.sqrt(tl.sum(value * value, 0)), smallest)[None, :]
    value *= tl.load(weight + channel, channel < C, 0.0).to(tl.float32)
    if bias is not None:
        value += tl.load(bias + channel, channel < C, 0.0).to(tl.float32)
    if SILU:
        value = activated(value, MACHINE)
    tl.store(out + at, value.to(out.dtype.element_ty), inside)


@jit
def pixel_norm_kernel(
    x,
    weight,
    bias,
    out,
    root,
    smallest,
    length,
    blocks,
    C: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    SILU: tl.constexpr,
    MACHINE: tl.constexpr,
):
    # channels-last memory: the channels of a place lie together
    first = tl.program_id(0).to(tl.int64) * ROWS
    place = tl.arange(0, ROWS)[:, None]
    channel = tl.arange(0, WIDTH)[None, :]
    at = place * C + channel
    inside = (channel < C) & (first + place < length)
    value = tl.load(x + first * C + at, inside, 0.0, eviction_policy="evict_first").to(tl.float32)
    value *= root / tl.maximum(tl.sqrt(tl.sum(value * value, 1)), smallest)[:, None]
    value *= tl.load(weight + channel, channel < C, 0.0).to(tl.float32)
    if bias is not None:
        value += tl.load(bias + channel, channel < C, 0.0).to(tl.float32)
    if SILU:
        value = activated(value, MACHINE)
    tl.store(out + first * C + at, value.to(out.dtype.element_ty), inside)
