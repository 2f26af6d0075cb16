"""Passes over images between a VAE's convolutions: RMSNorm over channels, sums that add biases, upsampling by 2.

All are bound by memory, compute in fp32 (fp64 for fp64) and round once.
`channel_norm` is x / |x| * sqrt(C) * weight + bias, with SiLU if it follows. The decoders of Wan and Qwen-Image write
it as a conversion to fp32, `F.normalize`, a conversion back, two products, a sum and SiLU: seven passes, of which two
are in fp32. A place's bits do not depend on the number of places.
`add` ends a residual block. cuDNN's convolutions as torch calls them add no bias: torch adds it in a separate pass,
which reads and writes the whole image, and again in the shortcut's convolution. Here both biases are added while the
branch is added to the shortcut.
`double` reads each element once and writes it four times, in vectors of 16 bytes; plain torch writes element by
element, and Wan's and Qwen-Image's decoders convert to fp32 around it. It only copies: all bits stay.
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
Shifted = tuple[Tensor, Tensor | None]
"""An image (N, C, ...) in channels-last memory, and a bias (C,) that is to be added to it, or None."""

# shapes that tests check: samples, channels, places
CASES: tuple[tuple[int, ...], ...] = (
    (1, 32, 8, 8),
    (2, 24, 3, 5, 7),  # channels that are no power of 2, and places that no vector divides
    (1, 96, 2, 8, 16),
    (1, 384, 2, 90, 160),
    (1, 128, 1024, 1024),
)
UPSAMPLED: tuple[tuple[int, ...], ...] = ((1, 8, 3, 16), (2, 3, 5, 7), (2, 24, 4, 9), (1, 256, 512, 512))


def channel_norm(x_NC: Tensor, weight_C: Tensor, bias_C: Tensor | None = None, silu: bool = False) -> Tensor:
    """Return the norm of x, (N, C, ...), over its channels, with SiLU if `silu`, in x's dtype and memory format."""
    taken = fused(x_NC) and x_NC.shape[1] <= WIDEST
    return (launch_norm if taken else reference_norm)(x_NC, weight_C, bias_C, silu)


def add(first: Shifted, second: Shifted | None = None, out_NC: Tensor | None = None) -> Tensor:
    """Return the sum of two images with their biases, in channels-last memory.

    out_NC: where the result is written; it may be one of the images.
    """
    return (launch_sum if fused(first[0]) else reference_sum)(first, second, out_NC)


def double(x_NChw: Tensor) -> Tensor:
    """Return x, (N, C, h, w), with each element twice along both last dims, in x's memory format."""
    return (launch_double if fused(x_NChw) else reference_double)(x_NChw)


def reference_norm(x_NC: Tensor, weight_C: Tensor, bias_C: Tensor | None = None, silu: bool = False) -> Tensor:
    wide, each = x_NC.to(state_dtype(x_NC.dtype)), (-1, *[1] * (x_NC.dim() - 2))
    wide = F.normalize(wide, dim=1, eps=SMALLEST) * x_NC.shape[1] ** 0.5 * weight_C.to(wide.dtype).view(each)
    wide = wide if bias_C is None else wide + bias_C.to(wide.dtype).view(each)
    return torch.empty_like(x_NC).copy_(F.silu(wide) if silu else wide)


def reference_sum(first: Shifted, second: Shifted | None = None, out_NC: Tensor | None = None) -> Tensor:
    x_NC, parts = first[0], []
    for picture, bias in (first, second or (None, None)):
        if picture is not None:
            wide = picture.to(state_dtype(picture.dtype))
            parts.append(wide if bias is None else wide + bias.to(wide.dtype).view(-1, *[1] * (x_NC.dim() - 2)))
    total = parts[0] if len(parts) == 1 else parts[0] + parts[1]
    return (torch.empty_like(x_NC) if out_NC is None else out_NC).copy_(total)


def reference_double(x_NChw: Tensor) -> Tensor:
    return F.interpolate(x_NChw, scale_factor=2.0, mode="nearest")


def launch_norm(x_NC: Tensor, weight_C: Tensor, bias_C: Tensor | None = None, silu: bool = False) -> Tensor:
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


