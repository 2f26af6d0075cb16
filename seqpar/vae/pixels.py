"""Latents as a VAE takes them, and images from its output."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def scaled(config: Any, latents_NCHW: Tensor) -> Tensor:
    """Scale a model's latents for the VAE with this config."""
    return latents_NCHW / config.scaling_factor + (getattr(config, "shift_factor", None) or 0.0)


def in_range(decoded_3HW: Tensor) -> Tensor:
    """Return a decoded image in [0, 1], fp32; infinite values become NaN."""
    values = decoded_3HW.float()
    # where a value is infinite, the difference is NaN, which no clamp hides
    return (values / 2 + 0.5).clamp(0, 1) + (values - values)


def check_finite(images_N3HW: Tensor, dtype: torch.dtype) -> None:
    """Raise FloatingPointError if images hold NaN, which a file would show as black. dtype: the decoder's."""
    bad = (~images_N3HW.isfinite().all(dim=3).all(dim=2).all(dim=1)).nonzero().flatten().tolist()
    if bad:
        raise FloatingPointError(
            f"the decoder made pixels that are not finite in {len(bad)} of {len(images_N3HW)} images (the first is "
            f"image {bad[0] + 1}) in {str(dtype).removeprefix('torch.')}; try dtype fp32 or bf16, or check the "
            f"decoder's weights and scaling_factor"
        )


def preview(latents_NCHW: Tensor, factor: int) -> Tensor:
    """Return images (N, 3, H, W) in [0, 1] of the first three latent channels, for models without a decoder."""
    colours = latents_NCHW[:, :3].float()
    colours = colours if colours.shape[1] == 3 else colours[:, :1].expand(-1, 3, -1, -1)
    low, high = colours.amin(dim=(1, 2, 3), keepdim=True), colours.amax(dim=(1, 2, 3), keepdim=True)
    scaled = (colours - low) / (high - low).clamp_min(1e-6)
    return scaled.repeat_interleave(factor, dim=2).repeat_interleave(factor, dim=3)
