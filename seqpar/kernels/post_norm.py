"""LayerNorm of a residual sum, as transformers with norms after their branches need it: LayerNorm(x + y).

The kernel is bound by memory: it reads both inputs and writes the result once (6 bytes
for each element of a bf16 stream, 4 without y), where plain torch rounds and writes the sum in between. The result can
be written into a part of a larger tensor, so that a stream and its skip connection lie side by side for the product
that reads both, and nothing is concatenated. It computes in fp32 (fp64 for fp64) and rounds once. A row's bits do not
depend on the number of rows. Source: post-norm as in "Attention Is All You Need" (arXiv 1706.03762).
"""

# pyright: reportPossiblyUnboundVariable=false
# (kernels branch only on values that are known at compile time)

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from seqpar.kernels._triton import contiguous_rows, fused, in_units, jit, tl, warps_for
from seqpar.types.protocols import state_dtype


class Affine(NamedTuple):
    """Weight and bias (E,) of a LayerNorm, and the eps that is added to the variance."""

    weight_E: Tensor
    bias_E: Tensor
    eps: float = 1e-5


# shapes that tests check and a bench measures: batch rows, tokens, width, padding of a token's stride
CASES: tuple[dict[str, int], ...] = (
    {"batch": 1, "tokens": 1, "width": 384, "pad": 0},
    {"batch": 3, "tokens": 5, "width": 1160, "pad": 8},  # a multiple of 8, not of 16
    {"batch": 2, "tokens": 3, "width": 1536, "pad": 1536},
    {"batch": 2, "tokens": 1105, "width": 1536, "pad": 0},
    {"batch": 2, "tokens": 1105, "width": 1536, "pad": 1536},  # UniDiffuser-v1, beside a skip connection
    {"batch": 2, "tokens": 4096, "width": 3072, "pad": 0},
)


def post_norm(x_BlE: Tensor, y_BlE: Tensor | None, norm: Affine, out_BlE: Tensor | None = None) -> Tensor:
    """Return LayerNorm(x + y) in x's dtype, (B, l, E); y of None means LayerNorm(x).

    Inputs may have any strides with a contiguous last dim. The result is a new contiguous tensor, or `out_BlE`, which
    may be a part of a larger tensor and must not overlap the inputs.
    """
    chosen = launch if fused(x_BlE) else reference
    return chosen(x_BlE, y_BlE, norm, out_BlE)


def reference(x_BlE: Tensor, y_BlE: Tensor | None, norm: Affine, out_BlE: Tensor | None = None) -> Tensor:
    wide = x_BlE.to(state_dtype(x_BlE.dtype))
    wide = wide if y_BlE is None else wide + y_BlE
    weight, bias = norm.weight_E.to(wide.dtype), norm.bias_E.to(wide.dtype)
    normalised = F.layer_norm(wide, wide.shape[-1:], weight, bias, norm.eps).to(x_BlE.dtype)
    return normalised if out_BlE is None else out_BlE.copy_(normalised)


def launch(x_BlE: Tensor, y_BlE: Tensor | None, norm: Affine, out_BlE: Tensor | None = None) -> Tensor:
    batch, tokens, width = x_BlE.shape
    out = torch.empty_like(x_BlE, memory_format=torch.contiguous_format) if out_BlE is None else out_BlE
    if out.shape != x_BlE.shape or (y_BlE is not None and y_BlE.shape != x_BlE.shape):
        shapes = [tuple(z.shape) for z in (y_BlE, out) if z is not None]
        raise ValueError(f"got a branch and an output of shapes {shapes}, expected {tuple(x_BlE.shape)}")
    contiguous_rows(x_BlE, y_BlE, out, norm.weight_E, norm.bias_E)
    unit, strides = in_units([n for x in (x_BlE, y_BlE, out) for n in ((0, 0) if x is None else x.stride()[:2])])
    block = 1 << (width - 1).bit_length()
    if out.numel():
        constants = {"E": width, "BLOCK": block, "UNIT": unit, "num_warps": warps_for(width, 24)}
        tensors = x_BlE, y_BlE, norm.weight_E, norm.bias_E, out
        post_norm_kernel[tokens, batch](*tensors, norm.eps, *strides, **constants, enable_fp_fusion=True)
    return out


@jit
def post_norm_kernel(
    x,
    y,
    weight,
    bias,
    out,
    eps,
    x_batch,
    x_token,
    y_batch,
    y_token,
    out_batch,
    out_token,
    E: tl.constexpr,
    BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
):
    # a program keeps a whole row in registers: threads exchange only the two sums
    token, batch = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    col = tl.arange(0, BLOCK)
    inside = col < E
    at = x + (batch * x_batch + token * x_token) * UNIT
    row = tl.load(at + col, inside, 0.0, eviction_policy="evict_first").to(tl.float32)
    if y is not None:
        at = y + (batch * y_batch + token * y_token) * UNIT
        row += tl.load(at + col, inside, 0.0, eviction_policy="evict_first").to(tl.float32)
    row = tl.where(inside, row - tl.sum(row, 0) / E, 0.0)
    # the variance is a sum of squared differences from the mean: a difference of two large sums would cancel
    row *= tl.rsqrt(tl.sum(row * row, 0) / E + eps)
    # all programs read these vectors, so they should stay in L1; read late, they need no registers before the sums
    row *= tl.load(weight + col, inside, 0.0, eviction_policy="evict_last").to(tl.float32)
    row += tl.load(bias + col, inside, 0.0, eviction_policy="evict_last").to(tl.float32)
    at = out + (batch * out_batch + token * out_token) * UNIT
    tl.store(at + col, row.to(out.dtype.element_ty), inside)
