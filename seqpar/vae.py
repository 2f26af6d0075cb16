"""Decoding latents on all ranks: each takes some images, one at a time, so that the mesh does not change a bit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from seqpar.comm.point_to_point import gather
from seqpar.mesh import Mesh
from seqpar.shard import Shard


def decode(vae: Any, latents_NCHW: Tensor, mesh: Mesh) -> Tensor:
    """(N, C, h, w) latents -> (N, 3, H, W) in [0, 1], fp32, on every rank. vae: diffusers' AutoencoderKL."""
    shard = Shard(len(latents_NCHW), mesh.world.size)
    mine = latents_NCHW[shard.slice(mesh.world.rank)].to(mesh.device, vae.dtype)
    factor = vae_factor(vae.config)
    shape = (3, latents_NCHW.shape[2] * factor, latents_NCHW.shape[3] * factor)
    images = torch.empty(len(mine), *shape, device=mesh.device)
    shift = getattr(vae.config, "shift_factor", None) or 0.0
    with torch.inference_mode():
        for image, latent in zip(images, mine, strict=True):
            decoded = vae.decode(latent[None] / vae.config.scaling_factor + shift).sample[0]
            image.copy_((decoded.float() / 2 + 0.5).clamp(0, 1))
    return gather(images, mesh.world, shard.sizes) if mesh.world.size > 1 else images


def preview(latents_NCHW: Tensor, factor: int) -> Tensor:
    """(N, 3, H, W) in [0, 1]: the first three latent channels as colours, for models that come without a decoder."""
    colours = latents_NCHW[:, :3].float()
    colours = colours if colours.shape[1] == 3 else colours[:, :1].expand(-1, 3, -1, -1)
    low, high = colours.amin(dim=(1, 2, 3), keepdim=True), colours.amax(dim=(1, 2, 3), keepdim=True)
    scaled = (colours - low) / (high - low).clamp_min(1e-6)
    return scaled.repeat_interleave(factor, dim=2).repeat_interleave(factor, dim=3)


def vae_factor(config: Any) -> int:
    """Pixels a latent pixel covers, along each side."""
    channels = config["block_out_channels"] if isinstance(config, dict) else config.block_out_channels
    return 2 ** (len(channels) - 1)
