"""Qwen-Image, its Edit models and Layered: transformers of double blocks (`_double.py`).

Faster than diffusers' own on every GPU: norm, modulation and gates are one pass in place of about ten,
GELU and biases are part of the products, q, k and v are one product that attention's kernel writes to the ranks that
read them. Modulation is a third of the weights: it is read once per call, an Nth on each of N ranks.
The arithmetic is diffusers' with fewer roundings: it is computed in fp32 (fp64 for fp64) and rounded once.
Source: Qwen-Image, as diffusers implements it. Of the presets: generate_with_diffusers.py of
github.com/ModelTC/Qwen-Image-Lightning at 25d1e993 (shift 3 at all sizes, cfg 1).
Letters: see `seqpar.types.protocols`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from math import ceil, prod
from typing import Any

import torch
from diffusers.utils.peft_utils import apply_lora_scale
from torch import Tensor

from seqpar.families import Pipelines, Preset, Published, latents
from seqpar.families._block import Block, BlockCall
from seqpar.families._cuts import (
    IMAGE,
    OUT,
    TEXT,
    Boundary,
    Cuts,
    CutTokens,
    GatherTokens,
    Joint,
    StepBlocks,
    reads_lengths,
)
from seqpar.families._double import DOUBLE_EIGHT, NAMES, Rows, checked, double_work, modulations, of_both, two_streams
from seqpar.families._masks import Keys
from seqpar.families._tiny import Tiny
from seqpar.kernels.adaln import Norm
from seqpar.types.facts import Work


def _qwen_image() -> Cuts:
    places = {
        "": Boundary(inputs={"hidden_states": IMAGE, "controlnet_block_samples": IMAGE}),
        "pos_embed": Boundary(outputs={0: CutTokens("image", dim=0), 1: replace(TEXT, dim=0)}),
        "transformer_blocks.0": Boundary(inputs={"encoder_hidden_states": TEXT}),
        "transformer_blocks.*": Boundary(inputs={"modulate_index": IMAGE}),
        "proj_out": OUT,
    }
    joint = {"transformer_blocks.*.attn": Joint(("text", "image"), masked=True)}
    masks = {"encoder_hidden_states_mask": "text"}
    return Cuts(places, joint, masks=masks, forward=forward_of)


def _qwen_image21() -> Cuts:
    """Return cuts of the new picture alone: tokens before it attend in order, and every rank computes all of them."""
    rows = CutTokens("image", dim=0, after_prefix=True)
    places = {
        "transformer_blocks.0": Boundary(inputs={"hidden_states": replace(rows, dim=1)}),
        "transformer_blocks.*": Boundary(inputs={"rotary_emb": rows, "target_token_mask": rows}),
        "norm_out": Boundary(inputs={"target_token_mask": rows}),
        "proj_out": Boundary(gathers={0: GatherTokens(rows.stream, after_prefix=True)}),
    }
    joint = {"transformer_blocks.*.attn": Joint((rows.stream,), after_prefix=True)}
    return Cuts(places, joint, keys=_before_image, why_eager=reads_lengths)


def _before_image(arguments: dict[str, Any], note: Hashable) -> Keys:
    """Return how many tokens are before the new picture: texts and other images, whose four tokens have a slot each."""
    if arguments.get("kv_cache_mode") == "cached":  # attention alone reads them
        return Keys()
    counts = list(map(prod, arguments["img_shapes"][0]))
    return Keys(prefix=arguments["img_mask"].shape[1] + sum(counts) - sum(counts) // 4 - counts[-1])


Shape = tuple[int, int, int]


def forward_of(module: Any) -> Callable[..., tuple[Tensor, ...]] | None:
    """Return the forward of edit models whose reference images have their own timestep; None for others."""
    return _forward if module.config.zero_cond_t else None


@apply_lora_scale("attention_kwargs")
def _forward(module: Any, **given: Any) -> tuple[Tensor, ...]:
    """Return the prediction (B, L, C), as `QwenImageTransformer2DModel` does with the same arguments."""
    x, shapes = module.img_in(given["hidden_states"]), given["img_shapes"]
    timestep = given["timestep"].to(x.dtype)
    timesteps, more = torch.cat([timestep, timestep * 0]), given.get("additional_t_cond")
    guidance = [] if given.get("guidance") is None else [given["guidance"].to(x.dtype) * 1000]
    text, mask = module.txt_in(module.txt_norm(given["encoder_hidden_states"])), given.get("encoder_hidden_states_mask")
    temb = module.time_text_embed(timesteps, *guidance, x, more)
    same = {
        "temb": temb,
        "image_rotary_emb": module.pos_embed(shapes, max_txt_seq_len=text.shape[1], device=x.device),
        "encoder_hidden_states_mask": None if mask is None else mask.bool(),
        "joint_attention_kwargs": given.get("attention_kwargs"),
        "modulate_index": torch.stack([_of_references(images, x.device) for images in shapes]),
    }
    control = given.get("controlnet_block_samples")
    for index, block in enumerate(module.transformer_blocks):
        text, x = block(hidden_states=x, encoder_hidden_states=text, **same)
        if control is not None:
            x = x + control[index // ceil(len(module.transformer_blocks) / len(control))]
    return (module.proj_out(module.norm_out(x, temb.chunk(2)[0])),)


def _of_references(images: Sequence[Shape], device: torch.device) -> Tensor:
    """Return 0 for each token of a picture's first image and 1 for those of its reference images, (L,) int32."""
    counts = prod(images[0]), sum(map(prod, images[1:]))
    return torch.cat([torch.full((n,), which, dtype=torch.int, device=device) for which, n in enumerate(counts)])


