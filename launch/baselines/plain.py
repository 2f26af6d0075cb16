"""Plain models to compare the engine with: Large-DiT as published and diffusers' DiT, with random weights."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.transformers.dit_transformer_2d import DiTTransformer2DModel
from torch import Tensor, nn

from launch.baselines.plain_large_dit import PlainLargeDiT
from seqpar.models import large_dit
from seqpar.weights.find import randomise

KEEP, DIRECTION = 0.99, -0.01  # coefficients of a typical DDIM step


def plain_model(config: Any, side: int, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Return diffusers' DiT, or Large-DiT as published, with random weights, for latents of this side."""
    if isinstance(config, large_dit.Config):
        with torch.device("meta"):
            made: nn.Module = PlainLargeDiT(config)
        made = made.to(dtype).to_empty(device=device)
    else:
        with torch.device(device):  # not on meta: the position table is not a parameter
            made = DiTTransformer2DModel(
                config.num_attention_heads,
                config.attention_head_dim,
                config.in_channels,
                config.out_channels,
                config.num_layers,
                sample_size=side,
                patch_size=config.patch_size,
                num_embeds_ada_norm=config.num_classes,
            )
        made = cast(made, dtype)
    randomise(made, 0)
    return made.requires_grad_(False).eval()


def cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast all parameters by torch's own method, because diffusers' own method warns about layers to keep in fp32."""
    return nn.Module.to(model, dtype)


def predict(plain: nn.Module, x_BCHW: Tensor, t_B: Tensor, y_B: Tensor) -> Tensor:
    """Return the model's prediction (B, C_out, H, W), in the model's dtype."""
    x = x_BCHW.to(next(plain.parameters()).dtype)
    if isinstance(plain, PlainLargeDiT):
        return plain(x, t_B, y_B)
    return plain(x, timestep=t_B, class_labels=y_B, return_dict=False)[0]


def guided(out: Tensor, scale: float) -> Tensor:
    """Return u + scale (c - u), classifier-free guidance of two branches in one batch [c, u]."""
    c, u = out.chunk(2)
    return u + scale * (c - u)


def moved(x: Tensor, out: Tensor, scale: float) -> Tensor:
    """Apply guidance and a DDIM update in plain torch, as every step of a bench ends."""
    return KEEP * x + DIRECTION * guided(out, scale)
