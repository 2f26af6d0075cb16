"""adaLN between the matrix products: gate a branch into the residual stream, normalise, modulate.

Plain torch: the arithmetic that fused kernels have to equal. Everything between reading a bf16 stream and writing one
is in fp32 (fp64 for fp64), so there is one rounding per result. Source: adaLN-Zero, DiT (arXiv 2212.09748).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from seqpar.protocols import state_dtype


@dataclass(frozen=True)
class Norm:
    """A norm over the width: LayerNorm or RMSNorm, with a weight (E,) or without."""

    kind: Literal["layer", "rms"] = "layer"
    eps: float = 1e-6
    weight: Tensor | None = None


def norm_modulate(x_BlE: Tensor, shift_BE: Tensor, scale_BE: Tensor, norm: Norm) -> Tensor:
    """norm(x) * (1 + scale) + shift, in x's dtype."""
    wide = x_BlE.to(state_dtype(x_BlE.dtype))
    weight = None if norm.weight is None else norm.weight.to(wide.dtype)
    if norm.kind == "layer":
        normed = F.layer_norm(wide, wide.shape[-1:], weight, eps=norm.eps)
    else:
        normed = F.rms_norm(wide, wide.shape[-1:], weight, norm.eps)
    return (normed * (1 + scale_BE[:, None]) + shift_BE[:, None]).to(x_BlE.dtype)


def gate_norm_modulate(
    x_BlE: Tensor, gate_BE: Tensor, branch_BlE: Tensor, shift_BE: Tensor, scale_BE: Tensor, norm: Norm
) -> tuple[Tensor, Tensor]:
    """(x + gate * branch, norm_modulate of that), both in x's dtype; the norm sees the sum before it is rounded."""
    total = x_BlE.to(state_dtype(x_BlE.dtype)) + gate_BE[:, None] * branch_BlE
    return total.to(x_BlE.dtype), norm_modulate(total, shift_BE, scale_BE, norm).to(x_BlE.dtype)
