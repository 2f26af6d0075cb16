"""Transformers that people run, as they were released: their configs, their operations, and inputs of one call.

Weights are random. `launch/bench.py scale --model NAME` times a call of one of them, with one batch row: one picture or
video, one guidance branch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import isqrt
from typing import Any

import diffusers
import torch
from diffusers.models.embeddings import get_3d_rotary_pos_embed
from torch import Tensor, nn

from launch.benches.works import cogvideo_work, qwen_work, sd3_work, wan_work
from seqpar.models import flux
from seqpar.protocols import SequenceModel
from seqpar.types.facts import Work
from seqpar.weights.find import locate, randomise

Inputs = Callable[..., dict[str, Any]]
LAYERS = ("num_layers", "num_single_layers")


@dataclass(frozen=True)
class Released:
    """A transformer as it was released.

    theirs: the name of its class in diffusers. config: the arguments of that class. work: its operations. size: the
    tokens of the state as (frames,) rows and columns. text: the number of text tokens. joined: whether attention joins
    text and state; otherwise text is cross-attended. native: the preset or config of our own model, if there is one.
    inputs: makes the arguments of a call of diffusers' transformer.
    """

    name: str
    theirs: str
    config: Mapping[str, Any]
    work: Work
    size: tuple[int, ...]
    text: int
    inputs: Inputs
    joined: bool = True
    native: Callable[[torch.dtype, torch.device], SequenceModel] | None = None

    @property
    def tokens(self) -> int:
        """Return the number of the state's tokens."""
        tokens = 1
        for side in self.size:
            tokens *= side
        return tokens

    @property
    def others(self) -> tuple[int, ...]:
        """Return the tokens of the streams that attention joins with the state."""
        return (self.text,) if self.joined else ()

    def sized(self, tokens: int | None, text: int | None) -> Released:
        """Return the model with other numbers of tokens; one of None stays. A picture becomes as square as it can."""
        if tokens is not None and len(self.size) != 2:
            raise ValueError(f"got {tokens} tokens for {self.name}, expected none: it makes a video of one size")
        size = self.size if tokens is None else squarest(tokens)
        return replace(self, size=size, text=self.text if text is None else text)

    def build(self, dtype: torch.dtype, device: torch.device) -> nn.Module:
        """Return diffusers' own transformer with random weights, made on the device."""
        theirs = getattr(diffusers, self.theirs)
        with torch.device("meta"):
            model = theirs(**self.config)
        with torch.device(device):  # tables of positions are no parameters: they are taken from a model with few blocks
            small = theirs(**{name: 1 if name in LAYERS else value for name, value in self.config.items()})
        model = nn.Module.to(model, dtype).to_empty(device=device)
        for name, module in list(small.named_children()):
            if not list(module.parameters()):
                model.set_submodule(name, module)
        for name, buffer in small.named_buffers():
            model.get_buffer(name).copy_(buffer)
        kept = set(theirs._keep_in_fp32_modules or ())  # as `from_pretrained` keeps them
        for key, parameter in model.named_parameters():
            if kept & set(key.split(".")):
                parameter.data = parameter.data.float()
        randomise(model, 0)
        return model.requires_grad_(False).eval()

    def arguments(self, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        """Return the arguments of one call; they are the same on every rank."""
        drawn = torch.Generator().manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=drawn).to(device, dtype)

        return self.inputs(self, random)


def squarest(tokens: int) -> tuple[int, int]:
    """Return rows and columns of the picture with this number of tokens that is closest to a square."""
    rows = next(rows for rows in range(isqrt(tokens), 0, -1) if tokens % rows == 0)
    return rows, tokens // rows


# Inputs of diffusers' transformers --------------------------------------------------------------------------------


def flux_inputs(model: Released, random: Callable[..., Tensor]) -> dict[str, Any]:
    """Return packed latents, text, timestep, guidance and ids as `FluxPipeline` passes them."""
    rows, columns = model.size
    image = random(1, rows * columns, model.config["in_channels"])
    ids = torch.zeros(rows, columns, 3)
    ids[..., 1], ids[..., 2] = torch.arange(rows)[:, None], torch.arange(columns)
    made = {
        "hidden_states": image,
        "encoder_hidden_states": random(1, model.text, model.config["joint_attention_dim"]),
        "pooled_projections": random(1, model.config["pooled_projection_dim"]),
        "timestep": torch.full((1,), 0.5).to(image),
        "img_ids": ids.flatten(0, 1).to(image),
        "txt_ids": torch.zeros(model.text, 3).to(image),
    }
    guidance = {"guidance": torch.full((1,), 3.5, device=image.device)} if model.config["guidance_embeds"] else {}
    return made | guidance


def qwen_inputs(model: Released, random: Callable[..., Tensor]) -> dict[str, Any]:
    """Return packed latents, text without padding, timestep and shapes as `QwenImagePipeline` passes them."""
    image = random(1, model.tokens, model.config["in_channels"])
    return {
        "hidden_states": image,
        "encoder_hidden_states": random(1, model.text, model.config["joint_attention_dim"]),
        "timestep": torch.full((1,), 0.5).to(image),
        "img_shapes": [[(1, *model.size)]],
    }


