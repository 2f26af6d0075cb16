"""What several models share: patches, sinusoids, label arithmetic. Plain functions of tensors."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MAX_PERIOD = 10000.0


def sinusoid(t_R: Tensor, dim: int, freq_shift: float = 0.0) -> Tensor:
    """(R,) timesteps -> (R, dim) fp32: [cos, sin] of t * 10000^(-i / (dim/2 - freq_shift)).

    Original DiT has freq_shift 0, diffusers' DiT has 1; with the same weights outputs then differ by 21 % at t = 960.
    """
    half = dim // 2
    index = torch.arange(half, dtype=torch.float32, device=t_R.device)
    angles = t_R.float()[:, None] * torch.exp(-math.log(MAX_PERIOD) * index / (half - freq_shift))
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def sincos_2d(rows_H: Tensor, columns_W: Tensor, dim: int) -> Tensor:
    """(H*W, dim) fixed position embedding: columns in the first half of the channels, rows in the second.

    Each half is [sin, cos] of position * 10000^(-i / (dim/4)). Source: MAE / DiT; angles in fp64, result fp32.
    """
    count = dim // 4
    index = torch.arange(count, dtype=torch.float64, device=rows_H.device)
    omega = MAX_PERIOD ** (-index / count)

    def half(position: Tensor) -> Tensor:
        angles = position.double()[:, None] * omega
        return torch.cat((angles.sin(), angles.cos()), dim=-1)

    height, width = len(rows_H), len(columns_W)
    columns = half(columns_W)[None].expand(height, -1, -1)
    rows = half(rows_H)[:, None].expand(-1, width, -1)
    return torch.cat((columns, rows), dim=-1).flatten(0, 1).float()


def linear(x: Tensor, layer: nn.Module, dtype: torch.dtype) -> Tensor:
    """`layer` of x, computed in `dtype`, wider than its weights may be."""
    return through(x, dtype)(layer)


def through(x: Tensor, dtype: torch.dtype) -> Callable[[nn.Module], Tensor]:
    """What takes x through one layer after another, each computed in `dtype`.

    bf16 weights on a GPU stay as they are: x is cut into three bf16 numbers, whose products with them are exact in
    fp32 and are summed there. The weights are read once; made fp32 they would be written and read again, twice as wide.
    """
    wide, parts = x.to(dtype), None

    def made(layer: nn.Module) -> Tensor:
        nonlocal parts
        assert isinstance(layer, nn.Linear)
        if not _in_parts(wide, layer.weight):
            return F.linear(wide, layer.weight.to(dtype), layer.bias.to(dtype))
        parts = bf16_parts(wide) if parts is None else parts
        high, middle, low = torch.mm(parts, layer.weight.t(), out_dtype=dtype).chunk(3)
        return low + middle + high + layer.bias

    return made


def bf16_parts(x_RC: Tensor) -> Tensor:
    """(3 R, C) bf16: fp32 rows as sums of three, with 8 of their 24 bits each; the largest parts first."""
    high = x_RC.bfloat16()
    middle = (x_RC - high).bfloat16()
    return torch.cat((high, middle, (x_RC - high - middle).bfloat16()))


def _in_parts(wide: Tensor, weight: Tensor) -> bool:
    given = wide.is_cuda and wide.dim() == 2 and (wide.dtype, weight.dtype) == (torch.float32, torch.bfloat16)
    return given and not (torch.is_grad_enabled() and (wide.requires_grad or weight.requires_grad))


def output_order(out_channels: int, patch: int) -> Tensor:
    """Rows of a final layer stored (ph, pw, C) in the order (C, ph, pw) of `patchify`: updates need no reorder."""
    stored = torch.arange(patch * patch * out_channels).view(patch, patch, out_channels)
    return stored.permute(2, 0, 1).flatten()
