"""What a step cache computes beside blocks: how much a stream changed, and a stream from residuals of earlier steps.

    sums[0] += sum |(x - start) - before|        sums[1] += sum |before|

Both sums are in fixed point (int64, `UNIT` to 1), so that they do not depend on the order of the additions: every split
of the tokens, on any number of ranks, has the same sums. A number counts `MOST` at most, so that no sum overflows.

    out = x + sum_j weights[j] * residuals[j]

It is computed in fp32 (fp64 for fp64) and rounded once.
"""

# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from seqpar.kernels._triton import contiguous_rows, fused, jit, tl
from seqpar.types.protocols import state_dtype

UNIT = float(1 << 20)
MOST = float(1 << 33)  # in units
RESIDUALS = 3  # at most, of an extrapolation
BLOCK = 1024

CASES: tuple[dict[str, int], ...] = (
    {"batch": 1, "tokens": 5, "width": 1152, "pad": 0},
    {"batch": 2, "tokens": 3, "width": 40, "pad": 8},
    {"batch": 1, "tokens": 1, "width": 3072, "pad": 0},
    {"batch": 2, "tokens": 5, "width": 40, "pad": 0, "transposed": 1},
)
"""Shapes that tests use. pad: numbers between two rows. transposed: whether streams have contiguous tokens."""


def add_change(x_BlE: Tensor, start_BlE: Tensor, before_BlE: Tensor, sums_2: Tensor) -> None:
    """Add to `sums_2` (int64) how much x - start differs from what it was before, and the size of what it was."""
    (launch_change if fused(x_BlE) else reference_change)(x_BlE, start_BlE, before_BlE, sums_2)


def reference_change(x_BlE: Tensor, start_BlE: Tensor, before_BlE: Tensor, sums_2: Tensor) -> None:
    dtype = state_dtype(x_BlE.dtype)
    before = before_BlE.to(dtype)
    change = (x_BlE.to(dtype) - start_BlE.to(dtype)) - before
    sums_2 += torch.stack([_units(change), _units(before)])


def _units(x: Tensor) -> Tensor:
    return (x.abs() * UNIT).clamp(max=MOST).nan_to_num(MOST).to(torch.int64).sum()


def launch_change(x_BlE: Tensor, start_BlE: Tensor, before_BlE: Tensor, sums_2: Tensor) -> None:
    x_BlE, start_BlE = _with_rows(x_BlE), _with_rows(start_BlE)
    contiguous_rows(before_BlE)
    batch, tokens, width = x_BlE.shape
    if x_BlE.numel():
        strides = (stride for x in (x_BlE, start_BlE, before_BlE) for stride in x.stride()[:2])
        change_kernel[tokens, batch](x_BlE, start_BlE, before_BlE, sums_2, *strides, width, UNIT, MOST, BLOCK)


def extrapolate(x_BlE: Tensor, residuals: Sequence[Tensor], weights_J: Tensor, out_BlE: Tensor) -> None:
    """Write x + sum of weights (fp64) times residuals to `out_BlE`; all have one shape, and at most `RESIDUALS`."""
    (launch_extrapolate if fused(x_BlE) else reference_extrapolate)(x_BlE, residuals, weights_J, out_BlE)


def reference_extrapolate(x_BlE: Tensor, residuals: Sequence[Tensor], weights_J: Tensor, out_BlE: Tensor) -> None:
    dtype = state_dtype(x_BlE.dtype)
    result = x_BlE.to(dtype)
    for residual, weight in zip(residuals, weights_J.to(dtype), strict=True):
        result = result + weight * residual.to(dtype)
    out_BlE.copy_(result)


def launch_extrapolate(x_BlE: Tensor, residuals: Sequence[Tensor], weights_J: Tensor, out_BlE: Tensor) -> None:
    x_BlE = _with_rows(x_BlE)
    contiguous_rows(out_BlE, *residuals)
    batch, tokens, width = x_BlE.shape
    every = [*residuals, *[x_BlE] * (RESIDUALS - len(residuals))]
    strides = (stride for x in (x_BlE, out_BlE, *every) for stride in x.stride()[:2])
    if x_BlE.numel():
        extrapolate_kernel[tokens, batch](x_BlE, out_BlE, *every, weights_J, *strides, width, len(residuals), BLOCK)


def _with_rows(x: Tensor) -> Tensor:
    # patches of a convolution have contiguous tokens, also where blocks keep the strides of what they get
    return x if x.stride(-1) == 1 else x.contiguous()


@jit
def change_kernel(
    x_ptr, start_ptr, before_ptr, sums_ptr, x_b, x_l, start_b, start_l, before_b, before_l,
    WIDTH: tl.constexpr, UNIT: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token, row = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    changes, sizes = tl.zeros([BLOCK], tl.int64), tl.zeros([BLOCK], tl.int64)
    for first in range(0, WIDTH, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * x_b + token * x_l + at, at < WIDTH, 0.0).to(tl.float32)
        start = tl.load(start_ptr + row * start_b + token * start_l + at, at < WIDTH, 0.0).to(tl.float32)
        before = tl.load(before_ptr + row * before_b + token * before_l + at, at < WIDTH, 0.0).to(tl.float32)
        change = tl.abs((x - start) - before) * UNIT
        size = tl.abs(before) * UNIT
        changes += tl.where(change < MOST, change, MOST).to(tl.int64)  # NaN counts as the most
        sizes += tl.where(size < MOST, size, MOST).to(tl.int64)
    tl.atomic_add(sums_ptr, tl.sum(changes, 0))
    tl.atomic_add(sums_ptr + 1, tl.sum(sizes, 0))


@jit
def extrapolate_kernel(
    x_ptr, out_ptr, first_ptr, second_ptr, third_ptr, weights_ptr,
    x_b, x_l, out_b, out_l, first_b, first_l, second_b, second_l, third_b, third_l,
    WIDTH: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token, row = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    for first in range(0, WIDTH, BLOCK):
        at = first + tl.arange(0, BLOCK)
        result = tl.load(x_ptr + row * x_b + token * x_l + at, at < WIDTH, 0.0).to(tl.float32)
        one = tl.load(first_ptr + row * first_b + token * first_l + at, at < WIDTH, 0.0).to(tl.float32)
        result += tl.load(weights_ptr).to(tl.float32) * one
        if COUNT > 1:
            one = tl.load(second_ptr + row * second_b + token * second_l + at, at < WIDTH, 0.0).to(tl.float32)
            result += tl.load(weights_ptr + 1).to(tl.float32) * one
        if COUNT > 2:
            one = tl.load(third_ptr + row * third_b + token * third_l + at, at < WIDTH, 0.0).to(tl.float32)
            result += tl.load(weights_ptr + 2).to(tl.float32) * one
        tl.store(out_ptr + row * out_b + token * out_l + at, result, at < WIDTH)
