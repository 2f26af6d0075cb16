# pyright: reportArgumentType=false, reportCallIssue=false
"""A complete tiny FLUX.1 pipeline with random weights and generated tokenizers, as diffusers writes and loads it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn

HEADS, HEAD_DIM = 5, 16
TEXT_WIDTH, POOLED_WIDTH, LATENTS = 24, 16, 4
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,"


def flux_folder(path: Path, *, guidance: bool = True, shifting: bool = True) -> Path:
    """Write the folder and return its path. guidance: whether the transformer takes the scale as an input (dev)."""
    logging.getLogger("diffusers").setLevel(logging.ERROR)
    flux_pipeline(guidance=guidance, shifting=shifting).save_pretrained(path)
    return path


def flux_pipeline(*, guidance: bool = True, shifting: bool = True) -> Any:
    """Return diffusers' FluxPipeline in fp32: 2 double and 2 single blocks, 5 heads, pixels 4 times the latent's."""
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
    from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
    from diffusers.pipelines.flux.pipeline_flux import FluxPipeline
    from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler

    transformer = FluxTransformer2DModel(
        in_channels=4 * LATENTS,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=HEAD_DIM,
        num_attention_heads=HEADS,
        joint_attention_dim=TEXT_WIDTH,
        pooled_projection_dim=POOLED_WIDTH,
        guidance_embeds=guidance,
        axes_dims_rope=(4, 6, 6),
    )
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(8, 8, 8),
        norm_num_groups=4,
        latent_channels=LATENTS,
        use_quant_conv=False,
        use_post_quant_conv=False,
        scaling_factor=0.36,
        shift_factor=0.12,
    )
    clip, t5 = encoders()
    for seed, part in enumerate((transformer, vae, clip, t5)):
        _randomise(part, seed)
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0 if shifting else 1.0, use_dynamic_shifting=shifting)
    first, second = tokenizers()
    return FluxPipeline(scheduler, vae, clip, first, t5, second, transformer)


def encoders() -> tuple[nn.Module, nn.Module]:
    """Return a tiny CLIP text model and T5 encoder for the vocabularies of `tokenizers`."""
    from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

    first, second = tokenizers()
    sizes = {"hidden_size": POOLED_WIDTH, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    ends = {"bos_token_id": first.bos_token_id, "eos_token_id": first.eos_token_id, "pad_token_id": first.pad_token_id}
    clip = CLIPTextModel(CLIPTextConfig(vocab_size=len(first), max_position_embeddings=20, **sizes, **ends))
    t5 = T5EncoderModel(
        T5Config(vocab_size=len(second), d_model=TEXT_WIDTH, d_kv=8, d_ff=32, num_layers=2, num_heads=3)
    )
    return clip.eval(), t5.eval()


def tokenizers() -> tuple[Any, Any]:
    """Return a CLIP and a T5 tokenizer of single letters."""
    from transformers import CLIPTokenizer, T5TokenizerFast

    words = ["<|startoftext|>", "<|endoftext|>", *LETTERS, *(f"{letter}</w>" for letter in LETTERS)]
    first = CLIPTokenizer(vocab={word: index for index, word in enumerate(words)}, merges=[], model_max_length=20)
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -2.0), *((letter, -3.0) for letter in LETTERS)]
    return first, T5TokenizerFast(vocab=pieces, extra_ids=0, model_max_length=512)


def _randomise(module: nn.Module, seed: int) -> None:
    """Set weights that are large enough for every part of the input to count."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=1.0 / parameter[0].numel() ** 0.5, generator=generator)
        elif name.endswith("bias"):
            nn.init.normal_(parameter, std=0.1, generator=generator)
        else:
            nn.init.normal_(parameter, mean=1.0, std=0.1, generator=generator)
    module.requires_grad_(False).eval()
