"""diffusers' Qwen-Image pipeline with every part at its released size and random weights, made from configs alone.

The tokenizer is generated: each letter is a token, also of the template around a prompt. See `flux_pipeline.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import AutoencoderKLQwenImage
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from torch import Tensor

from launch.baselines.flux_pipeline import randomised, tokenizer

STEPS = 50
GUIDANCE = 4.0
TEXT: Mapping[str, Any] = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
}
VISION: Mapping[str, Any] = {"depth": 1, "hidden_size": 1280, "out_hidden_size": 3584}  # no picture is read
SCHEDULER: Mapping[str, Any] = {
    "shift": 1.0,
    "use_dynamic_shifting": True,
    "base_shift": 0.5,
    "max_shift": 0.9,
    "base_image_seq_len": 256,
    "max_image_seq_len": 8192,
    "shift_terminal": 0.02,
    "time_shift_type": "exponential",
}


@dataclass(frozen=True)
class Sizes:
    """The configs of the parts besides the transformer; those of Qwen-Image if none are given."""

    text: Mapping[str, Any] = field(default_factory=lambda: TEXT)
    vision: Mapping[str, Any] = field(default_factory=lambda: VISION)
    vae: Mapping[str, Any] = field(default_factory=dict)


SMALL = Sizes(
    {
        **TEXT,
        "hidden_size": 12,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "vocab_size": 110,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 2, 2]},
    },
    {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 12},
    {"base_dim": 4, "z_dim": 4, "latents_mean": [0.0] * 4, "latents_std": [1.0] * 4},
)
"""The sizes of a pipeline around `Released.small()` of Qwen-Image, for a CPU."""


def pipeline(transformer: Any, dtype: torch.dtype, device: torch.device, sizes: Sizes | None = None) -> Any:
    """Return diffusers' QwenImagePipeline around a transformer, with random weights made on the device."""
    import transformers  # here, because other benches run without it
    from diffusers.pipelines.qwenimage.pipeline_qwenimage import QwenImagePipeline

    sizes = sizes or Sizes()
    config = transformers.Qwen2_5_VLConfig(text_config={**sizes.text}, vision_config={**sizes.vision})
    torch.manual_seed(0)
    with torch.device(device):  # positions and other buffers are made, too
        text = transformers.Qwen2_5_VLForConditionalGeneration(config)
        vae = AutoencoderKLQwenImage(**sizes.vae)
    parts = randomised([text, vae], dtype)
    made = QwenImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(**SCHEDULER),
        vae=parts[1],
        text_encoder=parts[0],
        tokenizer=tokenizer(1024),
        transformer=transformer,
    )
    made.set_progress_bar_config(disable=True)
    return made


def encoded(pipe: Any, prompt: str, length: int) -> dict[str, Any]:
    """Return the arguments of a call of the pipeline: both texts of guidance, of at most `length` tokens."""
    arguments = {"true_cfg_scale": GUIDANCE}
    for before, text in (("", prompt), ("negative_", " ")):
        embeds, mask = pipe.encode_prompt(text, device=pipe.transformer.device, max_sequence_length=length)
        arguments |= {f"{before}prompt_embeds": embeds, f"{before}prompt_embeds_mask": mask}
    return arguments


def decoded(pipe: Any, packed: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the picture (1, 3, H, W) of the pipeline's latents, and these (1, C, 1, h, w), as the pipeline does."""
    latents, config = pipe._unpack_latents(packed, size, size, pipe.vae_scale_factor), pipe.vae.config
    mean, std = (torch.tensor(x).view(1, -1, 1, 1, 1).to(latents) for x in (config.latents_mean, config.latents_std))
    return pipe.vae.decode(latents * std + mean, return_dict=False)[0][:, :, 0], latents
