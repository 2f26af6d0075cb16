"""FLUX.3: parallel blocks (`_double.py`) of text, image or reference images alone, then of all of them, with SwiGLU.

Faster than diffusers' own on every GPU: norm, modulation and gates are one pass, SwiGLU is one, and the
MLP runs while keys and values travel. All blocks share their modulation, which diffusers makes for each token: its rows
are read as they are, because a function cannot know which of them are equal. At 4096 and 512 tokens they are 85 MB a
block.
The arithmetic is diffusers' with fewer roundings: it is computed in fp32 (fp64 for fp64) and rounded once.
Source: Black Forest Labs' FLUX.3, as diffusers implements it.
Letters: see `seqpar.types.protocols`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from seqpar.families import Pipelines, Published, latents
from seqpar.families._block import EIGHT, Block, BlockCall, Input, reads_next, rounding_for
from seqpar.families._cuts import ALONE, IMAGE, OUT, Boundary, Cuts, CutTokens, Joint
from seqpar.families._double import Rows, branch, by_head, following, pairs
from seqpar.kernels.adaln import Norm, norm_modulate
from seqpar.types.facts import Blocks, Work


def _flux3() -> Cuts:
    text, reference = CutTokens("text"), CutTokens("reference")  # each attends to itself alone in the first blocks
    root = Boundary(
        inputs={
            "hidden_states": IMAGE,
            "encoder_hidden_states": text,
            "image_cond_hidden_states": reference,
            "img_ids": CutTokens("image", dim=-2),
            "txt_ids": replace(text, dim=-2),
            "image_cond_ids": replace(reference, dim=-2),
        }
    )
    attention = {
        "txt_mode_blocks.*.attn": Joint(("text",)),
        "mode_blocks.image.*.attn": ALONE,
        "mode_blocks.image_cond.*.attn": Joint(("reference",)),
        "single_transformer_blocks.*.attn": Joint(("text", "image", "reference"), absent=("reference",)),
    }
    return Cuts({"": root, "proj_out": OUT}, attention)


PIPELINES = Pipelines(one_prompt=("Flux3",))
CUTS = {"Flux3Transformer2DModel": _flux3()}
TEXT = 512  # tokens to which the pipeline pads a text
LAYERS = {
    "qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "out": ("attn.to_out.0",),
    "up": ("ff.linear_in",),
    "down": ("ff.linear_out",),
}


def mode(
    call: BlockCall, block: Any, hidden_states: Tensor, temb_mod: Tensor, image_rotary_emb: tuple[Tensor, Tensor]
) -> Tensor:
    """Return the tokens of one stream (B, l, E) after a block.

    temb_mod: (B, l, 3 E). image_rotary_emb: cosines and sines (l, D), each number twice.
    """
    x, h = _computed(call, block, hidden_states, call.handed(hidden_states), (temb_mod,), image_rotary_emb)
    if h is not None:
        call.hand_over(x, h)
    return x


def single(
    call: BlockCall,
    block: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb_mod: Tensor,
    temb_mod_context: Tensor,
    image_rotary_emb: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    """Return text (B, l', E) and images (B, l, E) after a block: views of one stream, which is left for the next.

    temb_mod, temb_mod_context: (B, l, 3 E) and (B, l', 3 E). image_rotary_emb: of text and images, (l' + l, D).
    """
    handed, text = call.handed(hidden_states), encoder_hidden_states.shape[1]
    if handed is not None and handed[0] is encoder_hidden_states:
        _, x, h = handed
    else:
        x, h = torch.cat([encoder_hidden_states, hidden_states], dim=1), None
    x, h = _computed(call, block, x, h, (temb_mod_context, temb_mod), image_rotary_emb)
    texts, images = x[:, :text], x[:, text:]
    if h is not None:
        call.hand_over(images, (texts, x, h))
    return texts, images


def _computed(
    call: BlockCall,
    block: Any,
    x_BlE: Tensor,
    h_BlE: Input | None,
    modulation: tuple[Tensor, ...],
    rotary: tuple[Tensor, Tensor],
) -> tuple[Tensor, Input | None]:
    """Return the stream after a block, and the next block's input. modulation: (B, l, 3 E) of its parts, in order."""
    rows, index_Bl = call.once("rows", modulation, lambda: _by_token(modulation))
    norm, attn, of = Norm("layer", block.norm.eps), block.attn, call.matrices
    h = h_BlE
    if h is None:
        rounding = rounding_for(of, "qkv", "up")
        h = norm_modulate(x_BlE, rows[0], rows[1], norm, index_Bl=index_Bl, rounding=rounding)
    how = by_head(attn.norm_q, attn.norm_k, *pairs(call, rotary, x_BlE))
    of_block = branch(call, h, how, attn.heads, of["qkv"], of["up"].swiglu, (of["out"], of["down"]))
    after = [rows] * (len(call.all_matrices) - call.index - 1)
    return following(x_BlE, rows[2], of_block, after, norm, index_Bl, reads_next(call, "qkv", "up"))


def _by_token(modulation: tuple[Tensor, ...]) -> tuple[Rows, Tensor]:
    """Return shift, scale and gate (B l, E) of all tokens, and which row each token has, (B, l)."""
    every_Bl3E = modulation[0] if len(modulation) == 1 else torch.cat(modulation, dim=1)
    batch, tokens, _ = every_Bl3E.shape
    index = torch.arange(batch * tokens, dtype=torch.int32, device=every_Bl3E.device)
    return every_Bl3E.flatten(0, 1).chunk(3, dim=-1), index.view(batch, tokens)


BLOCKS = {
    "Flux3ModeTransformerBlock": Block(mode, ("image",), LAYERS, eight=EIGHT),
    "Flux3SingleTransformerBlock": Block(single, ("text", "image", "reference"), LAYERS, eight=EIGHT),
}


def work(config: Mapping[str, Any], text: int = TEXT) -> Work:
    """Return the planner's `Work` for diffusers' config; text: the number of text tokens.

    The first blocks attend to one stream each and are counted as if they attended to both, which adds half a percent at
    4096 and 512 tokens.
    """
    heads, dim = config["num_attention_heads"], config["attention_head_dim"]
    width, hidden = heads * dim, int(heads * dim * config["mlp_ratio"])
    gemms = ((width, 3 * width), (width, 2 * hidden), (hidden, width), (width, width))
    both = Blocks(config["num_single_layers"], gemms, (7 * width,), beside=((width, 2 * hidden), (hidden, width)))
    return Work(
        width=width,
        heads=heads,
        kv_heads=heads,
        head_dim=dim,
        blocks=(replace(both, count=config["num_layers"], apart=(gemms,)), both),
        prepares=True,
        once=((config["in_channels"], width), (width, config["in_channels"])),
        table=(4 * 3 + 2) * width,
        live=12 * width,
        text=((config["joint_attention_dim"], width),),
        conditioning=((256, width), (width, width), *((width, n * width) for n in (3, 3, 3, 3, 2))),
        guided=False,
        joined=(text,),
    )


WORK = {"Flux3Transformer2DModel": work}


# no weights were published beside the class
PUBLISHED = {"FLUX.3": Published("Flux3ModularPipeline", "Flux3Transformer2DModel", vae=latents(32))}
