"""Large-DiT as its authors wrote it: separate projections, complex rotary, adaLN inside each block, nothing fused.

Parameters have the names of the original state dict.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqpar.loop.models._label_dit import FREQUENCIES
from seqpar.loop.models.large_dit import Config


class PlainAttention(nn.Module):
    """Attention with wq, wk, wv, wo without bias, LayerNorm of q and k over all heads, and complex rotary in fp32."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.dim = config.attention_head_dim
        self.wq = nn.Linear(config.width, config.width, bias=False)
        self.wk = nn.Linear(config.width, self.kv_heads * self.dim, bias=False)
        self.wv = nn.Linear(config.width, self.kv_heads * self.dim, bias=False)
        self.wo = nn.Linear(config.width, config.width, bias=False)
        self.q_norm = nn.LayerNorm(config.width) if config.qk_norm else nn.Identity()
        self.k_norm = nn.LayerNorm(self.kv_heads * self.dim) if config.qk_norm else nn.Identity()

    def forward(self, x: Tensor, turns_LD: Tensor) -> Tensor:
        q = rotate(self.q_norm(self.wq(x)).unflatten(-1, (self.heads, self.dim)), turns_LD)
        k = rotate(self.k_norm(self.wk(x)).unflatten(-1, (self.kv_heads, self.dim)), turns_LD)
        v = self.wv(x).unflatten(-1, (self.kv_heads, self.dim))
        if self.kv_heads < self.heads:
            k, v = (y.repeat_interleave(self.heads // self.kv_heads, dim=2) for y in (k, v))
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return self.wo(out.transpose(1, 2).flatten(2))


class PlainFeedForward(nn.Module):
    """SwiGLU feed-forward w2(silu(w1 x) * w3 x) without bias."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.width, config.feed_forward, bias=False)
        self.w2 = nn.Linear(config.feed_forward, config.width, bias=False)
        self.w3 = nn.Linear(config.width, config.feed_forward, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class PlainBlock(nn.Module):
    """Transformer block that computes its adaLN modulation from the condition in every step."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention = PlainAttention(config)
        self.feed_forward = PlainFeedForward(config)
        self.attention_norm, self.ffn_norm = (nn.RMSNorm(config.width, eps=config.norm_eps) for _ in range(2))
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(config.condition_width, 6 * config.width))

    def forward(self, x: Tensor, c: Tensor, turns_LD: Tensor) -> Tensor:
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = self.adaLN_modulation(c)[:, None].chunk(6, dim=-1)
        x = x + gate * self.attention(self.attention_norm(x) * (1 + scale) + shift, turns_LD)
        return x + gate_mlp * self.feed_forward(self.ffn_norm(x) * (1 + scale_mlp) + shift_mlp)


class PlainFinal(nn.Module):
    """Final layer: LayerNorm without weights, modulation, projection to (ph, pw, C)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm_final = nn.LayerNorm(config.width, elementwise_affine=False, eps=1e-6)
        self.linear = nn.Linear(config.width, config.patch_size**2 * config.out_channels)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(config.condition_width, 2 * config.width))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift, scale = self.adaLN_modulation(c)[:, None].chunk(2, dim=-1)
        return self.linear(self.norm_final(x) * (1 + scale) + shift)


class PlainTimestep(nn.Module):
    """Timestep embedding: sinusoid [cos, sin] in fp32, then an MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(FREQUENCIES, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, t: Tensor) -> Tensor:
        half = FREQUENCIES // 2
        freqs = torch.exp(-math.log(10000) * torch.arange(half, dtype=torch.float32, device=t.device) / half)
        angles = t.float()[:, None] * freqs
        dtype = next(self.mlp.parameters()).dtype
        return self.mlp(torch.cat((angles.cos(), angles.sin()), dim=-1).to(dtype))


class PlainLargeDiT(nn.Module):
    """The model: latents (B, C, H, W), timesteps (B,) and labels (B,) -> (B, C_out, H, W)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.x_embedder = nn.Linear(config.patch_size**2 * config.in_channels, config.width)
        self.t_embedder = PlainTimestep(config.condition_width)
        self.y_embedder = nn.ModuleDict(
            {"embedding_table": nn.Embedding(config.num_classes + 1, config.condition_width)}
        )
        self.layers = nn.ModuleList(PlainBlock(config) for _ in range(config.num_layers))
        self.final_layer = PlainFinal(config)

    def forward(self, x_BCHW: Tensor, t_B: Tensor, y_B: Tensor) -> Tensor:
        (batch, _, height, width), p = x_BCHW.shape, self.config.patch_size
        # a token is ordered (C, ph, pw), a prediction (ph, pw, C_out)
        patches = x_BCHW.view(batch, -1, height // p, p, width // p, p).permute(0, 2, 4, 1, 3, 5)
        x = self.x_embedder(patches.flatten(3).flatten(1, 2))
        c = self.t_embedder(t_B) + self.y_embedder["embedding_table"](y_B)
        freqs = rotary(x.shape[1], self.config.attention_head_dim, x.device)
        for layer in self.layers:
            x = layer(x, c, freqs)
        out = self.final_layer(x, c).view(batch, height // p, width // p, p, p, -1)
        return out.permute(0, 5, 1, 3, 2, 4).reshape(batch, -1, height, width)


def rotary(length: int, dim: int, device: torch.device) -> Tensor:
    """The complex table (L, D/2) of the raster index times each frequency, in fp32 from the CPU."""
    freqs = 1.0 / 10000.0 ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), freqs)
    return torch.polar(torch.ones_like(angles), angles).to(device)


def rotate(x_BLHD: Tensor, turns_LD: Tensor) -> Tensor:
    """Rotate neighbouring pairs as complex numbers in fp32 (in fp64 for fp64)."""
    wide = torch.promote_types(x_BLHD.dtype, torch.float32)
    pairs = torch.view_as_complex(x_BLHD.to(wide).unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns_LD[:, None]).flatten(-2).to(x_BLHD.dtype)
