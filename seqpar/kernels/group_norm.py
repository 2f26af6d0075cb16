"""GroupNorm in two steps: moments of parts of a picture, and the normalisation, with SiLU if it follows.

Plain torch computes the moments with one block of threads for each sample and group (32
for one picture, on a GPU of 132 multiprocessors), and copies channels-last memory. Here any number of programs reads
the input once, and a second pass normalises, applies SiLU and writes: 6 bytes for each element in bf16. The moments are
a separate tensor, because the ranks that share an image combine them before anything is normalised.

A part's moments are its count, mean and sum of squared differences from the mean (M2); parts are combined by the
formulas of Chan, Golub and LeVeque (1979). Everything is computed in fp32 (fp64 for fp64) and rounded once.
"""

# pyright: reportPossiblyUnboundVariable=false
# (kernels branch only on values that are known at compile time)

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from seqpar.kernels._triton import compiled, fused, jit, tl, triton
from seqpar.types.protocols import state_dtype

PROGRAMS = 528  # parts of a large input: four programs for each multiprocessor of an H200, on every device


class Affine(NamedTuple):
    """Weight and bias (C,) of a GroupNorm, or None, and the eps that is added to the variance.

    shift_C: is added to the input, or None; only for channels-last memory.
    """

    weight_C: Tensor | None
    bias_C: Tensor | None
    eps: float = 1e-5
    shift_C: Tensor | None = None


# shapes that tests check: samples, channels, groups, places
CASES: tuple[dict[str, Any], ...] = (
    {"shape": (1, 32, 8, 8), "groups": 32},
    {"shape": (2, 24, 3, 5, 7), "groups": 4},  # 6 channels a group, and places that no vector divides
    {"shape": (2, 64, 40), "groups": 16},
    {"shape": (1, 512, 128, 128), "groups": 32},
    {"shape": (1, 128, 1024, 1024), "groups": 32},
)


def moments(x_NC: Tensor, groups: int, shift_C: Tensor | None = None) -> Tensor:
    """Return count, mean and M2 of each group of channels of x, (N, C, ...), as (N, groups, 3).

    The result is fp32 (fp64 for fp64). Without places the count is 0. shift_C: is added to x first, without rounding;
    only for channels-last memory.
    """
    return (launch_moments if fused(x_NC) else reference_moments)(x_NC, groups, shift_C)


def combine(parts_PNG3: Tensor) -> Tensor:
    """Return the moments (N, G, 3) of the union of parts, (P, N, G, 3), which are combined in their order."""
    return (launch_combine if fused(parts_PNG3) else reference_combine)(parts_PNG3)


def normalise(x_NC: Tensor, moments_NG3: Tensor, affine: Affine, silu: bool = False) -> Tensor:
    """Return x, (N, C, ...), normalised by its groups' moments, then by SiLU if `silu`, in x's dtype and format."""
    return (launch_normalise if fused(x_NC) else reference_normalise)(x_NC, moments_NG3, affine, silu)


def reference_moments(x_NC: Tensor, groups: int, shift_C: Tensor | None = None) -> Tensor:
    wide = _shifted(x_NC, shift_C).reshape(len(x_NC), groups, -1)
    count = wide.new_full(wide.shape[:2], wide.shape[2])
    mean = wide.mean(-1) if wide.shape[2] else torch.zeros_like(count)
    return torch.stack((count, mean, (wide - mean[..., None]).square().sum(-1)), -1)


def _shifted(x_NC: Tensor, shift_C: Tensor | None) -> Tensor:
    wide = x_NC.to(state_dtype(x_NC.dtype))
    return wide if shift_C is None else wide + shift_C.to(wide.dtype).view(-1, *[1] * (x_NC.dim() - 2))


def reference_combine(parts_PNG3: Tensor) -> Tensor:
    count, mean, squares = parts_PNG3.unbind(-1)
    total = count.sum(0)
    middle = (count * mean).sum(0) / total.clamp(min=1)
    return torch.stack((total, middle, (squares + count * (mean - middle).square()).sum(0)), -1)


def reference_normalise(x_NC: Tensor, moments_NG3: Tensor, affine: Affine, silu: bool = False) -> Tensor:
    count, mean, squares = moments_NG3.unbind(-1)
    samples, groups = count.shape
    wide = _shifted(x_NC, affine.shift_C).reshape(samples, groups, -1) - mean[..., None]
    wide = (wide * torch.rsqrt(squares / count.clamp(min=1) + affine.eps)[..., None]).view(x_NC.shape)
    each = (-1, *[1] * (x_NC.dim() - 2))
    wide = wide if affine.weight_C is None else wide * affine.weight_C.to(wide.dtype).view(each)
    wide = wide if affine.bias_C is None else wide + affine.bias_C.to(wide.dtype).view(each)
    return torch.empty_like(x_NC).copy_(F.silu(wide) if silu else wide)


