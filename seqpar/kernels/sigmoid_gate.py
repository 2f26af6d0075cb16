"""A gate of attention's output: x * sigmoid(gate), with a gate for each number, in one pass.

Plain torch writes the sigmoid and reads it back, so it moves 5 F elements a row, not
3 F. Source: gated attention (arXiv 2505.06708).
"""

from __future__ import annotations

import torch
from torch import Tensor

from seqpar.kernels import _columns
from seqpar.kernels._columns import tile
from seqpar.kernels._triton import contiguous_rows, fused, jit, tl
from seqpar.types.protocols import state_dtype

CASES = (
    {"batch": 1, "tokens": 4608, "width": 6144},  # Krea 2
    {"batch": 2, "tokens": 3, "width": 1544},  # only 8 divides it
    {"batch": 3, "tokens": 7, "width": 40},
)


def sigmoid_gate(x_BlF: Tensor, gate_BlF: Tensor) -> Tensor:
    """Return x * sigmoid(gate), (B, l, F), in x's dtype; computed in fp32 (fp64 for fp64).

    The gate is contiguous and not needed afterwards: the kernel writes over it.
    """
    return (launch if fused(x_BlF, gate_BlF) else reference)(x_BlF, gate_BlF)


def reference(x_BlF: Tensor, gate_BlF: Tensor) -> Tensor:
    """Compute `sigmoid_gate` in plain torch, into a new tensor."""
    wide = state_dtype(x_BlF.dtype)
    return (x_BlF.to(wide) * torch.sigmoid(gate_BlF.to(wide))).to(x_BlF.dtype)


def launch(x_BlF: Tensor, gate_BlF: Tensor) -> Tensor:
    """Run the kernel of `sigmoid_gate`; x may have any strides with a contiguous last dim."""
    contiguous_rows(x_BlF)
    width = x_BlF.shape[2]
    if gate_BlF.shape != x_BlF.shape or gate_BlF.dtype != x_BlF.dtype or not gate_BlF.is_contiguous():
        raise ValueError(
            f"got a gate of {tuple(gate_BlF.shape)}, {gate_BlF.dtype}, strides {gate_BlF.stride()}, expected a "
            f"contiguous one of {tuple(x_BlF.shape)}, {x_BlF.dtype}"
        )
    _columns.launch(sigmoid_gate_kernel, tile(width), width, x_BlF, gate_BlF)
    return gate_BlF


@jit(do_not_specialize=["count", "tokens"])  # one program for all numbers of tokens
def sigmoid_gate_kernel(
    x, gate, count, tokens, batch_stride, token_stride, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    blocks = tl.cdiv(WIDTH, COLUMNS)
    row = (tl.program_id(0) // blocks * ROWS + tl.arange(0, ROWS))[:, None]
    column = (tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    inside = (row < count) & (column < WIDTH)
    x += (row // tokens).to(tl.int64) * batch_stride + (row % tokens).to(tl.int64) * token_stride
    gate += row.to(tl.int64) * WIDTH
    value = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(gate + column, mask=inside, other=0.0).to(tl.float32)
    result = value / (1.0 + tl.exp(-weight))
    tl.store(gate + column, result.to(gate.dtype.element_ty), mask=inside)
