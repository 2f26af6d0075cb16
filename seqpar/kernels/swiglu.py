"""SwiGLU on packed w1|w3: silu(first half) * second half, in one pass.

Plain torch writes silu's result and reads it back, so it moves 5 F elements a row, not
3 F. Source: GLU variants (arXiv 2002.05202); w1 and w3 are one matrix product.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from seqpar.kernels import _columns
from seqpar.kernels._columns import Tile, places, tile
from seqpar.kernels._triton import contiguous_rows, fused, jit, tl
from seqpar.types.protocols import state_dtype

CASES = (
    *({"batch": 2, "tokens": n, "width": 11008} for n in (256, 4096)),  # Large-DiT 7B
    {"batch": 1, "tokens": 4096, "width": 8192},  # 3B
    {"batch": 2, "tokens": 1023, "width": 4096},  # 600M
    {"batch": 2, "tokens": 3, "width": 1544},  # only 8 divides it
    {"batch": 3, "tokens": 7, "width": 40},
)
"""Shapes that tests and a bench use; a row [w1 x | w3 x] has 2 `width` elements."""


def swiglu(packed_BlF2: Tensor) -> Tensor:
    """Return silu(w1 x) * w3 x, (B, l, F), from rows [w1 x | w3 x], (B, l, 2F); computed in fp32 (fp64 for fp64)."""
    return (launch if fused(packed_BlF2) else reference)(packed_BlF2)


def reference(packed_BlF2: Tensor) -> Tensor:
    """Compute `swiglu` in plain torch."""
    gate, up = packed_BlF2.to(state_dtype(packed_BlF2.dtype)).chunk(2, dim=-1)
    return (F.silu(gate) * up).to(packed_BlF2.dtype)


def launch(packed_BlF2: Tensor, *, tiled: Tile | None = None) -> Tensor:
    """Run the kernel of `swiglu`; the input may have any strides with a contiguous last dim."""
    contiguous_rows(packed_BlF2)
    batch, tokens, width = *packed_BlF2.shape[:2], packed_BlF2.shape[2] // 2
    out = packed_BlF2.new_empty(batch, tokens, width)
    _columns.launch(swiglu_kernel, tiled or tile(width), width, packed_BlF2, out)
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
    row, column, packed, inside = places(packed, count, tokens, batch_stride, token_stride, WIDTH, ROWS, COLUMNS)
    gate = tl.load(packed + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(packed + WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row.to(tl.int64) * WIDTH + column, result.to(out.dtype.element_ty), mask=inside)
