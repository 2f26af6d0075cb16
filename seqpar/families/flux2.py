"""FLUX.2 (dev, klein): double blocks, then parallel blocks of both streams (`_double.py`), with SwiGLU.

Faster than diffusers' own on every GPU: norm, modulation and gates are one pass, SwiGLU is one, and the
MLP of a parallel block runs while keys and values travel. All blocks share their modulation, which diffusers makes.
The arithmetic is diffusers' with fewer roundings: it is computed in fp32 (fp64 for fp64) and rounded once.
Source: Black Forest Labs' FLUX.2, as diffusers implements it. Of the preset: the page of
huggingface.co/black-forest-labs/FLUX.2-klein-4B (4 steps), with the model's own schedule.
Letters: see `seqpar.types.protocols`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from diffusers.models.transformers.transformer_flux2 import Flux2Transformer2DModelOutput
from torch import Tensor

from seqpar.families import Pipelines, Preset, Published, latents
from seqpar.families._block import Block, BlockCall, DeclinedError, Input, Matrix, reads_next
from seqpar.families._cuts import IMAGE, OUT, TEXT, TEXT_IMAGE, Boundary, Cuts, CutTokens, StepBlocks
from seqpar.families._double import (
    DOUBLE_EIGHT,
    NAMES,
    Rows,
    branch,
    by_head,
    checked,
    double_work,
    following,
    of_both,
    pairs,
    parallel_work,
    two_streams,
)
from seqpar.kernels.adaln import Norm, norm_modulate
from seqpar.types.facts import Work
from seqpar.types.protocols import state_dtype


def _flux2() -> Cuts:
    ids = {"img_ids": CutTokens("image", dim=-2), "txt_ids": replace(TEXT, dim=-2)}
    root = Boundary(inputs={"hidden_states": IMAGE, "encoder_hidden_states": TEXT, **ids})
    both = {"transformer_blocks.*.attn": TEXT_IMAGE, "single_transformer_blocks.*.attn": TEXT_IMAGE}
    cached = "kept keys and values of reference images are those of all tokens; call the pipeline without a key cache"
    refused = {"kv_cache_mode": cached, "kv_cache": cached}
    return Cuts({"": root, "proj_out": OUT}, both, refused=refused, output=Flux2Transformer2DModelOutput)


CUTS = {"Flux2Transformer2DModel": _flux2()}
STEPS = {
    "Flux2Transformer2DModel": StepBlocks(
        {
            "transformer_blocks": ("encoder_hidden_states", "hidden_states"),
            "single_transformer_blocks": ("hidden_states",),
        }
    )
}
PIPELINES = Pipelines(
    several_images=("Flux2",),
    distilled={"Flux2Klein": "is_distilled"},
    presets=(Preset("distilled", "Flux2Klein(Modular)?Pipeline", 4, needs=("is_distilled", True)),),
)
TEXT_TOKENS = 512  # tokens to which the pipeline pads a text
LAYERS = {
    "text qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
    "text out": ("attn.to_add_out",),
    "text up": ("ff_context.linear_in",),
    "text down": ("ff_context.linear_out",),
    "image qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "image out": ("attn.to_out.0",),
    "image up": ("ff.linear_in",),
    "image down": ("ff.linear_out",),
}
SINGLE_LAYERS = {
    "in": ("attn.to_qkv_mlp_proj",),  # the rows of q, k and v, then the MLP's two halves
    "out": ("attn.to_out",),
}


def double(
    call: BlockCall,
    block: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb_mod_img: Tensor,
    temb_mod_txt: Tensor,
    image_rotary_emb: tuple[Tensor, Tensor],
    joint_attention_kwargs: dict[str, Any] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return text (B, l', E) and image (B, l, E) after a block.

    temb_mod_img, temb_mod_txt: (B, 6 E). image_rotary_emb: cosines and sines of text and image, (l' + l, D).
    """
    checked(joint_attention_kwargs)
    mine = call.once("rows", temb_mod_img, lambda: [_rows(x, 6) for x in (temb_mod_txt, temb_mod_img)])
    cos, sin = pairs(call, image_rotary_emb, hidden_states)
    attn, text = block.attn, encoder_hidden_states.shape[1]
    prepares = of_both(attn, (cos[:text], sin[:text]), (cos[text:], sin[text:]))
    streams, norm = (encoder_hidden_states, hidden_states), Norm("layer", block.norm1.eps)
    return two_streams(call, streams, [mine] * len(call.all_matrices), prepares, attn.heads, norm, _mlp)


