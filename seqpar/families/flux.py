"""FLUX.1: double blocks of text and image, then parallel blocks of both (`_double.py`).

Faster than diffusers' own on every GPU: norm, modulation and gates are one pass, GELU and biases are
part of the products, and between single blocks the tokens stay one stream.
The arithmetic is diffusers' with fewer roundings: it is computed in fp32 (fp64 for fp64) and rounded once.
Source: Black Forest Labs' FLUX.1, as diffusers implements it. Of the presets: the pages of
huggingface.co/alimama-creative/FLUX.1-Turbo-Alpha and huggingface.co/ByteDance/Hyper-SD, both with FLUX.1-dev's own
schedule.
Letters: see `seqpar.types.protocols`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from seqpar.families import Pipelines, Preset, Published
from seqpar.families._block import Block, BlockCall, reads_next, rounding_for
from seqpar.families._cuts import IMAGE, OUT, TEXT, TEXT_IMAGE, Boundary, Cuts, CutTokens, StepBlocks
from seqpar.families._double import (
    DOUBLE_EIGHT,
    DOUBLE_LAYERS,
    NAMES,
    PARALLEL_EIGHT,
    PARALLEL_LAYERS,
    apart,
    branch,
    by_head,
    checked,
    double_work,
    joined,
    modulations,
    of_both,
    pairs,
    parallel_work,
    two_streams,
)
from seqpar.kernels.adaln import Norm
from seqpar.types.facts import Work
from seqpar.types.keys import count_layers, shape_of


def cuts_of_kin(*more: str) -> Cuts:
    """Return the cuts of FLUX.1 and models alike. more: further inputs with a row for each token of the image."""
    ids = {"img_ids": CutTokens("image", dim=-2), "txt_ids": replace(TEXT, dim=-2)}
    inputs = {"hidden_states": IMAGE, "encoder_hidden_states": TEXT, **ids, **dict.fromkeys(more, IMAGE)}
    blocks = ("transformer_blocks.*.attn", "single_transformer_blocks.*.attn")
    return Cuts({"": Boundary(inputs), "proj_out": OUT}, dict.fromkeys(blocks, TEXT_IMAGE))


CUTS = {"FluxTransformer2DModel": cuts_of_kin("controlnet_block_samples", "controlnet_single_block_samples")}
STEPS_OF_KIN = StepBlocks(
    dict.fromkeys(("transformer_blocks", "single_transformer_blocks"), ("encoder_hidden_states", "hidden_states")),
    threshold=0.12,
)
STEPS = {"FluxTransformer2DModel": STEPS_OF_KIN}


def _distilled(name: str, steps: int, loras: str, scale: float) -> Preset:
    return Preset(f"{name}-{steps}", "Flux(Img2Img|Modular)?Pipeline", steps, {"guidance_scale": 3.5}, (), loras, scale)


PIPELINES = Pipelines(
    sigmas="Flux(?!Prior)|VisualClozeGeneration",
    presets=(
        _distilled("turbo", 8, "turbo[-_]?alpha", 1.0),
        _distilled("hyper", 8, r"hyper-?flux[^/]*(?<!\d)8-?steps", 0.125),
        _distilled("hyper", 16, r"hyper-?flux[^/]*(?<!\d)16-?steps", 0.125),
    ),
)
UNGUIDED = ("FluxTransformer2DModel",)  # guidance is distilled, also where it is no input (schnell)
WITHOUT_ROWS = ("img_ids", "txt_ids")
SINES = 256  # width of the sinusoids of timestep and guidance
TEXT_TOKENS = 512  # tokens to which the pipeline pads a text


def double(
    call: BlockCall,
    block: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    image_rotary_emb: tuple[Tensor, Tensor],
    joint_attention_kwargs: dict[str, Any] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return text (B, l', E) and image (B, l, E) after a block.

    temb: (B, E). image_rotary_emb: cosines and sines of text and image, (l' + l, D), each number twice.
    """
    checked(joint_attention_kwargs)
    names = [f"{name} modulation" for name in NAMES]
    every = call.once("modulation", temb, lambda: modulations(call, temb, names))
    rows, text = pairs(call, image_rotary_emb, hidden_states), encoder_hidden_states.shape[1]
    prepares = of_both(block.attn, [part[:text] for part in rows], [part[text:] for part in rows])
    norm = Norm("layer", block.norm1.norm.eps)
    return two_streams(call, (encoder_hidden_states, hidden_states), every, prepares, block.attn.heads, norm)


