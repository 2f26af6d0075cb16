"""Sum of two outputs of convolutions and their biases, in channels-last memory.

At the end of a residual block. cuDNN's convolutions as torch calls them add no bias: torch adds
it in a separate pass, which reads and writes the whole image (4 bytes for each element in bf16), and again in the
shortcut's convolution. Here both biases are added while the branch is added to the shortcut, in fp32, and the sum is
rounded once.
"""

# pyright: reportPossiblyUnboundVariable=false
# (kernels branch only on values that are known at compile time)

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from seqpar.kernels._triton import fused, jit, tl, triton
from seqpar.types.protocols import state_dtype

# shapes that tests check: samples, channels, places
CASES: tuple[tuple[int, ...], ...] = ((1, 32, 8, 8), (2, 24, 3, 5, 7), (1, 128, 1024, 1024))
Shifted = tuple[Tensor, Tensor | None]
"""A picture (N, C, ...) in channels-last memory, and a bias (C,) that is to be added to it, or None."""


def add(first: Shifted, second: Shifted | None = None, out_NC: Tensor | None = None) -> Tensor:
    """Return the sum of two pictures with their biases, in channels-last memory.

    out_NC: where the result is written; it may be one of the pictures.
    """
    return (launch if fused(*first, *(second or ())) else reference)(first, second, out_NC)


def reference(first: Shifted, second: Shifted | None = None, out_NC: Tensor | None = None) -> Tensor:
    x_NC, parts = first[0], []
    for picture, bias in (first, second or (None, None)):
        if picture is not None:
            wide = picture.to(state_dtype(picture.dtype))
            parts.append(wide if bias is None else wide + bias.to(wide.dtype).view(-1, *[1] * (x_NC.dim() - 2)))
    total = parts[0] if len(parts) == 1 else parts[0] + parts[1]
    return (torch.empty_like(x_NC) if out_NC is None else out_NC).copy_(total)


def launch(first: Shifted, second: Shifted | None = None, out_NC: Tensor | None = None) -> Tensor:
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
