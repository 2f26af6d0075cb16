"""Matrix products in fp32, on a GPU in bf16 parts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from seqpar.types.protocols import state_dtype


def product(x_RC: Tensor, weight_FC: Tensor) -> Tensor:
    """Return x W^T in fp32 (fp64 for fp64), not rounded to the dtype of x and the weight; one GEMM on GPUs."""
    wide = state_dtype(x_RC.dtype)
    if x_RC.is_cuda and wide != x_RC.dtype and not (torch.is_grad_enabled() and x_RC.requires_grad):
        return torch.mm(x_RC, weight_FC.t(), out_dtype=wide)
    return F.linear(x_RC.to(wide), weight_FC.to(wide))


def bf16_parts(x_RC: Tensor) -> Tensor:
    """Split fp32 rows (R, C) into three bf16 parts (3 R, C) that add up to them, 8 of 24 bits each, largest first."""
    high = x_RC.bfloat16()
    middle = (x_RC - high).bfloat16()
    return torch.cat((high, middle, (x_RC - high - middle).bfloat16()))


def _in_parts(wide: Tensor, weight: Tensor) -> bool:
    given = wide.is_cuda and wide.dim() == 2 and (wide.dtype, weight.dtype) == (torch.float32, torch.bfloat16)
    return given and not (torch.is_grad_enabled() and (wide.requires_grad or weight.requires_grad))
