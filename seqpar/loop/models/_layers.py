"""Functions that several models share: sinusoids, position embeddings and linear layers in a wider dtype."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqpar.kernels.linear import bf16_parts, in_parts

MAX_PERIOD = 10000.0


def sinusoid(t_R: Tensor, dim: int, freq_shift: float = 0.0) -> Tensor:
    """Map (R,) timesteps to (R, dim) fp32: [cos, sin] of t * 10000^(-i / (dim/2 - freq_shift)).

    The original DiT has freq_shift 0 and diffusers' DiT has 1; at t = 960 this changes the output of the same weights
    by 21 %.
    """
    half = dim // 2
    index = torch.arange(half, dtype=torch.float32, device=t_R.device)
    angles = t_R.float()[:, None] * torch.exp(-math.log(MAX_PERIOD) * index / (half - freq_shift))
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def sincos_2d(rows_H: Tensor, columns_W: Tensor, dim: int) -> Tensor:
    """Return a fixed position embedding (H*W, dim): columns in the first half of the channels, rows in the second.

    Each half is [sin, cos] of position * 10000^(-i / (dim/4)). Angles are fp64, the result is fp32. Source: MAE, DiT.
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
    """Apply a linear layer to x in `dtype`, which may be wider than the dtype of its weights."""
    return through(x, dtype)(layer)


def through(x: Tensor, dtype: torch.dtype) -> Callable[[nn.Module], Tensor]:
    """Return a function that applies a linear layer to x in `dtype`; it can be called for many layers.

    On a GPU with bf16 weights and fp32 x, x is split into three bf16 numbers. Their products with the weights are exact
    in fp32 and are summed in fp32. This reads the weights once; converting them to fp32 would also write and read a
    copy of twice the size.
    """
    wide, parts = x.to(dtype), None

    def made(layer: nn.Module) -> Tensor:
        nonlocal parts
        assert isinstance(layer, nn.Linear)
        if not in_parts(wide, layer.weight):
            return F.linear(wide, layer.weight.to(dtype), layer.bias.to(dtype))
        parts = bf16_parts(wide) if parts is None else parts
        high, middle, low = torch.mm(parts, layer.weight.t(), out_dtype=dtype).chunk(3)
        return low + middle + high + layer.bias

    return made


def reordered(rows: Tensor, channels: int, patch: int) -> Tensor:
    """Return a final layer's rows (patch^2 C, ...), in the order (ph, pw, C), in the order (C, ph, pw) of `patchify`.

    With reordered weights the model's output has the order of the state, and updates need no reordering. Raises
    ValueError if there are more or fewer rows.
    """
    if len(rows) != patch * patch * channels:
        expected = f"{patch * patch * channels}, {channels} channels of a patch of {patch} x {patch}"
        raise ValueError(f"it has {len(rows)} rows, expected {expected}")
    return rows.view(patch, patch, channels, -1).permute(2, 0, 1, 3).reshape(rows.shape)


def output_channels(key: str, rows: int, patch: int) -> int:
    """Return the channels of a final layer with this number of rows; `ValueError` if a patch has no whole number."""
    if rows % patch**2:
        raise ValueError(f"got a checkpoint with {key} of {rows} rows, expected a multiple of {patch} x {patch}")
    return rows // patch**2
