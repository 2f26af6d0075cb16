"""The product of few rows with a weight that is in memory in 8 bits, in fp32: the modulation of a block.

It is bound by reading the weight, a byte a number, and reads it once for all rows: programs of the same tile of the
weight run beside one another, so that the second finds it in L2. A row's bits do not depend on other rows, nor on
which rows of the weight a rank reads.
"""

# pyright: reportPossiblyUnboundVariable=false
# (kernels branch only on values that are known at compile time)

from __future__ import annotations

import torch
from torch import Tensor

from seqpar.kernels._triton import contiguous_rows, fused, jit, tl
from seqpar.types.protocols import state_dtype

MOST = 4  # rows: each converts the weight again, and of more a GEMM of the weight in its dtype is faster
OUTPUTS, INNER = 8, 512  # of a program and of its step: 4 KiB of the weight on their way for each

CASES: tuple[dict[str, int], ...] = (
    {"rows": 1, "inner": 48, "width": 16},
    {"rows": 2, "inner": 1152, "width": 40},
    {"rows": 3, "inner": 1024, "width": 20},
    {"rows": 4, "inner": 3072, "width": 8},
)
"""Shapes that tests use."""


def few_rows8(x_RE: Tensor, values_FE: Tensor, scales_F: Tensor) -> Tensor:
    """Return x W^T in fp32 (fp64 for fp64), (R, F); values: e4m3, scales: fp32, one for each row of W."""
    return (launch if fused(x_RE) else reference)(x_RE, values_FE, scales_F)


def reference(x_RE: Tensor, values_FE: Tensor, scales_F: Tensor) -> Tensor:
    wide = state_dtype(x_RE.dtype)
    return (x_RE.to(wide) @ values_FE.to(wide).t()) * scales_F.to(wide)


def launch(x_RE: Tensor, values_FE: Tensor, scales_F: Tensor) -> Tensor:
    """Run the kernel: what `reference` returns. The last dims must be contiguous."""
    (rows, inner), width = x_RE.shape, len(values_FE)
    contiguous_rows(x_RE, values_FE, scales_F)
    out = torch.empty((rows, width), dtype=torch.float32, device=x_RE.device)
    if out.numel():
        few_rows8_kernel[rows, -(-width // OUTPUTS)](
            *(x_RE, values_FE, scales_F, out, x_RE.stride(0), values_FE.stride(0), width),
            E=inner,
            OUTPUTS=OUTPUTS,
            INNER=INNER,
            num_warps=4,
        )
    return out


@jit
def few_rows8_kernel(
    x, values, scales, out, x_row, weight_row, width, E: tl.constexpr, OUTPUTS: tl.constexpr, INNER: tl.constexpr
):
    # programs that differ in the row alone start together
    row, outputs = tl.program_id(0).to(tl.int64), tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    inside, step = outputs < width, tl.arange(0, INNER)
    weights = values + outputs.to(tl.int64)[:, None] * weight_row + step[None, :]
    sums = tl.zeros((OUTPUTS, INNER), tl.float32)
    for start in range(0, E, INNER):
        here = start + step < E
        weight = tl.load(weights + start, inside[:, None] & here[None, :], 0.0, eviction_policy="evict_first")
        number = tl.load(x + row * x_row + start + step, here, 0.0, eviction_policy="evict_last").to(tl.float32)
        sums += weight.to(tl.float32) * number[None, :]
    total = tl.sum(sums, 1) * tl.load(scales + outputs, inside, 0.0)
    tl.store(out + row * width + outputs, total, inside)
