"""Large-DiT as its authors wrote it: separate projections, complex rotary, adaLN inside each block, nothing fused.

Tests compare with it: parameters have names of the original state dict, and the arithmetic is that of the published
model, module by module, in the model's own dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqpar.loop.models._label_dit import FREQUENCIES
from seqpar.loop.models.large_dit import CONDITION, Config


class PlainAttention(nn.Module):
    """Attention with wq, wk, wv, wo without bias, LayerNorm of q and k over all heads, and complex rotary in fp32."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.attention_head_dim,
        )
        self.wq = nn.Linear(config.width, config.width, bias=False)
        self.wk = nn.Linear(config.width, self.kv_heads * self.dim, bias=False)
        self.wv = nn.Linear(config.width, self.kv_heads * self.dim, bias=False)
        self.wo = nn.Linear(config.width, config.width, bias=False)
        self.q_norm = nn.LayerNorm(config.width) if config.qk_norm else nn.Identity()
        self.k_norm = nn.LayerNorm(self.kv_heads * self.dim) if config.qk_norm else nn.Identity()
        self.core: Callable[[Tensor, Tensor, Tensor], Tensor] = attend

    def forward(self, x: Tensor, freqs_LD2: Tensor) -> Tensor:
        q = rotate(self.q_norm(self.wq(x)).unflatten(-1, (self.heads, self.dim)), freqs_LD2)
        k = rotate(self.k_norm(self.wk(x)).unflatten(-1, (self.kv_heads, self.dim)), freqs_LD2)
        v = self.wv(x).unflatten(-1, (self.kv_heads, self.dim))
        if self.kv_heads < self.heads:
            k, v = (y.repeat_interleave(self.heads // self.kv_heads, dim=2) for y in (k, v))
        return self.wo(self.core(q, k, v).flatten(2))


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

    def forward(self, x: Tensor, c: Tensor, freqs_LD2: Tensor) -> Tensor:
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = self.adaLN_modulation(c)[:, None].chunk(6, dim=-1)
        x = x + gate * self.attention(self.attention_norm(x) * (1 + scale) + shift, freqs_LD2)
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


class PlainLabel(nn.Module):
    """Label embedding: one row for each class, and one for the null class."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embedding_table = nn.Embedding(config.num_classes + 1, min(config.width, CONDITION))


class PlainLargeDiT(nn.Module):
    """The model: latents (B, C, H, W), timesteps (B,) and labels (B,) -> (B, C_out, H, W)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.x_embedder = nn.Linear(config.patch_size**2 * config.in_channels, config.width)
        self.t_embedder = PlainTimestep(config.condition_width)
        self.y_embedder = PlainLabel(config)
        self.layers = nn.ModuleList(PlainBlock(config) for _ in range(config.num_layers))
        self.final_layer = PlainFinal(config)

    def forward(self, x_BCHW: Tensor, t_B: Tensor, y_B: Tensor) -> Tensor:
        (batch, channels, height, width), p = x_BCHW.shape, self.config.patch_size
        x = (
            x_BCHW.view(batch, channels, height // p, p, width // p, p)
            .permute(0, 2, 4, 1, 3, 5)
            .flatten(3)
            .flatten(1, 2)
        )
        freqs = rotary(x.shape[1], self.config.attention_head_dim, x.device)
        out = self.forward_tokens(x, freqs, t_B, y_B).view(batch, height // p, width // p, p, p, -1)
        return out.permute(0, 5, 1, 3, 2, 4).reshape(batch, -1, height, width)

    def forward_tokens(self, tokens_BLC: Tensor, freqs_LD2: Tensor, t_B: Tensor, y_B: Tensor) -> Tensor:
        """Return predictions of tokens; a token is ordered (C, ph, pw), a prediction (ph, pw, C_out)."""
        x = self.x_embedder(tokens_BLC)
        c = self.t_embedder(t_B) + self.y_embedder.embedding_table(y_B)
        for layer in self.layers:
            x = layer(x, c, freqs_LD2)
        return self.final_layer(x, c)


def attend(q_BLHD: Tensor, k_BLHD: Tensor, v_BLHD: Tensor) -> Tensor:
    """Return attention by torch's scaled_dot_product_attention."""
    q, k, v = (x.transpose(1, 2) for x in (q_BLHD, k_BLHD, v_BLHD))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


@torch.compiler.assume_constant_result  # compilers do not know complex numbers
def rotary(length: int, dim: int, device: torch.device) -> Tensor:
    """Return the rotary table (L, D/2, 2): cosine and sine of the raster index times each frequency, from the CPU."""
    freqs = 1.0 / 10000.0 ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), freqs)
    return torch.view_as_real(torch.polar(torch.ones_like(angles), angles)).to(device)


def rotate(x_BLHD: Tensor, freqs_LD2: Tensor) -> Tensor:
    """Rotate neighbouring pairs as complex numbers in fp32 (in fp64 for fp64).

    Under torch.compile it uses real numbers, as users write it there, because inductor does not fuse complex ones.
    """
    wide = torch.promote_types(x_BLHD.dtype, torch.float32)
    pairs, turns = x_BLHD.to(wide).unflatten(-1, (-1, 2)), freqs_LD2[:, None]
    if torch.compiler.is_compiling():
        (a, b), (cos, sin) = pairs.unbind(-1), turns.unbind(-1)
        turned = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1)
    else:
        turned = torch.view_as_real(torch.view_as_complex(pairs) * torch.view_as_complex(turns))
    return turned.flatten(-2).to(x_BLHD.dtype)
