"""FLUX.1: double blocks of text and image (`_double.py`), then parallel blocks of both (`_parallel.py`).

Faster than diffusers' own on every GPU: norm, modulation and gates are one pass, GELU and biases are
part of the products, and between single blocks the tokens stay one stream.
The arithmetic is diffusers' with fewer roundings: it is computed in fp32 (fp64 for fp64) and rounded once.
Source: Black Forest Labs' FLUX.1, as diffusers implements it.
Letters: see `seqpar.types.protocols`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from seqpar.families import _work
from seqpar.families._block import Block, BlockCall
from seqpar.families._cuts import IMAGE, OUT, TEXT, TEXT_IMAGE, Boundary, Cuts, CutTokens
from seqpar.families._double import (
    NAMES,
    apart,
    branch,
    by_head,
    checked,
    joined,
    modulations,
    of_both,
    pairs,
    two_streams,
)
from seqpar.kernels.adaln import Norm
from seqpar.types.facts import Work

CUTS = {
    "FluxTransformer2DModel": Cuts(
        {
            "": Boundary(
                inputs={
                    "hidden_states": IMAGE,
                    "encoder_hidden_states": TEXT,
                    "img_ids": CutTokens("image", dim=-2),
                    "txt_ids": replace(TEXT, dim=-2),
                    "controlnet_block_samples": IMAGE,
                    "controlnet_single_block_samples": IMAGE,
                }
            ),
            "proj_out": OUT,
        },
        {"transformer_blocks.*.attn": TEXT_IMAGE, "single_transformer_blocks.*.attn": TEXT_IMAGE},
    )
}
UNGUIDED = ("FluxTransformer2DModel",)  # guidance is distilled, also where it is no input (schnell)
WITHOUT_ROWS = ("img_ids", "txt_ids")
LAYERS = {
    "text modulation": ("norm1_context.linear",),
    "text qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
    "text out": ("attn.to_add_out",),
    "text up": ("ff_context.net.0.proj",),
    "text down": ("ff_context.net.2",),
    "image modulation": ("norm1.linear",),
    "image qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "image out": ("attn.to_out.0",),
    "image up": ("ff.net.0.proj",),
    "image down": ("ff.net.2",),
}
SINGLE_LAYERS = {
    "modulation": ("norm.linear",),
    "qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "up": ("proj_mlp",),
    "out": ("proj_out",),  # the columns of attention, then the columns of the MLP
}
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
    x, h = joined(call, encoder_hidden_states, hidden_states, every, norm)
    how = by_head(attn.norm_q, attn.norm_k, *pairs(call, image_rotary_emb, x))
    both = of["out"].split_inputs(attn.inner_dim)
    of_block = branch(call, h, how, attn.heads, of["qkv"], of["up"].gelu, both)
    return apart(call, x, of_block, every, norm, encoder_hidden_states.shape[1])


BLOCKS = {
    "FluxTransformerBlock": Block(double, NAMES, LAYERS),
    "FluxSingleTransformerBlock": Block(single, NAMES, SINGLE_LAYERS),
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
        blocks=(_work.double(doubles, width, 4 * width), _work.parallel(singles, width, 4 * width)),
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
