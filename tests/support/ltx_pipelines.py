"""Tiny pipelines of LTX-Video and LTX-2 with random weights; see `tests.support.pipelines`."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.pipelines.ltx2.connectors import LTX2TextConnectors
from diffusers.pipelines.ltx2.vocoder import LTX2Vocoder
from torch import nn

from tests.support.meshes import random
from tests.support.pipelines import HEAD_DIM, HEADS, THEIRS, WIDTH, flow, quiet, random_weights, t5, tokenizer

TOKENS = 16  # of a text, which fills the learned tokens of connectors without a rest


def ltx() -> Any:
    """Return an LTX-Video pipeline, which doubles the batch for guidance, with texts that are padded and masked."""
    transformer = THEIRS.LTXVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=HEADS,
        attention_head_dim=HEAD_DIM,
        cross_attention_dim=HEADS * HEAD_DIM,
        num_layers=2,
        caption_channels=WIDTH,
    )
    vae = THEIRS.AutoencoderKLLTXVideo(
        latent_channels=4,
        patch_size=4,
        block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        down_block_types=("LTXVideoDownBlock3D",) * 2,
        layers_per_block=(1,) * 3,
        decoder_layers_per_block=(1,) * 3,
        spatio_temporal_scaling=(True, False),
        decoder_spatio_temporal_scaling=(True, False),
        decoder_inject_noise=(False,) * 3,
        downsample_type=("conv",) * 2,
        upsample_residual=(False,) * 2,
        upsample_factor=(1,) * 2,
    )
    parts = {"tokenizer": tokenizer(16), "text_encoder": t5(3), "vae": random_weights(vae, 1)}
    return quiet(THEIRS.LTXPipeline(**parts, transformer=random_weights(transformer, 5), scheduler=flow()))


def ltx2() -> Any:
    """Return a pipeline of LTX-2.3, for prompts that are given as embeddings (`LTX2_TEXTS`)."""
    parts = {"transformer": _transformer(), "connectors": _connectors(), "vae": _video_vae(), **_sound()}
    seeded = {name: random_weights(part, seed) for seed, (name, part) in enumerate(parts.items())}
    return quiet(THEIRS.LTX2Pipeline(**seeded, text_encoder=None, tokenizer=None, scheduler=flow()))


LTX2_TEXTS = {
    f"{name}prompt_{what}": value
    for seed, name in enumerate(("", "negative_"))
    for what, value in {
        "embeds": random((1, TOKENS, 2 * WIDTH), seed),
        "attention_mask": (torch.arange(TOKENS) >= 9 + 3 * seed)[None].long(),  # padding comes first
    }.items()
}


def _transformer() -> nn.Module:
    both = {
        "out_channels": 4,
        "num_attention_heads": HEADS,
        "attention_head_dim": HEAD_DIM,
        "cross_attention_dim": HEADS * HEAD_DIM,
        "gated_attn": True,
        "cross_attn_mod": True,
    }
    return THEIRS.LTX2VideoTransformer3DModel(
        **{f"{name}{key}": value for name in ("", "audio_") for key, value in both.items()},
        in_channels=4,
        audio_in_channels=4,
        num_layers=2,
        rope_type="split",
        use_prompt_embeddings=False,
        perturbed_attn=True,
    )


def _connectors() -> nn.Module:
    sizes = {"num_attention_heads": HEADS, "attention_head_dim": HEAD_DIM, "num_layers": 1}
    both: dict[str, Any] = {**sizes, "num_learnable_registers": 8}
    return LTX2TextConnectors(
        **{f"{name}_connector_{key}": value for name in ("video", "audio") for key, value in both.items()},
        caption_channels=WIDTH,
        text_proj_in_factor=2,
        per_modality_projections=True,
        video_hidden_dim=HEADS * HEAD_DIM,
        audio_hidden_dim=HEADS * HEAD_DIM,
        rope_type="split",
    )


def _video_vae() -> nn.Module:
    return THEIRS.AutoencoderKLLTX2Video(
        latent_channels=4,
        block_out_channels=(8,),
        down_block_types=("LTX2VideoDownBlock3D",),
        decoder_block_out_channels=(8,),
        layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1),
        spatio_temporal_scaling=(True,),
        decoder_spatio_temporal_scaling=(True,),
        decoder_inject_noise=(False, False),
        downsample_type=("spatial",),
        upsample_type=("spatial",),
        upsample_residual=(False,),
        upsample_factor=(1,),
        patch_size=4,
    )


def _sound() -> dict[str, nn.Module]:
    """Return the autoencoder of the sound's spectrograms, and what makes waves of these."""
    vae = THEIRS.AutoencoderKLLTX2Audio(
        base_channels=4, ch_mult=(1,), num_res_blocks=1, latent_channels=2, resolution=16, mel_bins=8
    )
    vocoder = LTX2Vocoder(
        in_channels=8,
        hidden_channels=8,
        upsample_kernel_sizes=[4],
        upsample_factors=[2],
        resnet_kernel_sizes=[3],
        resnet_dilations=[[1]],
    )
    return {"audio_vae": vae, "vocoder": vocoder}
