"""Bias and GELU in one pass, for MLPs without a gate: the tanh formula (DiT, FLUX), or with `exact` x Phi(x) (U-ViT).

Plain torch adds the bias in a separate pass and rounds the sum. If the matrix product
has already added the bias in its epilogue, pass None. For some shapes a product has the tanh formula as its epilogue:
quack's where it is installed, or cuBLAS's.
Source: GELU (arXiv 1606.08415).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from seqpar.kernels import _columns, _quack
from seqpar.kernels._columns import Tile, places, tile
from seqpar.kernels._triton import contiguous_rows, fused, jit, tl
from seqpar.types.protocols import state_dtype

CASES = (
    *({"batch": 2, "tokens": n, "width": 4608} for n in (256, 1024, 4096)),  # DiT-XL
    {"batch": 2, "tokens": 1023, "width": 1536},  # DiT-S
    {"batch": 2, "tokens": 3, "width": 1544},  # only 8 divides it
    {"batch": 3, "tokens": 7, "width": 40},
)


FASTER: frozenset[_quack.Shape] = frozenset(
    {
        ((9, 0), 13824, 5120),  # Wan 14B
        ((9, 0), 14336, 3072),  # Wan 2.2 5B
        ((9, 0), 16384, 4096),  # LTX-Video 13B, LTX-2
        ((9, 0), 8192, 2048),  # HunyuanVideo 1.5, LTX-Video 2B
        ((9, 0), 9728, 2432),  # SD3.5-large
    }
)
"""Shapes for which quack, where it is installed, adds the bias and applies GELU in the product's epilogue.

It is faster than product and kernel (docs/benchmarks/2026-11-27-2xh200.md). A row's bits do not depend on the number of
rows (tested), and differ from those of product and kernel, so the shape alone decides."""
TILE = _quack.Tile(128, 192, 2)

EPILOGUE: frozenset[_quack.Shape] = frozenset({((9, 0), 4608, 1152), ((9, 0), 12288, 3072)})
"""Shapes for which cuBLAS adds the bias and applies GELU in the product's epilogue.

