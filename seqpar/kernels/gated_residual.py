"""A branch's last product, gated and added to the residual stream in its epilogue; then norm and modulation of that.

When it wins: where rows are many (see `FASTER`, which holds what docs/benchmarks shows). The branch is never written:
gate, residual and norm move 8 bytes an element of a bf16 stream after a product of cuBLAS (`adaln.py`), here 4, and the
2 that the product reads more are read under its arithmetic. The product is quack's (`_quack.py`).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from seqpar.kernels import _quack, adaln
from seqpar.kernels._quack import Table, Tile
from seqpar.kernels.adaln import Norm
from seqpar.protocols import state_dtype

CASES = (
    {"batch": 2, "tokens": 256, "inner": 4096, "width": 4096},  # Large-DiT 7B, wo
    {"batch": 2, "tokens": 4096, "inner": 4096, "width": 4096},
    {"batch": 2, "tokens": 1025, "inner": 11008, "width": 4096},  # w2
    {"batch": 1, "tokens": 1023, "inner": 3072, "width": 3072},  # 3B
)

FASTER: Table = {}


def linear_gate_norm_modulate(
    h_BlF: Tensor,
    weight_EF: Tensor,
    x_BlE: Tensor,
    gate_BE: Tensor,
    shift_BE: Tensor,
    scale_BE: Tensor,
    norm: Norm,
    tokens: int | None = None,
    *,
    keep: bool = True,
) -> tuple[Tensor, Tensor]:
    """(x + gate * (h W^T), norm(that) * (1 + scale) + shift), both (B, l, E) in x's dtype.

    tokens: of the whole sequence, those of x where None. Where `FASTER` has no entry for it the product is rounded and
    the norm sees the sum before it is; where it has one, the sum is rounded once and the norm sees that.
    keep=False: nobody reads the stream again (the last layer), which may come back as it was.
    """
    tile = _quack.choose(FASTER, h_BlF, weight_EF, tokens, x_BlE, gate_BE)
    if tile is None:
        branch = F.linear(h_BlF, weight_EF)
        return adaln.gate_norm_modulate(x_BlE, gate_BE, branch, shift_BE, scale_BE, norm, keep=keep)
    x = launch(h_BlF, weight_EF, x_BlE, gate_BE, tiled=tile)
    return x, adaln.norm_modulate(x, shift_BE, scale_BE, norm)


def reference(h_BlF: Tensor, weight_EF: Tensor, x_BlE: Tensor, gate_BE: Tensor) -> Tensor:
    """x + gate * (h W^T) in plain torch, rounded once."""
    wide = state_dtype(x_BlE.dtype)
    branch = F.linear(h_BlF.to(wide), weight_EF.to(wide))
    return (x_BlE.to(wide) + gate_BE[:, None].to(wide) * branch).to(x_BlE.dtype)


def launch(h_BlF: Tensor, weight_EF: Tensor, x_BlE: Tensor, gate_BE: Tensor, *, tiled: Tile) -> Tensor:
    """The same by quack, in a new tensor; `ValueError` where it is not installed."""
    batch, out = len(x_BlE), x_BlE.new_empty(x_BlE.shape)
    # a tile has rows of one batch row, and so one gate; the weights are read from where they are
    weight_BEF, gate_BE = weight_EF.expand(batch, -1, -1), gate_BE.expand(batch, -1)
    _quack.product("gated_residual", tiled, h_BlF, weight_BEF, out, x_BlE, vectors={"gate": gate_BE})
    return out