CUTS = {"QwenImageTransformer2DModel": _qwen_image(), "QwenImage21Transformer2DModel": _qwen_image21()}
STEPS = {"QwenImageTransformer2DModel": StepBlocks({"transformer_blocks": ("encoder_hidden_states", "hidden_states")})}
UNPAIRED = ("QwenImage21Transformer2DModel",)  # its pipeline keeps keys of what is before the picture in caches
ROW_LISTS = ("img_shapes", "txt_seq_lens")


def _lightning(steps: int) -> Preset:
    sigmas = tuple(3 * k / (steps + 2 * k) for k in range(steps, 0, -1))  # equal steps from 1, shifted by 3
    pattern = rf"qwen[^/]*lightning[^/]*(?<!\d){steps}steps"
    pipelines = "QwenImage(Img2Img|Edit|EditPlus)?(Modular)?Pipeline"
    return Preset(f"lightning-{steps}", pipelines, steps, {"true_cfg_scale": 1.0}, sigmas, pattern)


PIPELINES = Pipelines(
    several_images=("QwenImageEditPlus", "QwenImage21"),
    one_result=("QwenImageEdit",),
    reads_layers=("QwenImage21Pipeline", "QwenImage21ModularPipeline", "QwenImage21TurboModularPipeline"),
    sigmas="QwenImage(?!Layered)",
    presets=(_lightning(4), _lightning(8)),
)
TEXT_TOKENS = 128  # tokens of a text: a usual prompt's
LAYERS = {
    "text modulation": ("txt_mod.1",),
    "text qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
    "text out": ("attn.to_add_out",),
    "text up": ("txt_mlp.net.0.proj",),
    "text down": ("txt_mlp.net.2",),
    "image modulation": ("img_mod.1",),
    "image qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "image out": ("attn.to_out.0",),
    "image up": ("img_mlp.net.0.proj",),
    "image down": ("img_mlp.net.2",),
}


