"""Gate and residual in the epilogue of a matrix product: x + gate * (h W^T), in one pass; the norm follows in another.

When it wins: decided by `launch/bench.py kernels`, shape by shape; `FASTER` holds what a committed table shows, and it
is empty: nothing has been measured yet. Until then this is cuBLAS and the kernel of `adaln.py`, which gates, adds and
normalises in one pass: 5 streams of (rows, E) instead of the 4 here. The norm then sees the stream as it is stored,
rounded, where `adaln.py` normalises the sum before it is rounded.

How products are laid out, and why a row's bits do not depend on the number of rows: see `gated_linear.py`.
Source: adaLN-Zero, DiT (arXiv 2212.09748).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from seqpar.kernels._triton import jit, tl
from seqpar.kernels.adaln import Norm, gate_norm_modulate, norm_modulate
from seqpar.kernels.gated_linear import GROUP, Table, Tile, descriptor, grid, measured, place
from seqpar.protocols import state_dtype

CASES = (
    *({"batch": 2, "tokens": n, "inner": k, "width": 4096} for n in (256, 4096) for k in (4096, 11008)),  # 7B
    {"batch": 2, "tokens": 4096, "inner": 8192, "width": 3072},  # 3B
    {"batch": 3, "tokens": 37, "inner": 72, "width": 136},  # only 8 divides either; a tile has rows of several images
    {"batch": 1, "tokens": 1, "inner": 40, "width": 8},
)
TILE = Tile(128, 256, 64, 4, 8)
FASTER: Table = {}
"""(compute capability, E, F) -> the tile that beat cuBLAS and a kernel, in a table of docs/benchmarks; none so far."""


def linear_gate_norm_modulate(
    x_BlE: Tensor, gate_BE: Tensor, h_BlF: Tensor, weight_EF: Tensor, shift_BE: Tensor, scale_BE: Tensor, norm: Norm,
    *, keep: bool = True, next_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`adaln.gate_norm_modulate` of the branch h W^T: (the stream after it, normalised and modulated).

    next_weight: what the next product reads, which the norm's kernel may fetch ahead (`ahead.py`); changes no bit.
    """
    tiled = measured(FASTER, len(weight_EF), h_BlF, weight_EF, x_BlE, gate_BE)
    if tiled is not None:
        x = launch(x_BlE, gate_BE, h_BlF, weight_EF, tiled=tiled)
        return x, norm_modulate(x, shift_BE, scale_BE, norm, next_weight=next_weight)
    branch = F.linear(h_BlF, weight_EF)
    return gate_norm_modulate(
        x_BlE, gate_BE, branch, shift_BE, scale_BE, norm, keep=keep, next_weight=next_weight
    )  # fmt: skip


def reference(x_BlE: Tensor, gate_BE: Tensor, h_BlF: Tensor, weight_EF: Tensor) -> Tensor:
    """x + gate * (h W^T) in plain torch, rounded once."""
    wide = state_dtype(x_BlE.dtype)
    branch = F.linear(h_BlF.to(wide), weight_EF.to(wide))
    return (x_BlE + gate_BE[:, None].to(wide) * branch).to(x_BlE.dtype)


def launch(x_BlE: Tensor, gate_BE: Tensor, h_BlF: Tensor, weight_EF: Tensor, *, tiled: Tile = TILE) -> Tensor:
    """The same by the kernel, into a new tensor; rows have to start on 16 bytes."""
    batch, tokens, width = x_BlE.shape
    out = torch.empty(x_BlE.shape, dtype=x_BlE.dtype, device=x_BlE.device)
    rows, columns, depth, stages, warps, _ = tiled
    if programs := grid(batch * tokens, width, tiled, x_BlE.device):
        gate = gate_BE.expand(batch, width)
        if gate.stride(1) != 1 and width > 1:
            raise ValueError(f"got a gate with strides {gate.stride()}, expected a contiguous last dim")
        residual_kernel[(programs,)](
            descriptor("h", h_BlF.flatten(0, 1), rows, depth, x_BlE.dtype),
            descriptor("weights", weight_EF, columns, depth, x_BlE.dtype),
            descriptor("the stream", x_BlE.flatten(0, 1), rows, columns // 2, x_BlE.dtype),
            descriptor("output", out.flatten(0, 1), rows, columns // 2, x_BlE.dtype),
            gate, gate.stride(0), batch * tokens, tokens, width, h_BlF.shape[2], rows, columns, depth, GROUP, stages,
            num_warps=warps, enable_fp_fusion=True,
        )  # fmt: skip
    return out


@jit
def residual_kernel(
    h, weight, x, out, gate, gate_batch, count, tokens, width, inner, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program = every so many-th tile of the output; neighbours share weights first, then rows."""
    tiles = tl.cdiv(count, ROWS) * tl.cdiv(width, COLUMNS)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row, column = place(tile, count, width, ROWS, COLUMNS, GROUP)
        branch = tl.zeros((ROWS, COLUMNS), tl.float32)
        for k in tl.range(0, inner, DEPTH, num_stages=STAGES):  # pyright: ignore[reportGeneralTypeIssues]
            branch = tl.dot(h.load([row, k]), weight.load([column, k]).T, branch, input_precision="ieee")
        # one half after the other: the stream and the gate of all columns are more than the registers hold
        left, right = branch.reshape(ROWS, 2, COLUMNS // 2).permute(0, 2, 1).split()
        _add(x, out, gate, gate_batch, left, row, column, count, tokens, width)
        _add(x, out, gate, gate_batch, right, row, column + COLUMNS // 2, count, tokens, width)


@jit
def _add(x, out, gate, gate_batch, branch, row, column, count, tokens, width):
    rows = (row + tl.arange(0, branch.shape[0]))[:, None]
    columns = (column + tl.arange(0, branch.shape[1]))[None, :]
    at = gate + (rows // tokens).to(tl.int64) * gate_batch + columns
    gates = tl.load(at, mask=(rows < count) & (columns < width), other=0.0).to(tl.float32)
    out.store([row, column], (x.load([row, column]).to(tl.float32) + gates * branch).to(out.dtype))
