"""diffusers' decoders (VAEs) at their released sizes with random weights, made from configs alone, and smooth latents.

Nothing is read or downloaded, so a decoder's time, memory and error can be measured on a machine without checkpoints.
Random weights keep the variance of their input from layer to layer, so that rounding errors are of a usual size. The
latents are smooth like those of pictures: a seam between strips or tiles stands out against them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import diffusers
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from launch.baselines.pipelines import VAE

NARROW = (8, 8, 8, 8)
DETAIL = 0.1  # standard deviation of the latents' noise beside their low frequencies
WAVE = 8  # latent pixels (and frames) between the random values of the low frequencies


@dataclass(frozen=True)
class Decoder:
    """A decoder of diffusers.

    factor: pixels along each side of a latent pixel. channels: those of the latent. frames: frames of a latent frame
    after the first one, 1 for a decoder of pictures whose latents have frames, None for latents without frames.
    narrow: what makes the config tiny, for tests on a CPU.
    """

    kind: str
    config: Mapping[str, Any]
    narrow: Mapping[str, Any]
    factor: int
    channels: int
    frames: int | None = None

    @property
    def video(self) -> bool:
        return self.frames is not None and self.frames > 1

    def build(self, dtype: torch.dtype, device: torch.device, tiny: bool = False) -> Any:
        """Return the decoder with random weights, the same on every rank of one type of device."""
        kind: Any = getattr(diffusers, self.kind)
        with torch.device(device):
            made = kind(**{**self.config, **(self.narrow if tiny else {})}).eval().requires_grad_(False)
        nn.Module.to(made, dtype)  # diffusers' own `to` warns about modules that stay in fp32, of which there are none
        randomise(made, 1)
        return made

    def shape(self, size: tuple[int, int], frames: int) -> tuple[int, ...]:
        """Return the shape of the latents of a picture or video of (height, width) pixels, rounded down."""
        sides = tuple(side // self.factor for side in size)
        return 1, self.channels, *(() if self.frames is None else (self.latent_frames(frames),)), *sides

    def latent_frames(self, frames: int) -> int:
        return (frames - 1) // self.frames + 1 if self.video and self.frames else 1


DECODERS: Mapping[str, Decoder] = {
    "kl": Decoder("AutoencoderKL", VAE, {"block_out_channels": NARROW, "norm_num_groups": 4, "sample_size": 64}, 8, 16),
    "qwen": Decoder("AutoencoderKLQwenImage", {}, {"base_dim": 8, "dim_mult": [1, 1, 1, 1]}, 8, 16, 1),
    "wan": Decoder("AutoencoderKLWan", {}, {"base_dim": 8, "dim_mult": [1, 1, 1, 1]}, 8, 16, 4),
}


def randomise(model: nn.Module, seed: int) -> None:
    """Set matrices and kernels that keep the variance of their input, norm weights of one and zero biases."""
    generator = torch.Generator(next(model.parameters()).device).manual_seed(seed)
    for name, weight in model.named_parameters():
        if name.endswith(".gamma") or weight.dim() == 1:  # Wan's and Qwen's norms have weights with several dims
            nn.init.constant_(weight, 0.0 if name.endswith("bias") else 1.0)
        else:
            nn.init.normal_(weight, std=math.prod(weight.shape[1:]) ** -0.5, generator=generator)


def latents(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Return smooth random latents of variance one in fp32 in host memory, the same on every rank.

    shape: (1, C, h, w) or (1, C, T, h, w).
    """
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn(*shape[:2], *(side // WAVE + 2 for side in shape[2:]), generator=generator)
    smooth = F.interpolate(coarse, shape[2:], mode="bilinear" if len(shape) == 4 else "trilinear", align_corners=True)
    return smooth / smooth.std() + DETAIL * torch.randn(shape, generator=generator)