def launch_sum(first: Shifted, second: Shifted | None = None, out_NC: Tensor | None = None) -> Tensor:
    x_NC, shift = first
    y_NC, y_shift = second or (None, None)
    out = torch.empty_like(x_NC) if out_NC is None else out_NC
    for each in (x_NC, out, x_NC if y_NC is None else y_NC):
        if each.shape != x_NC.shape or not each.movedim(1, -1).is_contiguous():
            layout = f"{tuple(each.shape)} of strides {each.stride()}"
            raise ValueError(f"got {layout}, expected {tuple(x_NC.shape)} in channels-last memory")
    if out.numel():
        channels = x_NC.shape[1]
        width, places = triton.next_power_of_2(channels), out.numel() // channels
        rows, tiles = max(1, 2048 // width), 4
        constants: dict[str, Any] = {"C": channels, "WIDTH": width, "ROWS": rows, "TILES": tiles, "num_warps": 4}
        grid = (triton.cdiv(places, rows * tiles),)
        residual_kernel[grid](x_NC, shift, y_NC, y_shift, out, places, **constants)
    return out


def launch_double(x_NChw: Tensor) -> Tensor:
    x_NChw, last = dense(x_NChw)
    samples, channels, height, width = x_NChw.shape
    layout = torch.contiguous_format if last else torch.channels_last
    shape = samples, channels, 2 * height, 2 * width
    out = torch.empty(shape, dtype=x_NChw.dtype, device=x_NChw.device, memory_format=layout)
    if out.numel():
        if last:
            block = min(1024, max(16, triton.next_power_of_2(width)))
            rows, blocks = max(1, 2048 // block), triton.cdiv(width, block)
            lines = samples * channels * height
            sizes, options = (lines, width, blocks), {"BLOCK": block, "ROWS": rows, "num_warps": 4}
            plane_double_kernel[(triton.cdiv(lines, rows) * blocks,)](x_NChw, out, *sizes, **options)
        else:
            block = triton.next_power_of_2(channels)
            rows, places = max(1, 4096 // block), samples * height * width
            options = {"C": channels, "BLOCK": block, "ROWS": rows, "num_warps": 4}
            pixel_double_kernel[(triton.cdiv(places, rows),)](x_NChw, out, places, width, **options)
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


@jit
def residual_kernel(
    x, shift, y, y_shift, out, places, C: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr
):
    first = tl.program_id(0).to(tl.int64) * (ROWS * TILES)
    channel = tl.arange(0, WIDTH)
    real = channel < C
    bias = tl.zeros((WIDTH,), tl.float32)
    if shift is not None:
        bias += tl.load(shift + channel, real, 0.0).to(tl.float32)
    if y_shift is not None:
        bias += tl.load(y_shift + channel, real, 0.0).to(tl.float32)
    for tile in range(TILES):
        place = (tile * ROWS + tl.arange(0, ROWS))[:, None]
        inside = (first + place < places) & real[None, :]
        at = place * C + channel[None, :]
        value = tl.load(x + first * C + at, inside, 0.0, eviction_policy="evict_first").to(tl.float32)
        if y is not None:
            value += tl.load(y + first * C + at, inside, 0.0, eviction_policy="evict_first").to(tl.float32)
        value += bias[None, :]
        tl.store(out + first * C + at, value.to(out.dtype.element_ty), inside)


@jit
def plane_double_kernel(x, out, lines, width, blocks, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    # contiguous memory: line l of x becomes lines 2 l and 2 l + 1
    line = (tl.program_id(0) // blocks * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    first = tl.program_id(0) % blocks * BLOCK
    place = first + tl.arange(0, BLOCK)[None, :]
    value = tl.load(x + line * width + place, (line < lines) & (place < width), 0.0)
    value = tl.interleave(value, value)
    place = 2 * first + tl.arange(0, 2 * BLOCK)[None, :]
    inside = (line < lines) & (place < 2 * width)
    at = out + line * (4 * width) + place
    tl.store(at, value, inside)
    tl.store(at + 2 * width, value, inside)


@jit
def pixel_double_kernel(x, out, places, width, C: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    # channels-last memory: a place becomes four
    place = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    channel = tl.arange(0, BLOCK)[None, :]
    inside = (place < places) & (channel < C)
    value = tl.load(x + place * C + channel, inside, 0.0)
    line, column = place // width, place % width
    at = out + (line * (4 * width) + 2 * column) * C + channel
    tl.store(at, value, inside)
    tl.store(at + C, value, inside)
    tl.store(at + 2 * width * C, value, inside)
    tl.store(at + 2 * width * C + C, value, inside)
