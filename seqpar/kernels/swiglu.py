"""SwiGLU on packed w1|w3: silu(first half) * second half, in one pass.

When it wins: always on a GPU; plain torch writes silu's result and reads it back, so it moves 5 F elements a row, not
3 F. Source: GLU variants (arXiv 2002.05202); w1 and w3 are one matrix product.
"""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from seqpar.kernels._triton import contiguous_rows, fused, jit, tl, triton
from seqpar.types.protocols import state_dtype

CASES = (
    *({"batch": 2, "tokens": n, "width": 11008} for n in (256, 4096)),  # Large-DiT 7B
    {"batch": 1, "tokens": 4096, "width": 8192},  # 3B
    {"batch": 2, "tokens": 1023, "width": 4096},  # 600M
    {"batch": 2, "tokens": 3, "width": 1544},  # only 8 divides it
    {"batch": 3, "tokens": 7, "width": 40},
)
"""Shapes that tests and a bench use; a row [w1 x | w3 x] has 2 `width` elements."""


class Tile(NamedTuple):
    """The rows and columns of the output that one program computes, powers of two, and its number of warps."""

    rows: int
    columns: int
    warps: int


def swiglu(packed_BlF2: Tensor) -> Tensor:
    """Return silu(w1 x) * w3 x, (B, l, F), from rows [w1 x | w3 x], (B, l, 2F); computed in fp32 (fp64 for fp64)."""
    return (launch if fused(packed_BlF2) else reference)(packed_BlF2)


def reference(packed_BlF2: Tensor) -> Tensor:
    """Compute `swiglu` in plain torch."""
    gate, up = packed_BlF2.to(state_dtype(packed_BlF2.dtype)).chunk(2, dim=-1)
    return (F.silu(gate) * up).to(packed_BlF2.dtype)


def tile(width: int) -> Tile:
    """Return the tile for a width: a thread has one 16-byte vector of each half."""
    columns = min(1024, triton.next_power_of_2(width))
    return Tile(1, columns, max(1, columns // 256))


def launch(packed_BlF2: Tensor, *, tiled: Tile | None = None) -> Tensor:
    """Run the kernel of `swiglu`; the input may have any strides with a contiguous last dim."""
    contiguous_rows(packed_BlF2)
    batch, tokens, width = *packed_BlF2.shape[:2], packed_BlF2.shape[2] // 2
    out = packed_BlF2.new_empty(batch, tokens, width)
    if out.numel():
        rows, columns, warps = tiled or tile(width)
        grid = (triton.cdiv(batch * tokens, rows) * triton.cdiv(width, columns),)
        swiglu_kernel[grid](
            packed_BlF2,
            out,
            batch * tokens,
            tokens,
            packed_BlF2.stride(0),
            packed_BlF2.stride(1),
            width,
            rows,
            columns,
            num_warps=warps,
            enable_fp_fusion=True,
        )
    return out


@jit(do_not_specialize=["count", "tokens"])  # one program for all numbers of tokens
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
):
    """Compute some columns of some rows in each program; neighbouring programs share rows, so reads are in order."""
    blocks = tl.cdiv(WIDTH, COLUMNS)
    row = (tl.program_id(0) // blocks * ROWS + tl.arange(0, ROWS))[:, None]
    column = (tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    packed += (row // tokens).to(tl.int64) * batch_stride + (row % tokens).to(tl.int64) * token_stride
    inside = (row < count) & (column < WIDTH)
    gate = tl.load(packed + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(packed + WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row.to(tl.int64) * WIDTH + column, result.to(out.dtype.element_ty), mask=inside)
