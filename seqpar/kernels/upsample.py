"""Nearest-neighbour upsampling by 2 of the two last dims of a picture.

It reads each element once and writes it four times, in vectors of 16 bytes; plain torch writes
element by element, and Wan's and Qwen-Image's decoders convert to fp32 around it. It only copies: all bits stay.
"""

# pyright: reportPossiblyUnboundVariable=false
# (kernels branch only on values that are known at compile time)

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from seqpar.kernels._triton import fused, jit, tl, triton
from seqpar.kernels.group_norm import dense

# shapes that tests check: samples, channels, height, width
CASES: tuple[tuple[int, int, int, int], ...] = ((1, 8, 3, 16), (2, 3, 5, 7), (2, 24, 4, 9), (1, 256, 512, 512))


def double(x_NChw: Tensor) -> Tensor:
    """Return x, (N, C, h, w), with each element twice along both last dims, in x's memory format."""
    return (launch if fused(x_NChw) else reference)(x_NChw)


def reference(x_NChw: Tensor) -> Tensor:
    return F.interpolate(x_NChw, scale_factor=2.0, mode="nearest")


def launch(x_NChw: Tensor) -> Tensor:
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
