"""diffusers' UniDiffuser pipeline with the parts that text-to-image runs at their released sizes and random weights.

Everything is made from configs on the device; the tokenizers are generated, nothing is read or downloaded. The parts
that text-to-image does not run (the blocks of the caption decoder, the image encoder) are small.
Beside it: its model with both guidance branches in one batch, as users of diffusers write it by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy, deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.schedulers.scheduling_dpmsolver_multistep import DPMSolverMultistepScheduler
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor, nn

from launch.baselines.flux_pipeline import CLIP, SPECIAL, VAE, tokenizer
from seqpar.weights.find import randomise

NOISE = 1000  # the timestep of a modality that is noise
UVIT: Mapping[str, Any] = {
    "text_dim": 64,
    "clip_img_dim": 512,
    "num_text_tokens": 77,
    "num_attention_heads": 24,
    "attention_head_dim": 64,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 30,
    "sample_size": 64,
    "patch_size": 2,
    "activation_fn": "gelu",
    "use_data_type_embedding": True,
}
STABLE: Mapping[str, Any] = {
    "latent_channels": 4,
    "sample_size": 512,
    "scaling_factor": 0.18215,
    "shift_factor": None,
    "use_quant_conv": True,
    "use_post_quant_conv": True,
}
SCHEDULER: Mapping[str, Any] = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "solver_order": 3,
}


@dataclass(frozen=True)
class Sizes:
    """The configs of the U-ViT (version 1), of CLIP's text encoder and of the autoencoder, as released."""

    uvit: Mapping[str, Any] = field(default_factory=lambda: UVIT)
    clip: Mapping[str, Any] = field(default_factory=lambda: CLIP)
    vae: Mapping[str, Any] = field(default_factory=lambda: {**VAE, **STABLE})


def pipeline(sizes: Sizes, device: torch.device) -> Any:
    """Return diffusers' UniDiffuserPipeline in fp32, with random weights made on the device."""
    from diffusers.pipelines.deprecated.unidiffuser.pipeline_unidiffuser import UniDiffuserPipeline

    torch.manual_seed(0)
    with torch.device(device):  # positions and other buffers are made, too
        parts = _parts(sizes)
    for seed, part in enumerate(parts.values()):
        randomise(part.eval().requires_grad_(False), seed)
    tokens = sizes.clip["max_position_embeddings"]
    parts |= {"clip_tokenizer": tokenizer(tokens), "text_tokenizer": tokenizer(tokens), "clip_image_processor": None}
    parts["scheduler"] = DPMSolverMultistepScheduler(**SCHEDULER)
    return quiet(UniDiffuserPipeline(**parts))


def _parts(sizes: Sizes) -> dict[str, Any]:
    """Return the pipeline's modules."""
    import transformers  # here, because other benches run without it
    from diffusers.pipelines.deprecated.unidiffuser.modeling_text_decoder import UniDiffuserTextDecoder
    from diffusers.pipelines.deprecated.unidiffuser.modeling_uvit import UniDiffuserModel

    width, tokens = sizes.clip["hidden_size"], sizes.clip["max_position_embeddings"]
    ends: dict[str, Any] = {"eos_token_id": SPECIAL.index("<eos>"), "pad_token_id": 0, "bos_token_id": 1}
    captions: dict[str, Any] = {"prefix_length": tokens, "prefix_inner_dim": width}
    captions |= {"prefix_hidden_dim": sizes.uvit["text_dim"], "n_embd": width, "n_layer": 1, "n_head": 1}
    seen: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    vision = transformers.CLIPVisionConfig(**seen, num_hidden_layers=1, projection_dim=sizes.uvit["clip_img_dim"])
    return {
        "vae": AutoencoderKL(**sizes.vae),
        "text_encoder": transformers.CLIPTextModel(transformers.CLIPTextConfig(**{**sizes.clip, **ends})),
        "image_encoder": transformers.CLIPVisionModelWithProjection(vision),
        "text_decoder": UniDiffuserTextDecoder(**captions),
        "unet": UniDiffuserModel(**sizes.uvit),
    }


def in_dtype(pipe: Any, dtype: torch.dtype) -> Any:
    """Return a copy of a pipeline in another data type."""
    changed = {
        name: deepcopy(part).to(dtype) if isinstance(part, nn.Module) else copy(part)
        for name, part in pipe.components.items()
    }
    return quiet(type(pipe)(**changed))


def merged(pipe: Any, call: Callable[..., tuple[Tensor, ...]] | None = None) -> Any:
    """Return a pipeline with the same parts that predicts both branches of text-to-image in one call of its model.

    call: the model's forward, or a replay of it; it gets tensors alone.
    """
    made = quiet(type(pipe)(**pipe.components))
    forward = call or pipe.unet

    def predict(_: str, latents: Tensor, t: Tensor, prompt_embeds: Tensor, *others: Any) -> Tensor:
        (_, _, _, data_type, scale, generator, device, height, width) = others
        parts = made._split(latents, height, width)
        noise = randn_tensor(prompt_embeds.shape, generator=generator, device=device, dtype=prompt_embeds.dtype)
        given = branches(parts, torch.cat((prompt_embeds, noise)), t, data_type)
        cond, uncond = made._combine(*forward(**given)[:2]).chunk(2)
        return scale * cond + (1 - scale) * uncond

    made._get_noise_pred = predict
    return made


def branches(parts: tuple[Tensor, ...], text: Tensor, t: Tensor, data_type: int) -> dict[str, Tensor]:
    """Return the arguments of the model for both branches.

    parts: latent and CLIP-image token, N rows each. text: 2 N rows, those of the prompts and noise.
    """
    image, clip = (torch.cat((part, part)) for part in parts)
    rows = len(image) // 2
    times = torch.arange(2, device=image.device).repeat_interleave(rows) * NOISE
    return {
        "latent_image_embeds": image,
        "image_embeds": clip,
        "prompt_embeds": text,
        "timestep_img": t.to(image.device).expand(2 * rows),
        "timestep_text": times,
        "data_type": torch.full_like(times, data_type),
    }


def quiet(pipe: Any) -> Any:
    """Return a pipeline that prints no progress."""
    pipe.set_progress_bar_config(disable=True)
    return pipe
