"""Qwen-Image, its Edit models and Layered: transformers of double blocks (`_double.py`).

When it wins: on every GPU, over diffusers' own block. Norm, modulation and gates are one pass in place of about ten,
GELU and biases are part of the products, q, k and v are one product that attention's kernel writes to the ranks that
read them. Modulation is a third of the weights: it is read once a call, an Nth on each of N ranks.
The arithmetic is diffusers' with fewer roundings: it is computed in fp32 (fp64 for fp64) and rounded once.
Source: Qwen-Image, as diffusers implements it.
Letters: see `seqpar.types.protocols`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from seqpar.families import _work
from seqpar.families._block import BlockCall, Fused
from seqpar.families._double import NAMES, Rows, checked, modulations, of_both, two_streams
from seqpar.kernels.adaln import Norm
from seqpar.types.facts import Work

TRANSFORMERS = ("QwenImageTransformer2DModel",)
TEXT = 128  # tokens of a text: a usual prompt's
STREAMS = {"QwenImageTransformerBlock": NAMES}
PRODUCTS = {
    "QwenImageTransformerBlock": {
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
}


def why_not(block: Any) -> str | None:
    """See `seqpar.families`."""
    return None


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
    if modulate_index is not None:  # diffusers makes it and temb once a forward
        rows //= 2
        index = call.once("index", temb, lambda: _rows(modulate_index, rows))
    every = call.once("modulation", temb, lambda: _modulations(call, temb, rows))
    image, text = call.once("rotary", image_rotary_emb, lambda: [_real(rows) for rows in image_rotary_emb])
    attn, prepares = block.attn, of_both(block.attn, text, image)
    norm = Norm("layer", block.img_norm1.eps)
    streams, indices = (encoder_hidden_states, hidden_states), (None, index)
    return two_streams(call, streams, every, prepares, attn.heads, norm, indices=indices)


def _modulations(call: BlockCall, temb: Tensor, rows: int) -> list[list[Rows]]:
    """Return the rows of text and image of every block. Text has no tokens of reference images, so only one a row."""
    every = modulations(call, temb, [f"{name} modulation" for name in NAMES])
    return [[tuple(x[:rows] for x in text), image] for text, image in every]


def _rows(modulate_index: Tensor, rows: int) -> Tensor:
    """Return which of twice as many rows is the modulation of a token, (B, l) int32."""
    of_batch = torch.arange(rows, dtype=torch.int32, device=modulate_index.device)[:, None]
    return (of_batch + rows * (modulate_index != 0)).int()


def _real(rows_lD2: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of complex rotary rows."""
    return rows_lD2.real.contiguous(), rows_lD2.imag.contiguous()


BLOCKS: dict[str, Fused] = {"QwenImageTransformerBlock": double}


def work(config: Mapping[str, Any], text: int = TEXT) -> Work:
    """Return the planner's `Work` for diffusers' config; text: the number of text tokens."""
    heads, dim, layers = config["num_attention_heads"], config["attention_head_dim"], config["num_layers"]
    width, area, channels = heads * dim, config["patch_size"] ** 2, config["in_channels"]
    return Work(
        width=width,
        heads=heads,
        kv_heads=heads,
        head_dim=dim,
        blocks=(_work.double(layers, width, 4 * width),),
        prepares=True,
        once=((channels, width), (width, area * (config.get("out_channels") or channels))),
        table=(12 * layers + 2) * width,
        live=11 * width,
        text=((config["joint_attention_dim"], width),),
        conditioning=((256, width), (width, width), (width, 2 * width)),
        joined=(text,),
    )
