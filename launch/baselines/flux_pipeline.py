"""diffusers' FLUX.1-dev pipeline with every part at its released size and random weights, made from configs alone.

The tokenizers are generated: each letter is a token. Nothing is read or downloaded, so a picture's time can be measured
on a machine without the checkpoint; the picture itself means nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from string import printable
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from torch import Tensor

from launch.baselines.released import randomise

STEPS = 28
GUIDANCE = 3.5
SPECIAL = ("<pad>", "<unk>", "<eos>")
CLIP: Mapping[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "projection_dim": 768,
    "max_position_embeddings": 77,
    "vocab_size": 49408,
}
T5: Mapping[str, Any] = {
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_layers": 24,
    "num_heads": 64,
    "feed_forward_proj": "gated-gelu",
    "vocab_size": 32128,
}
VAE: Mapping[str, Any] = {  # nothing of `seqpar` is imported here: `compare` uses this file with other versions of it
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
SCHEDULER: Mapping[str, Any] = {
    "shift": 3.0,
    "use_dynamic_shifting": True,
    "base_shift": 0.5,
    "max_shift": 1.15,
    "base_image_seq_len": 256,
    "max_image_seq_len": 4096,
}


@dataclass(frozen=True)
class Sizes:
    """The configs of the parts besides the transformer; those of FLUX.1-dev if none are given."""

    clip: Mapping[str, Any] = field(default_factory=lambda: CLIP)
    t5: Mapping[str, Any] = field(default_factory=lambda: T5)
    vae: Mapping[str, Any] = field(default_factory=lambda: VAE)


SMALL = Sizes(
    {
        **CLIP,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 110,
    },
    {"d_model": 12, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 110},
    {**VAE, "block_out_channels": (4, 4, 4, 4), "latent_channels": 4, "norm_num_groups": 2},
)
"""The sizes of a pipeline around `Released.small()` of FLUX.1, for a CPU."""


def tokenizer(length: int) -> Any:
    """Return a tokenizer whose tokens are letters, for texts of up to `length` tokens with <eos> at the end."""
    import transformers  # here, because other benches run without it
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors

    words = {letter: index for index, letter in enumerate((*SPECIAL, *printable))}
    made = Tokenizer(models.WordLevel(words, unk_token=SPECIAL[1]))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    made.post_processor = processors.TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", words["<eos>"])])
    names = dict(zip(("pad_token", "unk_token", "eos_token"), SPECIAL, strict=True))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=length, **names)


def randomised(parts: Sequence[Any], dtype: torch.dtype) -> list[Any]:
    """Return modules in a dtype with random weights."""
    modules = [part.to(dtype).eval().requires_grad_(False) for part in parts]
    for seed, module in enumerate(modules, start=1):
        randomise(module, seed)
    return modules


def pipeline(transformer: Any, dtype: torch.dtype, device: torch.device, sizes: Sizes | None = None) -> Any:
    """Return diffusers' FluxPipeline around a transformer, with random weights made on the device."""
    import transformers  # here, because other benches run without it
    from diffusers.pipelines.flux.pipeline_flux import FluxPipeline

    sizes = sizes or Sizes()
    ends: dict[str, Any] = {"eos_token_id": SPECIAL.index("<eos>"), "pad_token_id": 0, "bos_token_id": 1}
    torch.manual_seed(0)
    with torch.device(device):  # positions and other buffers are made, too
        clip = transformers.CLIPTextModel(transformers.CLIPTextConfig(**{**sizes.clip, **ends}))
        t5 = transformers.T5EncoderModel(transformers.T5Config(**sizes.t5))
        vae = AutoencoderKL(**sizes.vae)
    parts = randomised([clip, t5, vae], dtype)
    made = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(**SCHEDULER),
        vae=parts[2],
        text_encoder=parts[0],
        tokenizer=tokenizer(sizes.clip["max_position_embeddings"]),
        text_encoder_2=parts[1],
        tokenizer_2=tokenizer(512),
        transformer=transformer,
    )
    made.set_progress_bar_config(disable=True)
    return made


def encoded(pipe: Any, prompt: str, length: int) -> dict[str, Any]:
    """Return the arguments of a call of the pipeline: `length` tokens of text, its pooled vector, and guidance."""
    text, pooled, _ = pipe.encode_prompt(prompt, None, device=pipe.transformer.device, max_sequence_length=length)
    return {"prompt_embeds": text, "pooled_prompt_embeds": pooled, "guidance_scale": GUIDANCE}


def decoded(pipe: Any, packed: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the picture (1, 3, H, W) of the pipeline's latents, and these (1, C, h, w), as the pipeline does."""
    latents, config = pipe._unpack_latents(packed, size, size, pipe.vae_scale_factor), pipe.vae.config
    scaled = latents / config.scaling_factor + config.shift_factor
    return pipe.vae.decode(scaled, return_dict=False)[0], latents
