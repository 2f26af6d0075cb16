"""Parts that several models share: sinusoids, position embeddings, wide linear layers, and pieces of key maps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqpar.kernels.linear import bf16_parts, in_parts
from seqpar.types.keys import TensorSource

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
    """A fixed position embedding (H*W, dim): columns in the first half of the channels, rows in the second.

    Each half is [sin, cos] of position * 10000^(-i / (dim/4)). Angles are fp64, the result is fp32. Source: MAE, DiT.
    """
    count = dim // 4
    index = torch.arange(count, dtype=torch.float64, device=rows_H.device)
    omega = MAX_PERIOD ** (-index / count)

    def half(position: Tensor) -> Tensor:
        angles = position.double()[:, None] * omega
        return torch.cat((angles.sin(), angles.cos()), dim=-1)

    columns = half(columns_W)[None].expand(len(rows_H), -1, -1)
    rows = half(rows_H)[:, None].expand(-1, len(columns_W), -1)
    return torch.cat((columns, rows), dim=-1).flatten(0, 1).float()


def through(x: Tensor, dtype: torch.dtype) -> Callable[[nn.Module], Tensor]:
    """A function that applies a linear layer to x in `dtype`, which may be wider than the layer's weights.

    On a GPU with bf16 weights and fp32 x, x is split into three bf16 numbers. Their products with the weights are exact
    in fp32 and are summed in fp32. This reads the weights once; converting them to fp32 would also write and read a
    copy of twice the size.
    """
    wide, parts = x.to(dtype), None

    def apply(layer: nn.Module) -> Tensor:
        nonlocal parts
        assert isinstance(layer, nn.Linear)
        if not in_parts(wide, layer.weight):
            return F.linear(wide, layer.weight.to(dtype), layer.bias.to(dtype))
        parts = bf16_parts(wide) if parts is None else parts
        high, middle, low = torch.mm(parts, layer.weight.t(), out_dtype=dtype).chunk(3)
        return low + middle + high + layer.bias

    return apply


# Key maps ----------------------------------------------------------------------------------------------------------


def layers(
    names: Mapping[str, str | tuple[str, ...]],
    ours: str = "",
    theirs: str = "",
    kinds: tuple[str, ...] = ("weight", "bias"),
) -> dict[str, TensorSource]:
    """The sources of layers' parameters, from name of our layer -> theirs; rows of several layers are concatenated.

    ours, theirs: prefixes of all names.
    """
    sources = {}
    for name, source in names.items():
        keys = (source,) if isinstance(source, str) else source
        for kind in kinds:
            whole = tuple(f"{theirs}{key}.{kind}" for key in keys)
            sources[f"{ours}{name}.{kind}"] = TensorSource(whole) if len(keys) == 1 else TensorSource(whole, _rows)
    return sources


def _rows(*tensors: Tensor) -> Tensor:
    return torch.cat(tensors)


def convolution(ours: str, theirs: str) -> dict[str, TensorSource]:
    """The sources of a first layer that embeds patches: the weight of the convolution becomes a matrix."""
    weight = TensorSource((f"{theirs}.weight",), lambda kernel: kernel.flatten(1))
    return {f"{ours}.weight": weight, f"{ours}.bias": TensorSource((f"{theirs}.bias",))}


def last(ours: str, theirs: str, channels: int, patch: int) -> dict[str, TensorSource]:
    """The sources of a last layer: its rows (patch^2 C, ...), in the order (ph, pw, C), get that of `patchify`.

    So the model's output has the order of the state, and updates need no reordering.
    """

    def reordered(rows: Tensor) -> Tensor:
        if len(rows) != patch * patch * channels:
            expected = f"{patch * patch * channels}, {channels} channels of a patch of {patch} x {patch}"
            raise ValueError(f"it has {len(rows)} rows, expected {expected}")
        return rows.view(patch, patch, channels, -1).permute(2, 0, 1, 3).reshape(rows.shape)

    return {f"{ours}.{kind}": TensorSource((f"{theirs}.{kind}",), reordered) for kind in ("weight", "bias")}


def output_channels(key: str, rows: int, patch: int) -> int:
    """The channels of a last layer with this number of rows; ValueError if a patch has no whole number."""
    if rows % patch**2:
        raise ValueError(f"got a checkpoint with {key} of {rows} rows, expected a multiple of {patch} x {patch}")
    return rows // patch**2