def single(
    call: BlockCall,
    block: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    image_rotary_emb: tuple[Tensor, Tensor],
    joint_attention_kwargs: dict[str, Any] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return text and image after a block; see `double`. They are views of one stream, which is left for the next."""
    checked(joint_attention_kwargs)
    every = [rows for (rows,) in call.once("modulation", temb, lambda: modulations(call, temb, ["modulation"]))]
    attn, norm, of = block.attn, Norm("layer", block.norm.norm.eps), call.matrices
    x, h = joined(call, encoder_hidden_states, hidden_states, every, norm, rounding_for(of, "qkv", "up"))
    how = by_head(attn.norm_q, attn.norm_k, *pairs(call, image_rotary_emb, x))
    both = of["out"].split_inputs(attn.inner_dim)
    of_block = branch(call, h, how, attn.heads, of["qkv"], of["up"].gelu, both)
    return apart(call, x, of_block, every, norm, encoder_hidden_states.shape[1], reads_next(call, "qkv", "up"))


BLOCKS = {
    "FluxTransformerBlock": Block(double, NAMES, DOUBLE_LAYERS, eight=DOUBLE_EIGHT),
    "FluxSingleTransformerBlock": Block(single, NAMES, PARALLEL_LAYERS, eight=PARALLEL_EIGHT),
}


def work(config: Mapping[str, Any], text: int = TEXT_TOKENS) -> Work:
    """Return the planner's `Work` for diffusers' config; text: the number of text tokens."""
    heads, dim = config["num_attention_heads"], config["attention_head_dim"]
    doubles, singles = config["num_layers"], config["num_single_layers"]
    width, channels = heads * dim, config["in_channels"]
    sines = ((SINES, width), (width, width)) * (2 if config["guidance_embeds"] else 1)
    return Work(
        width=width,
        heads=heads,
        kv_heads=heads,
        head_dim=dim,
        blocks=(double_work(doubles, width, 4 * width), parallel_work(singles, width, 4 * width)),
        prepares=True,
        once=((channels, width), (width, config.get("out_channels") or channels)),
        table=(12 * doubles + 3 * singles + 2) * width,
        live=12 * width,
        text=((config["joint_attention_dim"], width),),
        conditioning=(*sines, (config["pooled_projection_dim"], width), (width, width), (width, 2 * width)),
        guided=False,
        joined=(text,),
    )


WORK = {"FluxTransformer2DModel": work}


# keys of the authors' file by which it is known, and from which sizes are read
SCALE, VECTOR = "double_blocks.0.img_attn.norm.query_norm.scale", "vector_in.in_layer.weight"


def config_of_file(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any] | None:
    """Return the config.json of a FLUX.1 in its authors' keys, without which Black Forest Labs publish it."""
    if not all(key in shapes for key in (SCALE, VECTOR, "single_blocks.0.linear1.weight")):
        return None
    width, inputs = shape_of(shapes, "img_in.weight", 2)
    (head_dim,) = shape_of(shapes, SCALE, 1)
    if head_dim != 128 or width % head_dim:
        raise ValueError(
            f"a FLUX.1 of width {width} with heads {head_dim} wide; released ones have 128. Put the config.json of "
            f"diffusers' transformer next to the file"
        )
    return {
        "_class_name": "FluxTransformer2DModel",
        "num_layers": count_layers(shapes, "double_blocks"),
        "num_single_layers": count_layers(shapes, "single_blocks"),
        "num_attention_heads": width // head_dim,
        "attention_head_dim": head_dim,
        "joint_attention_dim": shape_of(shapes, "txt_in.weight", 2)[1],
        "pooled_projection_dim": shape_of(shapes, VECTOR, 2)[1],
        "guidance_embeds": "guidance_in.in_layer.weight" in shapes,
        "axes_dims_rope": [16, 56, 56],
        "in_channels": inputs,
        "out_channels": shape_of(shapes, "final_layer.linear.weight", 2)[0],
        "patch_size": 1,
    }


# Random weights -----------------------------------------------------------------------------------------------

CONFIG: dict[str, Any] = {
    **{"patch_size": 1, "in_channels": 64, "num_layers": 19, "num_single_layers": 38, "axes_dims_rope": (16, 56, 56)},
    **{"attention_head_dim": 128, "num_attention_heads": 24, "joint_attention_dim": 4096, "pooled_projection_dim": 768},
}
VAE: dict[str, Any] = {
    **{"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4},
    **{"block_out_channels": (128, 256, 512, 512), "layers_per_block": 2, "latent_channels": 16, "sample_size": 1024},
    **{"scaling_factor": 0.3611, "shift_factor": 0.1159, "use_quant_conv": False, "use_post_quant_conv": False},
}


def _random(embeds: bool) -> tuple[str, dict[str, tuple[str, dict[str, Any]]], dict[str, tuple[int, ...]]]:
    """Describe FLUX.1-dev, which takes the guidance scale as an input and shifts its sigmas by size, or schnell."""
    scheduler = {"shift": 3.0 if embeds else 1.0, "use_dynamic_shifting": embeds}
    parts = {
        "transformer": ("FluxTransformer2DModel", {**CONFIG, "guidance_embeds": embeds}),
        "vae": ("AutoencoderKL", VAE),
        "scheduler": ("FlowMatchEulerDiscreteScheduler", scheduler),
    }
    width, pooled = CONFIG["joint_attention_dim"], CONFIG["pooled_projection_dim"]
    return "FluxPipeline", parts, {"prompt_embeds": (TEXT_TOKENS, width), "pooled_prompt_embeds": (pooled,)}


RANDOM_MODELS = {"FLUX.1-dev": _random(True), "FLUX.1-schnell": _random(False)}


_GUIDED = {"guidance_embeds": True}
PUBLISHED = {
    "black-forest-labs/FLUX.1-dev": Published("FluxPipeline", "FluxTransformer2DModel", _GUIDED),
    "black-forest-labs/FLUX.1-schnell": Published("FluxPipeline", "FluxTransformer2DModel"),
    "black-forest-labs/FLUX.1-Kontext-dev": Published("FluxKontextPipeline", "FluxTransformer2DModel", _GUIDED),
}