def places_last(x_NC: Tensor) -> bool | None:
    """Return True for contiguous memory, False for channels-last memory, and None for neither."""
    if x_NC.is_contiguous():
        return True
    return False if x_NC.movedim(1, -1).is_contiguous() else None


def dense(x_NC: Tensor) -> tuple[Tensor, bool]:
    """Return x, or a contiguous copy if its memory has gaps or another order, and whether its places come last."""
    last = places_last(x_NC)
    return (x_NC.contiguous(), True) if last is None else (x_NC, last)


def launch_moments(x_NC: Tensor, groups: int, shift_C: Tensor | None = None) -> Tensor:
    x_NC, last = dense(x_NC)
    _fits_shift(last, shift_C)
    samples, channels = x_NC.shape[:2]
    if not x_NC.numel():
        return torch.zeros(samples, groups, 3, device=x_NC.device)
    places, each = x_NC.numel() // (samples * channels), channels // groups
    if last:
        block = min(4096, max(128, triton.next_power_of_2(places * each)))
        chunk = _chunk(places * each, block, PROGRAMS // (samples * groups))
        parts = torch.empty(triton.cdiv(places * each, chunk), samples, groups, 3, device=x_NC.device)
        grid = (parts.shape[0] * samples * groups,)
        constants = {"BLOCK": block, "num_warps": max(1, block // 512)}
        plane_moments_kernel[grid](x_NC, parts, samples * groups, places * each, chunk, **constants)
    else:
        block_groups, block_each = triton.next_power_of_2(groups), triton.next_power_of_2(each)
        rows = max(1, 4096 // (block_groups * block_each))
        chunk = _chunk(places, rows, PROGRAMS // samples)
        parts = torch.empty(triton.cdiv(places, chunk), samples, groups, 3, device=x_NC.device)
        constants = {"G": groups, "EACH": each, "BLOCK_G": block_groups, "BLOCK_EACH": block_each, "ROWS": rows}
        grid = (parts.shape[0] * samples,)
        pixel_moments_kernel[grid](x_NC, shift_C, parts, samples, places, chunk, **constants, num_warps=8)
    return parts[0] if len(parts) == 1 else launch_combine(parts)


def launch_combine(parts_PNG3: Tensor) -> Tensor:
    parts_PNG3 = parts_PNG3.contiguous()
    out = torch.empty_like(parts_PNG3[0])
    if out.numel():
        block = triton.next_power_of_2(len(parts_PNG3))
        each = out.numel() // 3
        combine_kernel[(each,)](parts_PNG3, out, len(parts_PNG3), each, BLOCK=block, num_warps=4)
    return out


def launch_normalise(x_NC: Tensor, moments_NG3: Tensor, affine: Affine, silu: bool = False) -> Tensor:
    x_NC, last = dense(x_NC)
    out = torch.empty_like(x_NC)
    (samples, channels), groups = x_NC.shape[:2], moments_NG3.shape[1]
    _fits_shift(last, affine.shift_C)
    if not out.numel():
        return out
    length = out.numel() // (samples * channels)
    tensors = x_NC, moments_NG3.contiguous(), affine.weight_C, affine.bias_C, out, affine.eps
    constants: dict[str, Any] = {"EACH": channels // groups, "SILU": silu, "MACHINE": compiled(pixels_kernel)}
    constants["enable_fp_fusion"] = True
    if last:
        block = min(4096, max(128, triton.next_power_of_2(length)))
        blocks = triton.cdiv(length, block)
        constants |= {"BLOCK": block, "num_warps": max(1, block // 1024)}
        planes_kernel[(samples * channels * blocks,)](*tensors, channels, length, blocks, **constants)
    else:
        width = triton.next_power_of_2(channels)
        rows, tiles = max(1, 4096 // width), 4
        blocks = triton.cdiv(length, rows * tiles)
        constants |= {"C": channels, "WIDTH": width, "ROWS": rows, "TILES": tiles, "num_warps": 4}
        pixels_kernel[(samples * blocks,)](*tensors, affine.shift_C, length, blocks, **constants)
    return out


def _fits_shift(last: bool, shift_C: Tensor | None) -> None:
    if last and shift_C is not None:
        raise ValueError("got a shift of an input in contiguous memory, expected channels-last memory; add it before")


def _chunk(length: int, block: int, programs: int) -> int:
    """Elements that a program reads: a multiple of a block, so that about `programs` share a length."""
    return triton.cdiv(triton.cdiv(length, max(1, programs)), block) * block


@jit
def _seen(value, inside, mean, squares, seen):
    # one value more in each lane (Welford)
    value = value.to(tl.float32)
    away = tl.where(inside, value - mean, 0.0)
    seen += 1.0
    mean += away * (1.0 / seen)
    squares += away * (value - mean)
    return mean, squares, seen


@jit
def plane_moments_kernel(x, parts, rows, length, chunk, BLOCK: tl.constexpr):
    # a program reads a chunk of one group's contiguous memory; each lane keeps mean and M2 of what it read (Welford)
    row, part = tl.program_id(0) % rows, tl.program_id(0) // rows
    first = part.to(tl.int64) * chunk
    x += row.to(tl.int64) * length + first
    count = tl.minimum(length - first, chunk).to(tl.int32)
    lane = tl.arange(0, BLOCK)
    mean, squares = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    seen = 0.0
    for start in range(0, count, 2 * BLOCK):  # pyright: ignore[reportArgumentType]
        inside = start + lane < count
        value = tl.load(x + start + lane, inside, 0.0)
        later = tl.load(x + start + BLOCK + lane, start + BLOCK + lane < count, 0.0)  # more reads in flight
        mean, squares, seen = _seen(value, inside, mean, squares, seen)
        mean, squares, seen = _seen(later, start + BLOCK + lane < count, mean, squares, seen)
    each = tl.maximum((count - lane + BLOCK - 1) // BLOCK, 0).to(tl.float32)  # values that a lane has seen
    middle = tl.sum(each * mean, 0) / count
    away = mean - middle
    total = tl.sum(squares + each * away * away, 0)
    parts += (part * rows + row) * 3
    tl.store(parts, count.to(tl.float32))
    tl.store(parts + 1, middle)
    tl.store(parts + 2, total)


@jit
def pixel_moments_kernel(
    x,
    shift,
    parts,
    samples,
    length,
    chunk,
    G: tl.constexpr,
    EACH: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_EACH: tl.constexpr,
    ROWS: tl.constexpr,
):
    # a program reads all channels of a chunk of places; each lane keeps mean and M2 of its channel (Welford)
    sample, part = tl.program_id(0) % samples, tl.program_id(0) // samples
    first = part.to(tl.int64) * chunk
    x += (sample.to(tl.int64) * length + first) * (G * EACH)
    count = tl.minimum(length - first, chunk).to(tl.int32)
    lane = tl.arange(0, BLOCK_G * BLOCK_EACH)
    if EACH == BLOCK_EACH:
        channel = lane
        real = lane < G * EACH
    else:
        channel = lane // BLOCK_EACH * EACH + lane % BLOCK_EACH
        real = (lane % BLOCK_EACH < EACH) & (lane // BLOCK_EACH < G)
    row = tl.arange(0, ROWS)
    at = x + row[:, None] * (G * EACH) + channel[None, :]
    mean = tl.zeros((ROWS, BLOCK_G * BLOCK_EACH), tl.float32)
    squares = tl.zeros((ROWS, BLOCK_G * BLOCK_EACH), tl.float32)
    seen = 0.0
    for start in range(0, count, 2 * ROWS):  # pyright: ignore[reportArgumentType]
        inside = (start + row < count)[:, None] & real[None, :]
        also = (start + ROWS + row < count)[:, None] & real[None, :]
        value = tl.load(at, inside, 0.0)
        later = tl.load(at + ROWS * G * EACH, also, 0.0)  # more reads in flight
        mean, squares, seen = _seen(value, inside, mean, squares, seen)
        mean, squares, seen = _seen(later, also, mean, squares, seen)
        at += 2 * ROWS * G * EACH
    if shift is not None:  # moves means, and no difference from them
        mean += tl.load(shift + channel, real, 0.0).to(tl.float32)[None, :]
    each = tl.maximum((count - row + ROWS - 1) // ROWS, 0).to(tl.float32)[:, None] * tl.where(real, 1.0, 0.0)[None, :]
    sums = tl.sum(tl.reshape(tl.sum(each * mean, 0), (BLOCK_G, BLOCK_EACH)), 1)
    numbers = count.to(tl.float32) * EACH
    middle = sums / numbers
    wide = tl.reshape(tl.broadcast_to(middle[:, None], (BLOCK_G, BLOCK_EACH)), (BLOCK_G * BLOCK_EACH,))
    away = mean - wide[None, :]
    total = tl.sum(tl.reshape(tl.sum(squares + each * away * away, 0), (BLOCK_G, BLOCK_EACH)), 1)
    group = tl.arange(0, BLOCK_G)
    parts += ((part * samples + sample) * G + group) * 3
    tl.store(parts, tl.zeros((BLOCK_G,), tl.float32) + numbers, group < G)
    tl.store(parts + 1, middle, group < G)
    tl.store(parts + 2, total, group < G)


@jit
def combine_kernel(parts, out, count, rows, BLOCK: tl.constexpr):
    row, part = tl.program_id(0), tl.arange(0, BLOCK)
    at, inside = parts + (part * rows + row) * 3, part < count
    number = tl.load(at, inside, 0.0)
    mean = tl.load(at + 1, inside, 0.0)
    squares = tl.load(at + 2, inside, 0.0)
    total = tl.sum(number, 0)
    middle = tl.sum(number * mean, 0) / tl.maximum(total, 1.0)
    away = mean - middle
    tl.store(out + row * 3, total)
    tl.store(out + row * 3 + 1, middle)
    tl.store(out + row * 3 + 2, tl.sum(squares + number * away * away, 0))


@jit
def planes_kernel(
    x,
    moments,
    weight,
    bias,
    out,
    eps,
    channels,
    length,
    blocks,
    EACH: tl.constexpr,
    SILU: tl.constexpr,
    MACHINE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # contiguous memory: a program normalises a block of places of one channel
    row, first = tl.program_id(0) // blocks, tl.program_id(0) % blocks * BLOCK
    channel = row % channels
    moments += row // EACH * 3
    mean = tl.load(moments + 1)
    scale = tl.rsqrt(tl.load(moments + 2) / tl.load(moments) + eps)
    shift = 0.0
    if weight is not None:
        scale *= tl.load(weight + channel).to(tl.float32)
    if bias is not None:
        shift = tl.load(bias + channel).to(tl.float32)
    place = first + tl.arange(0, BLOCK)
    at = row.to(tl.int64) * length + place
    value = tl.load(x + at, place < length, 0.0, eviction_policy="evict_first").to(tl.float32)
    value = (value - mean) * scale + shift
    if SILU:
        value = activated(value, MACHINE)
    tl.store(out + at, value.to(out.dtype.element_ty), place < length)


@jit
def pixels_kernel(
    x,
    moments,
    weight,
    bias,
    out,
    eps,
    shift,
    length,
    blocks,
    EACH: tl.constexpr,
    SILU: tl.constexpr,
    MACHINE: tl.constexpr,
    C: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
):
    # channels-last memory: a program normalises all channels of some places
    sample, first = tl.program_id(0) // blocks, tl.program_id(0) % blocks * (ROWS * TILES)
    channel = tl.arange(0, WIDTH)
    real = channel < C
    moments += (sample * (C // EACH) + channel // EACH) * 3
    mean = tl.load(moments + 1, real, 0.0)
    if shift is not None:
        mean -= tl.load(shift + channel, real, 0.0).to(tl.float32)
    mean = mean[None, :]
    scale = tl.rsqrt(tl.load(moments + 2, real, 0.0) / tl.load(moments, real, 1.0) + eps)
    if weight is not None:
        scale *= tl.load(weight + channel, real, 0.0).to(tl.float32)
    scale = scale[None, :]
    start = (sample.to(tl.int64) * length + first) * C
    x += start
    out += start
    for tile in range(TILES):
        place = (tile * ROWS + tl.arange(0, ROWS))[:, None]
        inside = (first + place < length) & real[None, :]
        at = place * C + channel[None, :]
        value = tl.load(x + at, inside, 0.0, eviction_policy="evict_first").to(tl.float32)
        value = (value - mean) * scale
        if bias is not None:
            value += tl.load(bias + channel, real, 0.0).to(tl.float32)[None, :]
        if SILU:
            value = activated(value, MACHINE)
        tl.store(out + at, value.to(out.dtype.element_ty), inside)


@jit
def activated(x, MACHINE: tl.constexpr):
    # SiLU in five instructions, with an error of a few units in the last place of fp32. Triton's own exponential and
    # division scale around denormal numbers, which takes about as long as the memory that a norm moves.
    if MACHINE:  # not in Triton's interpreter, which has no assembly
        # x / (1 + 2 ** (-x log2 e)); 0fBFB8AA3B is -log2 e and 0f3F800000 is 1
        return tl.inline_asm_elementwise(
            "{ .reg .f32 p; mul.f32 p, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 p, p; add.f32 p, p, 0f3F800000; "
            "rcp.approx.ftz.f32 p, p; mul.f32 $0, $1, p; }",
            "=f,f",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:  # noqa: RET505 (Triton needs both ways)
        return x / (1.0 + tl.exp(-x))
