"""Activations of the MLP and the gate of attention, in one pass each: bias and GELU, SwiGLU, x * sigmoid(gate).

All are bound by memory. Plain torch adds GELU's bias in a separate pass and rounds the sum; it writes the sigmoid or
SiLU of a gate and reads it back, and so moves 5 F elements per row in place of 3 F. The kernels compute in fp32 and
round once. Each program computes some columns of some rows of a tensor (B, l, F).
Source: GELU (arXiv 1606.08415), GLU variants (arXiv 2002.05202), gated attention (arXiv 2505.06708).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from seqpar.kernels._triton import contiguous_rows, fused, jit, tl, triton
from seqpar.types.protocols import state_dtype

CASES = (
    *({"batch": 2, "tokens": n, "width": 11008} for n in (256, 4096)),  # Large-DiT 7B
    {"batch": 1, "tokens": 4096, "width": 8192},  # 3B
    {"batch": 2, "tokens": 1023, "width": 4096},  # 600M
    {"batch": 2, "tokens": 1024, "width": 4608},  # DiT-XL
    {"batch": 1, "tokens": 4608, "width": 6144},  # Krea 2
    {"batch": 2, "tokens": 3, "width": 1544},  # only 8 divides it
    {"batch": 3, "tokens": 7, "width": 40},
)
"""Shapes that tests use; width: F, of the result."""


class Tile(NamedTuple):
    """The rows and columns of the output that one program computes, powers of two, and its number of warps."""

    rows: int
    columns: int
    warps: int


def bias_gelu(x_BlF: Tensor, bias_F: Tensor | None, *, exact: bool = False, reuse: bool = False) -> Tensor:
    """Return GELU of x + bias as a contiguous tensor; computed in fp32 (fp64 for fp64).

    exact: x Phi(x), the formula with the error function (U-ViT), otherwise the one with tanh (DiT, FLUX). reuse: x is
    contiguous and not needed afterwards, so the result may be written over it, into half as many lines of the L2 cache.
    """
    if fused(x_BlF):
        return launch_gelu(x_BlF, bias_F, exact=exact, reuse=reuse)
    return reference_gelu(x_BlF, bias_F, exact=exact)


def swiglu(packed_BlF2: Tensor, *, gate_last: bool = False) -> Tensor:
    """Return silu(w1 x) * w3 x, (B, l, F), from rows [w1 x | w3 x], (B, l, 2F); computed in fp32 (fp64 for fp64).

    gate_last: the rows are [w3 x | w1 x], as of diffusers' `FeedForward`.
    """
    return (launch_swiglu if fused(packed_BlF2) else reference_swiglu)(packed_BlF2, gate_last=gate_last)


def sigmoid_gate(x_BlF: Tensor, gate_BlF: Tensor) -> Tensor:
    """Return x * sigmoid(gate), (B, l, F), in x's dtype; computed in fp32 (fp64 for fp64).

    The gate is contiguous and not needed afterwards: the kernel writes over it.
    """
    return (launch_gate if fused(x_BlF) else reference_gate)(x_BlF, gate_BlF)


def reference_gelu(x_BlF: Tensor, bias_F: Tensor | None, *, exact: bool = False) -> Tensor:
    x = x_BlF.to(state_dtype(x_BlF.dtype))
    x = x if bias_F is None else x + bias_F.to(x.dtype)
    return F.gelu(x, approximate="none" if exact else "tanh").to(x_BlF.dtype)


def reference_swiglu(packed_BlF2: Tensor, *, gate_last: bool = False) -> Tensor:
    gate, up = packed_BlF2.to(state_dtype(packed_BlF2.dtype)).chunk(2, dim=-1)
    if gate_last:
        gate, up = up, gate
    return (F.silu(gate) * up).to(packed_BlF2.dtype)


def reference_gate(x_BlF: Tensor, gate_BlF: Tensor) -> Tensor:
    wide = state_dtype(x_BlF.dtype)
    return (x_BlF.to(wide) * torch.sigmoid(gate_BlF.to(wide))).to(x_BlF.dtype)


def launch_gelu(x_BlF: Tensor, bias_F: Tensor | None, *, exact: bool = False, reuse: bool = False) -> Tensor:
    contiguous_rows(x_BlF, bias_F)
    width = x_BlF.shape[2]
    out = x_BlF if reuse else x_BlF.new_empty(x_BlF.shape)
    if not out.is_contiguous():
        raise ValueError(f"got strides {x_BlF.stride()} with reuse, expected a contiguous tensor")
    _launch(gelu_kernel, tile(width, rows=2), width, x_BlF, bias_F, out, EXACT=exact)
    return out


def launch_swiglu(packed_BlF2: Tensor, *, gate_last: bool = False) -> Tensor:
    contiguous_rows(packed_BlF2)
    batch, tokens, width = *packed_BlF2.shape[:2], packed_BlF2.shape[2] // 2
    out = packed_BlF2.new_empty(batch, tokens, width)
    _launch(swiglu_kernel, tile(width), width, packed_BlF2, out, GATE=width if gate_last else 0)
    return out


def launch_gate(x_BlF: Tensor, gate_BlF: Tensor) -> Tensor:
    contiguous_rows(x_BlF)
    width = x_BlF.shape[2]
    if gate_BlF.shape != x_BlF.shape or gate_BlF.dtype != x_BlF.dtype or not gate_BlF.is_contiguous():
        raise ValueError(
            f"got a gate of {tuple(gate_BlF.shape)}, {gate_BlF.dtype}, strides {gate_BlF.stride()}, expected a "
            f"contiguous one of {tuple(x_BlF.shape)}, {x_BlF.dtype}"
        )
    _launch(sigmoid_gate_kernel, tile(width), width, x_BlF, gate_BlF)
    return gate_BlF


def tile(width: int, rows: int = 1) -> Tile:
    """Return the tile for a width: a thread has one 16-byte vector of each row."""
    columns = min(1024, triton.next_power_of_2(width))
    return Tile(rows, columns, max(1, columns // 256))


def _launch(kernel: Any, tiled: Tile, width: int, x: Tensor, *others: Tensor | None, **constants: int) -> None:
    # without elements nothing is launched
    batch, tokens = x.shape[:2]
    if not batch * tokens * width:
        return
    rows, columns, warps = tiled
    grid = (triton.cdiv(batch * tokens, rows) * triton.cdiv(width, columns),)
    sizes = batch * tokens, tokens, x.stride(0), x.stride(1)
    constants |= {"WIDTH": width, "ROWS": rows, "COLUMNS": columns}
    kernel[grid](x, *others, *sizes, **constants, num_warps=warps, enable_fp_fusion=True)


@jit
def places(
    x, count, tokens, batch_stride, token_stride, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Return a program's rows and columns, its rows of x, and whether each element exists.

    Neighbouring programs share rows, so reads are in order.
    """
    blocks = tl.cdiv(WIDTH, COLUMNS)
    row = (tl.program_id(0) // blocks * ROWS + tl.arange(0, ROWS))[:, None]
    column = (tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    x += (row // tokens).to(tl.int64) * batch_stride + (row % tokens).to(tl.int64) * token_stride
    return row, column, x, (row < count) & (column < WIDTH)


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


@jit
def tanh_gelu(value):
    # (1 + tanh(u)) / 2 = 1 / (1 + exp(-2u)) needs no tanh, cancels nothing, and has the limit 0 if exp overflows
    twice_u = 1.5957691216057308 * (value + 0.044715 * value * value * value)  # 2 sqrt(2 / pi)
    return value / (1.0 + tl.exp(-twice_u))


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
        result = tanh_gelu(value)
    tl.store(out + row.to(tl.int64) * WIDTH + column, result.to(out.dtype.element_ty), mask=inside)


@jit(do_not_specialize=["count", "tokens"])
def swiglu_kernel(
    packed,
    out,
    count,
    tokens,
    batch_stride,
    token_stride,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GATE: tl.constexpr,
):
    row, column, packed, inside = places(packed, count, tokens, batch_stride, token_stride, WIDTH, ROWS, COLUMNS)
    gate = tl.load(packed + GATE + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(packed + (WIDTH - GATE) + column, mask=inside, other=0.0).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row.to(tl.int64) * WIDTH + column, result.to(out.dtype.element_ty), mask=inside)


@jit(do_not_specialize=["count", "tokens"])
def sigmoid_gate_kernel(
    x, gate, count, tokens, batch_stride, token_stride, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    row, column, x, inside = places(x, count, tokens, batch_stride, token_stride, WIDTH, ROWS, COLUMNS)
    gate += row.to(tl.int64) * WIDTH
    value = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(gate + column, mask=inside, other=0.0).to(tl.float32)
    result = value / (1.0 + tl.exp(-weight))
    tl.store(gate + column, result.to(gate.dtype.element_ty), mask=inside)
