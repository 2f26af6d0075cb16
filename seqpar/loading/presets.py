"""Pipelines of diffusers by name, with the sizes at which they were published: for plans, and to test a machine.

Their weights and the texts of their prompts are random numbers. Nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

OF_MODELS = (  # names of the presets of `seqpar.loop.models`, whose files hold their sizes
    *(f"dit-{size}/{patch}" for size in ("s", "b", "l", "xl") for patch in (2, 4, 8)),
    *(f"large-dit-{size}" for size in ("600m", "3b", "7b")),
    *(f"unidiffuser-v{number}" for number in (0, 1)),
)


@dataclass(frozen=True)
class Preset:
    """A pipeline of diffusers, by the names of its class and of those of its parts, with their configs.

    texts: argument of the pipeline's call -> shape of what stands there for an encoded prompt.
    """

    name: str
    pipeline: str
    parts: Mapping[str, tuple[str, Mapping[str, Any]]]
    texts: Mapping[str, tuple[int, ...]]

    @property
    def index(self) -> dict[str, Any]:
        """Return what the pipeline's model_index.json says of its parts."""
        parts = {name: ["diffusers", kind] for name, (kind, _) in self.parts.items()}
        return {"_class_name": self.pipeline, **parts}

    def encoded(self, count: int, seed: int) -> dict[str, Tensor]:
        """Return random numbers in place of so many encoded prompts, in fp32; the same on every rank."""
        generator = torch.Generator().manual_seed(seed)
        return {name: torch.randn(count, *shape, generator=generator) for name, shape in self.texts.items()}


FLUX: Mapping[str, Any] = {
    "patch_size": 1,
    "in_channels": 64,
    "num_layers": 19,
    "num_single_layers": 38,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 4096,
    "pooled_projection_dim": 768,
    "axes_dims_rope": (16, 56, 56),
}
FLUX_VAE: Mapping[str, Any] = {
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "block_out_channels": (128, 256, 512, 512),
    "layers_per_block": 2,
    "latent_channels": 16,
    "sample_size": 1024,
    "scaling_factor": 0.3611,
    "shift_factor": 0.1159,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}


def _flux(name: str, guidance_embeds: bool) -> Preset:
    """Return FLUX.1-dev, which takes the guidance scale as an input and shifts its sigmas by size, or schnell."""
    transformer = {**FLUX, "guidance_embeds": guidance_embeds}
    scheduler = {"shift": 3.0 if guidance_embeds else 1.0, "use_dynamic_shifting": guidance_embeds}
    parts = {
        "transformer": ("FluxTransformer2DModel", transformer),
        "vae": ("AutoencoderKL", FLUX_VAE),
        "scheduler": ("FlowMatchEulerDiscreteScheduler", scheduler),
    }
    texts = {"prompt_embeds": (512, FLUX["joint_attention_dim"])}
    return Preset(name, "FluxPipeline", parts, texts | {"pooled_prompt_embeds": (FLUX["pooled_projection_dim"],)})


PRESETS = {name: _flux(name, embeds) for name, embeds in (("FLUX.1-dev", True), ("FLUX.1-schnell", False))}