def double(
    call: BlockCall,
    block: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    encoder_hidden_states_mask: Tensor | None,
    temb: Tensor,
    image_rotary_emb: tuple[Tensor, Tensor],
    joint_attention_kwargs: dict[str, Any] | None = None,
    modulate_index: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return text (B, l', E) and image (B, l, E) after a block.

    temb: (B, E), or (2 B, E) with a modulate_index (B, l): tokens of reference images, 1 there, have the second half.
    One row, or two with an index, is for all pictures. image_rotary_emb: of the image and of the text, complex rows
    (l, D/2). The text's mask is not read: attention has that of the transformer's call.
    """
    checked(joint_attention_kwargs)
    rows, index = len(temb), None
    if modulate_index is not None:  # diffusers makes it and temb once per forward
        rows //= 2
        index = call.once("index", temb, lambda: _rows(modulate_index, rows))
    every = call.once("modulation", temb, lambda: _modulations(call, temb, rows))
    image, text = call.once("rotary", image_rotary_emb, lambda: [_real(rows) for rows in image_rotary_emb])
    attn, prepares = block.attn, of_both(block.attn, text, image)
    norm = Norm("layer", block.img_norm1.eps)
    streams, indices = (encoder_hidden_states, hidden_states), (None, index)
    return two_streams(call, streams, every, prepares, attn.heads, norm, indices=indices)


def _modulations(call: BlockCall, temb: Tensor, rows: int) -> list[list[Rows]]:
    """Return the rows of text and image of every block. Text has no tokens of reference images, so only one per row."""
    every = modulations(call, temb, [f"{name} modulation" for name in NAMES])
    return [[tuple(x[:rows] for x in text), image] for text, image in every]


def _rows(modulate_index: Tensor, rows: int) -> Tensor:
    """Return which of twice as many rows is the modulation of a token, (B, l) int32."""
    of_batch = torch.arange(rows, dtype=torch.int32, device=modulate_index.device)[:, None]
    return (of_batch + rows * (modulate_index != 0)).int()


def _real(rows_lD2: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of complex rotary rows."""
    return rows_lD2.real.contiguous(), rows_lD2.imag.contiguous()


BLOCKS = {"QwenImageTransformerBlock": Block(double, NAMES, LAYERS, eight=DOUBLE_EIGHT)}


def work(config: Mapping[str, Any], text: int = TEXT_TOKENS) -> Work:
    """Return the planner's `Work` for diffusers' config; text: the number of text tokens."""
    heads, dim, layers = config["num_attention_heads"], config["attention_head_dim"], config["num_layers"]
    width, area, channels = heads * dim, config["patch_size"] ** 2, config["in_channels"]
    return Work(
        width=width,
        heads=heads,
        kv_heads=heads,
        head_dim=dim,
        blocks=(double_work(layers, width, 4 * width),),
        prepares=True,
        once=((channels, width), (width, area * (config.get("out_channels") or channels))),
        table=(12 * layers + 2) * width,
        live=11 * width,
        text=((config["joint_attention_dim"], width),),
        conditioning=((256, width), (width, width), (width, 2 * width)),
        joined=(text,),
    )


WORK = {"QwenImageTransformer2DModel": work}


def _inputs(config: Mapping[str, Any], random: Callable[..., Tensor]) -> dict[str, Any]:
    """Return a call of 7 tokens of text, 4 slots of a picture, 2 tokens of text, and 6 slots of the new picture."""
    slots, places = torch.arange(19), torch.arange(13)
    return {
        "hidden_states": random(2, 40, config["in_channels"]),
        "encoder_hidden_states": random(2, 13, config["context_in_dim"]),
        "encoder_hidden_states_mask": (places < torch.tensor([[13], [12]])),
        "img_shapes": [[(1, 4, 4), (1, 4, 6)]] * 2,
        "img_mask": ((slots >= 7) & (slots < 11) | (slots >= 13)).expand(2, -1),
    }


PUBLISHED = {
    "Qwen/Qwen-Image": Published("QwenImagePipeline", "QwenImageTransformer2DModel"),
    "Qwen/Qwen-Image-Edit": Published("QwenImageEditPipeline", "QwenImageTransformer2DModel"),
    "Qwen/Qwen-Image-Edit-2509": Published("QwenImageEditPlusPipeline", "QwenImageTransformer2DModel"),
    "Qwen/Qwen-Image-2.1": Published("QwenImage21Pipeline", "QwenImage21Transformer2DModel", vae=latents(64, 16)),
}
TINY = {
    "QwenImageTransformer2DModel": Tiny(inputs=lambda config, random: {"img_shapes": [[(1, 3, 5)]] * 2}),
    "QwenImage21Transformer2DModel": Tiny(
        {"context_in_dim": 24, "attention_head_dim": 16, "axes_dims_rope": (4, 6, 6)}, _inputs
    ),
}