def single(
    call: BlockCall,
    block: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None,
    temb_mod: Tensor,
    image_rotary_emb: tuple[Tensor, Tensor],
    joint_attention_kwargs: dict[str, Any] | None = None,
    split_hidden_states: bool = False,
    text_seq_len: int | None = None,
) -> Tensor:
    """Return text and image as one stream (B, l' + l, E) after a block, as they are given. temb_mod: (B, 3 E)."""
    checked(joint_attention_kwargs)
    if encoder_hidden_states is not None or split_hidden_states:
        raise DeclinedError("its two streams are given apart")
    rows, norm = call.once("rows", temb_mod, lambda: _rows(temb_mod, 3)), Norm("layer", block.norm.eps)
    handed, attn = call.handed(hidden_states), block.attn
    h = handed
    if h is None:
        h = norm_modulate(hidden_states, rows[0], rows[1], norm, rounding=call.matrices["in"].rounding)
    how = by_head(attn.norm_q, attn.norm_k, *pairs(call, image_rotary_emb, hidden_states))
    qkv, up = call.matrices["in"].split_outputs(3 * attn.inner_dim, call.matrices["in"].outputs - 3 * attn.inner_dim)
    both = call.matrices["out"].split_inputs(attn.inner_dim)
    of_block = branch(call, h, how, attn.heads, qkv, up.swiglu, both)
    after = [rows] * (len(call.all_matrices) - call.index - 1)
    x, h = following(hidden_states, rows[2], of_block, after, norm, rounding=reads_next(call, "in"))
    if h is not None:
        call.hand_over(x, h)
    return x


def _rows(modulation: Tensor, vectors: int) -> Rows:
    """Return the vectors (B, E) of a modulation (B, vectors E) or (B, 1, vectors E), in fp32 (or fp64)."""
    return modulation.flatten(0, -2).to(state_dtype(modulation.dtype)).chunk(vectors, dim=-1)


def _mlp(up: Matrix, down: Matrix, h_BlE: Input) -> Tensor:
    return down(up.swiglu(h_BlE, down))


BLOCKS = {
    "Flux2TransformerBlock": Block(double, NAMES, LAYERS, eight=DOUBLE_EIGHT),
    "Flux2SingleTransformerBlock": Block(single, NAMES, SINGLE_LAYERS, eight=("in", "out")),
}


def work(config: Mapping[str, Any], text: int = TEXT_TOKENS) -> Work:
    """Return the planner's `Work` for diffusers' config; text: the number of text tokens.

    All blocks of a kind have one modulation.
    """
    heads, dim, channels = config["num_attention_heads"], config["attention_head_dim"], config["in_channels"]
    width, hidden = heads * dim, int(heads * dim * config["mlp_ratio"])
    doubles = double_work(config["num_layers"], width, hidden, up=2)
    singles = parallel_work(config["num_single_layers"], width, hidden, up=2)
    sines = ((256, width), (width, width)) * (2 if config.get("guidance_embeds", True) else 1)
    return Work(
        width=width,
        heads=heads,
        kv_heads=heads,
        head_dim=dim,
        blocks=(replace(doubles, modulation=()), replace(singles, modulation=())),
        prepares=True,
        once=((channels, width), (width, config.get("out_channels") or channels)),
        table=(6 + 6 + 3 + 2) * width,
        live=12 * width,
        text=((config["joint_attention_dim"], width),),
        conditioning=(*sines, *((width, n * width) for n in (6, 6, 3, 2))),
        guided=False,
        joined=(text,),
    )


WORK = {"Flux2Transformer2DModel": work}


def _klein(heads: int, doubles: int, singles: int, text: int) -> Published:
    config = {"num_attention_heads": heads, "num_layers": doubles, "num_single_layers": singles}
    config |= {"joint_attention_dim": text, "guidance_embeds": False}
    distilled = {"is_distilled": True}
    return Published("Flux2KleinPipeline", "Flux2Transformer2DModel", config, latents(32), index=distilled)


PUBLISHED = {
    "black-forest-labs/FLUX.2-dev": Published("Flux2Pipeline", "Flux2Transformer2DModel", vae=latents(32)),
    "black-forest-labs/FLUX.2-klein-4B": _klein(24, 5, 20, 7680),
    "black-forest-labs/FLUX.2-klein-9B": _klein(32, 8, 24, 12288),
}
