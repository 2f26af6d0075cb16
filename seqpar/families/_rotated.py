"""Rotary embeddings of interleaved channels."""

from __future__ import annotations

import torch
from torch import Tensor


def rotated(x_BlHD: Tensor, cos_lHD2: Tensor, sin_lHD2: Tensor) -> Tensor:
    """Return the tokens with interleaved pairs rotated, computed in fp32; each head has its own angles."""
    even, odd = x_BlHD.float().unflatten(-1, (-1, 2)).unbind(-1)
    first, second = even * cos_lHD2 - odd * sin_lHD2, even * sin_lHD2 + odd * cos_lHD2
    return torch.stack((first.to(x_BlHD.dtype), second.to(x_BlHD.dtype)), dim=-1).flatten(-2)
