"""SwiGLU of a matrix product from packed weights w1|w3, silu(x W1^T) * (x W3^T): in the product's epilogue where that
is faster than cuBLAS and the kernel of `swiglu.py`.

When it wins: see `FASTER`, which holds what docs/benchmarks shows. The product is quack's (`_quack.py`).
Source: GLU variants (arXiv 2002.05202).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from seqpar.kernels import _quack, swiglu
from seqpar.kernels._quack import Faster, Table, Tile
from seqpar.protocols import state_dtype

CASES = (
    *({"batch": 2, "tokens": n, "inner": 4096, "width": 11008} for n in (256, 4096)),  # Large-DiT 7B
    {"batch": 2, "tokens": 4096, "inner": 3072, "width": 8192},  # 3B
    {"batch": 1, "tokens": 1023, "inner": 1536, "width": 4096},  # 600M
)

FASTER: Table = {
    ((9, 0), 22016, 4096): Faster(1024, Tile(128, 192, 2), ((64, Tile(64, 192, 1, 2)), (128, Tile(128, 192, 1, 2)))),
    ((9, 0), 16384, 3072): Faster(0, Tile(128, 128, 2), ((128, Tile(128, 128)),)),
    ((9, 0), 8192, 1536): Faster(0, Tile(128, 128, 2), ((128, Tile(128, 128)),)),
}
"""As docs/benchmarks/2026-11-20-h200-tuned.md shows. For the 7B at 256 and 512 rows cuBLAS and a kernel are 6 to 8 %
faster, which are a short sequence's rows; a long one's are the same on several ranks."""


def gated_linear(x_BlE: Tensor, packed_F2E: Tensor, tokens: int | None = None) -> Tensor:
    """SwiGLU of x W^T, (B, l, F): rows of W are w1|w3; fp32 (fp64 for fp64) between the product and one rounding.

    tokens: of the whole sequence, those of x where None. Where `FASTER` has no entry for it the product is rounded,
    too, as torch rounds it.
    """
    tile = _quack.choose(FASTER, x_BlE, packed_F2E, tokens)
    if tile is None:
        return swiglu.swiglu(F.linear(x_BlE, packed_F2E))
    return launch(x_BlE, packed_F2E, tiled=tile)


def reference(x_BlE: Tensor, packed_F2E: Tensor) -> Tensor:
    """The same in plain torch, rounded once."""
    wide = state_dtype(x_BlE.dtype)
    return swiglu.reference(F.linear(x_BlE.to(wide), packed_F2E.to(wide))).to(x_BlE.dtype)


def launch(x_BlE: Tensor, packed_F2E: Tensor, *, tiled: Tile) -> Tensor:
    """The same by quack; `ValueError` where it is not installed."""
    out = x_BlE.new_empty(*x_BlE.shape[:2], packed_F2E.shape[0] // 2)
    rows_ME, out_MF = x_BlE.flatten(0, 1), out.flatten(0, 1)
    _quack.product("gated", tiled, rows_ME, packed_F2E, None, vectors={"out": out_MF}, concat_layout=("B",))
    return out