def wan_inputs(model: Released, random: Callable[..., Tensor]) -> dict[str, Any]:
    """Return latents of a video, text and timestep as `WanPipeline` passes them."""
    sides = (side * own for side, own in zip(model.size, model.config["patch_size"], strict=True))
    video = random(1, model.config["in_channels"], *sides)
    return {
        "hidden_states": video,
        "encoder_hidden_states": random(1, model.text, model.config["text_dim"]),
        "timestep": torch.full((1,), 500.0, device=video.device),
    }


def sd3_inputs(model: Released, random: Callable[..., Tensor]) -> dict[str, Any]:
    """Return latents, text, pooled text and timestep as `StableDiffusion3Pipeline` passes them."""
    sides = (side * model.config["patch_size"] for side in model.size)
    image = random(1, model.config["in_channels"], *sides)
    return {
        "hidden_states": image,
        "encoder_hidden_states": random(1, model.text, model.config["joint_attention_dim"]),
        "pooled_projections": random(1, model.config["pooled_projection_dim"]),
        "timestep": torch.full((1,), 500.0, device=image.device),
    }


def cogvideo_inputs(model: Released, random: Callable[..., Tensor]) -> dict[str, Any]:
    """Return latents of a video, text, timestep and rotary rows as `CogVideoXPipeline` passes them."""
    (frames, *sides), config = model.size, model.config
    rows, columns = (side * config["patch_size"] for side in sides)
    video = random(1, frames, config["in_channels"], rows, columns)
    crops, dim = ((0, 0), tuple(sides)), config["attention_head_dim"]
    rotary = get_3d_rotary_pos_embed(dim, crops, tuple(sides), frames, device=video.device)
    return {
        "hidden_states": video,
        "encoder_hidden_states": random(1, model.text, config["text_embed_dim"]),
        "timestep": torch.full((1,), 500, device=video.device),
        "image_rotary_emb": rotary,
    }


# Models -----------------------------------------------------------------------------------------------------------

JOINT: Mapping[str, Any] = {"num_attention_heads": 24, "attention_head_dim": 128, "axes_dims_rope": (16, 56, 56)}
FLUX: Mapping[str, Any] = {
    **JOINT,
    "patch_size": 1,
    "in_channels": 64,
    "num_layers": 19,
    "num_single_layers": 38,
    "joint_attention_dim": 4096,
    "pooled_projection_dim": 768,
    "guidance_embeds": True,
}
QWEN: Mapping[str, Any] = {
    **JOINT,
    "patch_size": 2,
    "in_channels": 64,
    "out_channels": 16,
    "num_layers": 60,
    "joint_attention_dim": 3584,
}
WAN: Mapping[str, Any] = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 40,
    "attention_head_dim": 128,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": 4096,
    "freq_dim": 256,
    "ffn_dim": 13824,
    "num_layers": 40,
    "cross_attn_norm": True,
    "qk_norm": "rms_norm_across_heads",
}


SD3: Mapping[str, Any] = {
    "sample_size": 128,
    "patch_size": 2,
    "in_channels": 16,
    "out_channels": 16,
    "num_layers": 38,
    "attention_head_dim": 64,
    "num_attention_heads": 38,
    "joint_attention_dim": 4096,
    "caption_projection_dim": 2432,
    "pooled_projection_dim": 2048,
    "pos_embed_max_size": 192,
    "qk_norm": "rms_norm",
}
COGVIDEO: Mapping[str, Any] = {
    "num_attention_heads": 48,
    "attention_head_dim": 64,
    "in_channels": 16,
    "out_channels": 16,
    "num_layers": 42,
    "text_embed_dim": 4096,
    "time_embed_dim": 512,
    "patch_size": 2,
    "use_rotary_positional_embeddings": True,
}


def preset(name: str) -> Callable[[torch.dtype, torch.device], SequenceModel]:
    """Return a function that builds our own model of this preset."""
    return lambda dtype, device: locate(name).build(dtype, device)


RELEASED: Mapping[str, Released] = {
    model.name: model
    for model in (
        Released(
            "flux.1-dev",
            "FluxTransformer2DModel",
            FLUX,
            flux.work(flux.PRESETS["flux.1-dev"]),
            squarest(4096),
            512,
            flux_inputs,
            native=preset("flux.1-dev"),
        ),
        Released("qwen-image", "QwenImageTransformer2DModel", QWEN, qwen_work(QWEN), squarest(4096), 128, qwen_inputs),
        Released("sd3.5-large", "SD3Transformer2DModel", SD3, sd3_work(SD3), squarest(4096), 333, sd3_inputs),
        Released(
            "cogvideox-5b",
            "CogVideoXTransformer3DModel",
            COGVIDEO,
            cogvideo_work(COGVIDEO),
            (13, 30, 45),
            226,
            cogvideo_inputs,
        ),
        Released("wan2.1-14b", "WanTransformer3DModel", WAN, wan_work(WAN), (21, 30, 52), 512, wan_inputs, False),
    )
}
