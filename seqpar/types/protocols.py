"""The interfaces between models, strategies and local attention, with the data types that they exchange.

A model calls `Attend`, a strategy implements it around a `Core`, and a local attention is a `Core` on one device.
Letters: B batch rows, L tokens of the sequence, l tokens on this rank, H query heads, G key-value heads, D head dim,
E model width, C latent channels, R rows of a modulation table. `q_BlHD` is q with dims (B, l, H, D).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Qkv8:
    """How q, k and v of one attention become e4m3, after norm and rotary; `seqpar.kernels.prepare8` applies it.

        q8 = q R / k_scale,    k8 = (k R - k_centre) k_scale,    v8 = (v - v_centre) v_scale

    R is a Hadamard matrix over the root of its size, which spreads outlier channels and leaves q k^T unchanged. A
    softmax ignores q k_centre^T, and its rows add up to 1, so that attention of q8, k8 and v8 is (out - v_centre)
    v_scale: the local attention needs no scale, and all numbers are fixed before any call.
    k_scale_G: powers of two in fp32. v_scale: one for all heads, so that a product of the output can take it into the
    scale of a row; no power of two. k_centre_GD: fp32. v_centre_GD: in the model's dtype.
    """

    k_scale_G: Tensor
    k_centre_GD: Tensor
    v_scale: float
    v_centre_GD: Tensor


@dataclass(frozen=True)
class Prepare:
    """The norm and rotary embedding of q and k between projection and attention; `seqpar.kernels.prepare` applies it.

    norm: "layer" (LayerNorm with weight and bias) or "rms" (RMSNorm with weight), over the whole width H*D or, if
    `per_head`, over each head; statistics are fp32. Weights are (H*D,), or (D,) if `per_head`; None means none.
    cos_lD2, sin_lD2: rotary rows of this rank's tokens, (l, D/2), or (B, l, D/2) where those of batch rows differ, or
    (B, l, H, D/2) where those of heads differ, too; q and k then have the same number of heads, and B may be 1.
    Rows of R < D/2 numbers rotate the first 2 R channels of each head alone.
    interleaved: whether the rotary pairs are (x[2j], x[2j+1]); otherwise they are (x[j], x[j + R]), with R numbers in a
    rotary row.
    eight: how q, k and v are rounded to 8 bits for attention; None keeps their dtype.
    """

    norm: Literal["none", "layer", "rms"] = "none"
    per_head: bool = False
    eps: float = 1e-5
    q_weight: Tensor | None = None
    q_bias: Tensor | None = None
    k_weight: Tensor | None = None
    k_bias: Tensor | None = None
    cos_lD2: Tensor | None = None
    sin_lD2: Tensor | None = None
    interleaved: bool = True
    eight: Qkv8 | None = None

    def __post_init__(self) -> None:
        if self.norm == "rms" and (self.q_bias is not None or self.k_bias is not None):
            raise ValueError("RMSNorm has no bias, only a weight")

    @property
    def is_identity(self) -> bool:
        return self.norm == "none" and self.cos_lD2 is None and self.eight is None


class Core(Protocol):
    """Attention over the given q, k and v on one device, which strategies distribute.

    q (B, L, H, D), k and v (B, L', G, D) may have any strides with a contiguous last dim, and G divides H. The key mask
    is (B, L') or None (see `Attend`). Returns out (B, L, H, D), of q's dtype or, for e4m3, `output_dtype`, and lse
    (B, H, L), the natural log of the softmax's denominator in fp32 (fp64 for fp64). If all keys of a row are masked,
    out is finite, and lse is -inf or so negative that `merge` gives out a weight of 0.
    """

    def __call__(
        self, q_BLHD: Tensor, k_BLGD: Tensor, v_BLGD: Tensor, mask_BL: Tensor | None = None, /
    ) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True)
class Given:
    """A stream whose q (B, l, H, D), k (B, l, G, D) and v (B, l, G, D) the model has computed itself.

    They may have any strides with a contiguous last dim.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    prepare: Prepare

    @property
    def tokens(self) -> int:
        return self.q.shape[1]


@dataclass(frozen=True)
class Projected:
    """A stream before its QKV projection, so that the strategy can choose between one fused GEMM and three GEMMs.

    x: (B, l, E). weight: ((H + 2 G) D, E), the rows of q, then k, then v. bias: ((H + 2 G) D,) or None.
    heads, kv_heads: H and G.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    heads: int
    kv_heads: int
    prepare: Prepare

    @property
    def tokens(self) -> int:
        return self.x.shape[1]

    def fused(self) -> Tensor:
        """Return q, k and v side by side, (B, l, (H + 2 G) D), by one GEMM."""
        return F.linear(self.x, self.weight, self.bias)

    def part(self, index: int, room_BlHD: Tensor | None = None) -> Tensor:
        """Return q, k or v (0, 1 or 2) by a GEMM of its own, as (B, l, heads, D); room: as for `project`."""
        dim, rows = self.rows(index)
        return project(self.x, self.weight[rows], None if self.bias is None else self.bias[rows], dim, room_BlHD)

    def widened(self, dtype: torch.dtype) -> Projected:
        """Return the stream in another dtype."""
        bias = None if self.bias is None else self.bias.to(dtype)
        return replace(self, x=self.x.to(dtype), weight=self.weight.to(dtype), bias=bias)

    def rows(self, index: int) -> tuple[int, slice]:
        """Return D, and which rows of the weight and the bias make q, k or v."""
        heads = (self.heads, self.kv_heads, self.kv_heads)
        dim = len(self.weight) // sum(heads)
        return dim, slice(sum(heads[:index]) * dim, sum(heads[: index + 1]) * dim)


def project(
    x_BlE: Tensor, weight_FE: Tensor, bias_F: Tensor | None, dim: int, room_BlHD: Tensor | None = None
) -> Tensor:
    """Return x W^T + b as heads, (B, l, F / dim, dim).

    The result is written into `room_BlHD` if that is given and input, weight and room have the same dtype.
    """
    # autocast does not cast for out=, so inputs of mixed dtypes go through F.linear
    if room_BlHD is None or not room_BlHD.dtype == x_BlE.dtype == weight_FE.dtype:
        return F.linear(x_BlE, weight_FE, bias_F).unflatten(-1, (-1, dim))
    # out is a contiguous matrix and the bias is one row, so cuBLAS adds the bias and writes in place without a copy
    rows_RE, out_RF = x_BlE.flatten(0, 1), room_BlHD.view(-1, len(weight_FE))
    if bias_F is None:
        torch.mm(rows_RE, weight_FE.t(), out=out_RF)
    else:
        torch.addmm(bias_F, rows_RE, weight_FE.t(), out=out_RF)
    return room_BlHD


Stream = Given | Projected
"""This rank's tokens of one kind (image, text) as an input of attention, with their own norms and rotary rows."""


class Attend(Protocol):
    """Attention of this rank's tokens to the whole sequence; a model calls it once per block.

    streams: this rank's tokens of each stream, always in the same order; all have the same B, H, G, D and dtype.
    mask_BL: (B, L) bool, True for the keys to attend to, or the same mask as numbers that are added to the scores
    (`seqpar.types.masks.key_bias`, made once per run); None attends to all keys, to padding at another weight if the
    strategy was built so (`JointShard.padding`). Keys of all ranks are in rank order, [t0 i0 t1 i1 ...]: the streams of
    rank 0, then those of rank 1 and so on; or stream after stream, if the strategy was built so
    (`JointShard.by_stream`). `seqpar.types.masks.joined_mask` follows it.

    beside: work of the model that does not read attention's output (the MLP of a parallel block). It is called exactly
    once, between the start of the exchange and the wait for other ranks, so that it overlaps the transfer.

    only: None for attention over all streams. A number is the place of one stream among them: `streams` then holds this
    stream alone, which attends to its own tokens on all ranks (the second attention of a Stable Diffusion 3.5 Medium
    block), and the mask has the keys of this stream, (B, its L), in their order. It needs a token on every rank.

    Returns (B, l, H, D) for each stream; these may be views of a buffer that the next call overwrites.
    """

    tokens: int
    """The number of tokens of the whole sequence, over all ranks and streams."""

    def __call__(
        self,
        streams: Sequence[Stream],
        mask_BL: Tensor | None = None,
        /,
        *,
        beside: Callable[[], None] | None = None,
        only: int | None = None,
    ) -> tuple[Tensor, ...]: ...


def patches_of(x: Tensor, patch: tuple[int, int, int]) -> Tensor:
    """Split (B, C, H, W) or (B, C, T, H, W) into tokens (B, L, C*pt*ph*pw).

    Tokens are in row-major order; the values of a token have the order of a convolution's weight.
    """
    x = x if x.dim() == 5 else x[:, :, None]
    (batch, channels, *size), (pt, ph, pw) = x.shape, patch
    t, h, w = size[0] // pt, size[1] // ph, size[2] // pw
    x = x.reshape(batch, channels, t, pt, h, ph, w, pw).permute(0, 2, 4, 6, 1, 3, 5, 7)
    return x.reshape(batch, t * h * w, channels * pt * ph * pw)


def from_patches(tokens_BLC: Tensor, patch: tuple[int, int, int], size: tuple[int, ...]) -> Tensor:
    """Invert `patches_of`, for any channel count; size: (H, W) or (T, H, W)."""
    (pt, ph, pw), (frames, height, width) = patch, size if len(size) == 3 else (1, *size)
    x = tokens_BLC.reshape(len(tokens_BLC), frames // pt, height // ph, width // pw, -1, pt, ph, pw)
    return x.permute(0, 4, 1, 5, 2, 6, 3, 7).reshape(len(tokens_BLC), -1, *size)


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a model's state, which is not rounded to the model's dtype: fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


def output_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype of attention's output for q, k and v of a dtype: their own, or a wider one for e4m3."""
    if dtype != torch.float8_e4m3fn:
        return dtype
    return torch.bfloat16 if device.type == "cuda" else torch.float32
