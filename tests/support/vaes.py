"""Tiny VAEs with every type of block, and inputs for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import diffusers
import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """A VAE by the name of its class, its config, and shapes: latents and pictures without their rows and columns."""

    cls: str
    config: dict[str, Any]
    latents: tuple[int, ...]
    pictures: tuple[int, ...]
    factor: int
    attributes: tuple[tuple[str, Any], ...] = ()
    timestep: bool = False


_KL = {"down_block_types": ("DownEncoderBlock2D",) * 3, "up_block_types": ("UpDecoderBlock2D",) * 3}
_KL |= {"block_out_channels": (8, 16, 8), "norm_num_groups": 4}
_LTX = {
    **{"latent_channels": 4, "patch_size": 2, "decoder_layers_per_block": (1, 1, 1)},
    **{"decoder_block_out_channels": (8, 16), "decoder_inject_noise": (False,) * 3},
}
_WAN = {"base_dim": 4, "z_dim": 4, "dim_mult": [1, 2, 2], "temperal_downsample": [False, True], "num_res_blocks": 1}
_WAN_22 = {
    **{**_WAN, "decoder_base_dim": 8, "is_residual": True, "in_channels": 12, "out_channels": 12, "patch_size": 2},
    **{"scale_factor_spatial": 8, "scale_factor_temporal": 2},
}
_HUNYUAN = {
    **{"latent_channels": 4, "block_out_channels": (4, 8, 8), "layers_per_block": 1, "norm_num_groups": 4},
    **{"down_block_types": ("HunyuanVideoDownBlock3D",) * 3, "up_block_types": ("HunyuanVideoUpBlock3D",) * 3},
    "spatial_compression_ratio": 4,
}
_LTX_09 = {
    **{**_LTX, "block_out_channels": (8, 16), "down_block_types": ("LTXVideoDownBlock3D",) * 2},
    **{"layers_per_block": (1, 1, 1), "spatio_temporal_scaling": (True, False), "downsample_type": ("conv",) * 2},
    **{
        "decoder_spatio_temporal_scaling": (True, False),
        "upsample_residual": (False,) * 2,
        "upsample_factor": (1,) * 2,
    },
}
_LTX_095 = {
    **{**_LTX, "block_out_channels": (8, 8, 16, 16), "down_block_types": ("LTXVideo095DownBlock3D",) * 3},
    **{"layers_per_block": (1, 1, 1, 1), "spatio_temporal_scaling": (True,) * 3},
    **{"downsample_type": ("spatial", "temporal", "spatiotemporal"), "decoder_spatio_temporal_scaling": (True,) * 2},
    **{"upsample_residual": (True,) * 2, "upsample_factor": (2,) * 2, "timestep_conditioning": True},
    "spatial_compression_ratio": 8,
}
# more frames than this are decoded in parts, which are blended
_PARTS = (("tile_sample_min_num_frames", 8), ("tile_sample_stride_num_frames", 4))
CASES = {
    "kl": Case("AutoencoderKL", _KL, (4,), (3,), 4),
    "flux 2": Case("AutoencoderKLFlux2", {**_KL, "latent_channels": 4}, (4,), (3,), 4),
    "wan": Case("AutoencoderKLWan", {**_WAN, "scale_factor_spatial": 4, "scale_factor_temporal": 2}, (4, 3), (3, 9), 4),
    "wan 2.2": Case("AutoencoderKLWan", _WAN_22, (4, 2), (3, 5), 8),
    "qwen": Case("AutoencoderKLQwenImage", _WAN, (4, 1), (3, 1), 4),
    "hunyuan": Case("AutoencoderKLHunyuanVideo", _HUNYUAN, (4, 4), (3, 9), 4, _PARTS),
    "ltx": Case("AutoencoderKLLTXVideo", _LTX_09, (4, 2), (3, 3), 4),
    "ltx 0.9.5": Case("AutoencoderKLLTXVideo", _LTX_095, (4, 2), (3, 5), 8, timestep=True),
}


def tiny(name: str, dtype: torch.dtype = torch.float64) -> Any:
    """Return the VAE of a case with random weights, the same at every call."""
    case = CASES[name]
    torch.manual_seed(0)
    vae = torch.nn.Module.to(getattr(diffusers, case.cls)(**case.config), dtype).eval()
    for name_, parameter in vae.named_parameters():
        torch.nn.init.normal_(parameter, mean=float("norm" in name_ and "bias" not in name_), std=0.1)
    for key, value in case.attributes:
        assert hasattr(vae, key)
        setattr(vae, key, value)
    return vae


def latents(name: str, batch: int, rows: int, columns: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(rows * 100 + columns)
    return torch.randn(batch, *CASES[name].latents, rows, columns, generator=generator, dtype=torch.float64).to(dtype)


def pictures(name: str, batch: int, rows: int, columns: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return a random picture of so many latent rows and columns."""
    case, generator = CASES[name], torch.Generator().manual_seed(rows * 100 + columns)
    shape = (batch, *case.pictures, rows * case.factor, columns * case.factor)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def extra(name: str, batch: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """Return what else `decode` takes: a timestep for each picture, where the decoder is conditioned on one."""
    return (torch.linspace(0.05, 0.1, batch, dtype=dtype),) if CASES[name].timestep else ()


def decoded(vae: Any, z: Tensor, *args: Any) -> Tensor:
    with torch.no_grad():
        return vae.decode(z, *args).sample


def encoded(vae: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        return vae.encode(x).latent_dist.parameters
