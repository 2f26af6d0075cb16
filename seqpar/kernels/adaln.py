"""adaLN between the matrix products: normalise and modulate; gate a branch and add it to the residual stream.

Plain torch: the arithmetic that fused kernels have to equal. Everything between reading a bf16 stream and writing one
is in fp32 (fp64 for fp64), so one rounding per result. Source: adaLN-Zero, DiT (arXiv 2212.09748).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from seqpar.protocols import state_dtype


def norm_modulate(x_BlE: Tensor, shift_BE: Tensor, scale_BE: Tensor, eps: float) -> Tensor:
    """LayerNorm(x) (no affine) * (1 + scale) + shift, in x's dtype."""
    wide = x_BlE.to(state_dtype(x_BlE.dtype))
    return (F.layer_norm(wide, wide.shape[-1:], eps=eps) * (1 + scale_BE[:, None]) + shift_BE[:, None]).to(x_BlE.dtype)


def gate_residual(x_BlE: Tensor, gate_BE: Tensor, branch_BlE: Tensor) -> Tensor:
    """x + gate * branch, in x's dtype."""
    return (x_BlE + gate_BE[:, None] * branch_BlE).to(x_BlE.dtype)