There it is faster than product and kernel (docs/benchmarks/2026-11-20-h200-tuned.md), and a row's bits do not depend on
the number of rows (tested)."""


def linear_gelu(x_BlE: Tensor, weight_FE: Tensor, bias_F: Tensor | None, *, exact: bool = False) -> Tensor:
    """Return GELU of x W^T + bias; the product is rounded before GELU, unless it is in the product's epilogue.

    exact: see `bias_gelu`.
    """
    narrow = x_BlE.dtype in (torch.bfloat16, torch.float16)
    if bias_F is not None and narrow and not exact and x_BlE.numel() and fused(x_BlE, weight_FE, bias_F):
        width, inner = weight_FE.shape
        shape = torch.cuda.get_device_capability(x_BlE.device), width, inner
        if shape in FASTER and _quack.why_not() is None:
            return linear_quack(x_BlE, weight_FE, bias_F)
        if shape in EPILOGUE:
            return linear_epilogue(x_BlE, weight_FE, bias_F)
    return bias_gelu(F.linear(x_BlE, weight_FE), bias_F, exact=exact, reuse=True)


def linear_quack(x_BlE: Tensor, weight_FE: Tensor, bias_F: Tensor) -> Tensor:
    """Compute `linear_gelu` in one call of quack, rounded once; `ValueError` if quack is not installed."""
    out_RF = _quack.loaded().gelu_of_product(x_BlE.flatten(0, 1), weight_FE, bias_F, TILE)
    return out_RF.view(*x_BlE.shape[:2], len(weight_FE))


def linear_epilogue(x_BlE: Tensor, weight_FE: Tensor, bias_F: Tensor) -> Tensor:
    """Compute `linear_gelu` in one call of cuBLASLt, rounded once; on GPUs only (CPUs would use the other GELU)."""
    out = torch.ops.aten._addmm_activation(bias_F, x_BlE.flatten(0, 1), weight_FE.t(), use_gelu=True)
    return out.view(*x_BlE.shape[:2], len(weight_FE))  # torch refuses -1 for the text of a rank that has none of it


def linear_reference(x_BlE: Tensor, weight_FE: Tensor, bias_F: Tensor) -> Tensor:
    """Compute `linear_gelu` in plain torch, rounded once."""
    wide = state_dtype(x_BlE.dtype)
    return reference(F.linear(x_BlE.to(wide), weight_FE.to(wide)), bias_F).to(x_BlE.dtype)


def bias_gelu(x_BlF: Tensor, bias_F: Tensor | None, *, exact: bool = False, reuse: bool = False) -> Tensor:
    """Return GELU of x + bias as a contiguous tensor; computed in fp32 (fp64 for fp64).

    exact: x Phi(x), the formula with the error function, otherwise the one with tanh. reuse: x is contiguous and not
    needed afterwards, so the result may be written over it, into half as many lines of the L2 cache.
    """
    if fused(x_BlF, bias_F):
        return launch(x_BlF, bias_F, exact=exact, reuse=reuse)
    return reference(x_BlF, bias_F, exact=exact)


def reference(x_BlF: Tensor, bias_F: Tensor | None, *, exact: bool = False) -> Tensor:
    """Compute `bias_gelu` in plain torch."""
    x = x_BlF.to(state_dtype(x_BlF.dtype))
    x = x if bias_F is None else x + bias_F.to(x.dtype)
    return F.gelu(x, approximate="none" if exact else "tanh").to(x_BlF.dtype)


def launch(
    x_BlF: Tensor, bias_F: Tensor | None, *, exact: bool = False, reuse: bool = False, tiled: Tile | None = None
) -> Tensor:
    """Run the kernel of `bias_gelu`; without `reuse` x may have any strides with a contiguous last dim."""
    contiguous_rows(x_BlF, bias_F)
    width = x_BlF.shape[2]
    out = x_BlF if reuse else x_BlF.new_empty(x_BlF.shape)
    if not out.is_contiguous():
        raise ValueError(f"got strides {x_BlF.stride()} with reuse, expected a contiguous tensor")
    _columns.launch(gelu_kernel, tiled or tile(width, rows=2), width, x_BlF, bias_F, out, EXACT=exact)
    return out


@jit
def normal_gelu(value):
    """Return x Phi(x) within 1e-6, relative to the value or to 1; with erf it would take about twice the instructions.

    Phi(x) = 1/2 + x P(x^2) for |x| < 5.1. P was fitted by iteratively reweighted least squares to the smallest largest
    error of the result; it is a polynomial in w from -1 to 1, in which the sums of Horner's rule do not cancel.
    """
    x = tl.maximum(value, -5.1, propagate_nan=tl.PropagateNan.ALL)  # below, the result is 0 within the error
    inner = tl.minimum(x, 5.1, propagate_nan=tl.PropagateNan.ALL)
    w = inner * inner * 0.0768935025 - 1.0  # 2 / 5.1^2
    p = -0.00195683469 + 0.000654207426 * w
    p = 0.00240439433 + p * w
    p = -0.00322961481 + p * w
    p = 0.00685995258 + p * w
    p = -0.0120242648 + p * w
    p = 0.0174654778 + p * w
    p = -0.0240164641 + p * w
    p = 0.0317160264 + p * w
    p = -0.0402186587 + p * w
    p = 0.0507829562 + p * w
    p = -0.0690032616 + p * w
    p = 0.138605282 + p * w
    return x * (0.5 + inner * p)


@jit(do_not_specialize=["count", "tokens"])  # one program for all numbers of tokens
def gelu_kernel(
    x,
    bias,
    out,
    count,
    tokens,
    batch_stride,
    token_stride,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EXACT: tl.constexpr,
):
    row, column, x, inside = places(x, count, tokens, batch_stride, token_stride, WIDTH, ROWS, COLUMNS)
    value = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        value += tl.load(bias + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    if EXACT and x.dtype.element_ty == tl.float32:
        result = 0.5 * value * (1.0 + tl.erf(value * 0.7071067811865476))  # 1 / sqrt(2)
    elif EXACT:
        result = normal_gelu(value)
    else:
        # (1 + tanh(u)) / 2 = 1 / (1 + exp(-2u)) needs no tanh, cancels nothing, and has the limit 0 if exp overflows
        twice_u = 1.5957691216057308 * (value + 0.044715 * value * value * value)  # 2 sqrt(2 / pi)
        result = value / (1.0 + tl.exp(-twice_u))
    tl.store(out + row.to(tl.int64) * WIDTH + column, result.to(out.dtype.element_ty), mask=inside)
