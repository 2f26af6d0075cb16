"""Qwen-Image: a text-to-image transformer of double blocks, text and image with their own layers, joined by attention.

When it wins: on every GPU, over diffusers' own block. Norm, modulation and gates are one pass in place of about ten,
GELU and biases are part of the products, q, k and v are one product that attention's kernel writes to the ranks that
read them. Modulation is a third of the weights: it is read once a call, an Nth on each of N ranks.
The arithmetic is diffusers' with fewer roundings: it is computed in fp32 (fp64 for fp64) and rounded once.
Source: Qwen-Image, as diffusers implements it.
Letters: see `seqpar.types.protocols`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from seqpar.kernels.adaln import Norm, gate_norm_modulate, norm_modulate
from seqpar.kernels.gelu import linear_gelu
from seqpar.models._layers import product
from seqpar.types.fused import BlockCall, DeclinedError, Fused, added
from seqpar.types.protocols import Prepare, Projected

LARGEST = 65504.0  # in fp16, to which diffusers clips what a block returns
NAMES = ("text", "image")
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

Rows = Sequence[Sequence[Tensor]]
"""Of one block: the six vectors (B, E) of each stream. They are shift, scale and gate of attention, then of the MLP."""


def why_not(block: Any) -> str | None:
    """See `seqpar.blocks`."""
    return "zero_cond_t gives the tokens of reference images another timestep" if block.zero_cond_t else None


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
    """Return text (B, l', E) and image (B, l, E) after a block. temb: (B, E). Rotary rows are complex, (l, D/2)."""
    if joint_attention_kwargs:
        raise DeclinedError(f"attention has the arguments {', '.join(joint_attention_kwargs)}")
    every = call.once("modulation", temb, lambda: modulations(call, temb))
    norm, streams = Norm("layer", block.img_norm1.eps), (encoder_hidden_states, hidden_states)
    tables = call.once("rotary", image_rotary_emb, lambda: [_real(rows) for rows in reversed(image_rotary_emb)])
    inputs = [_start(call, x, rows, norm) for x, rows in zip(streams, every[call.index], strict=True)]
    norms = (block.attn.norm_added_q, block.attn.norm_added_k), (block.attn.norm_q, block.attn.norm_k)
    outs = call.attend(
        [
            Projected(h, *call.matrices[f"{name} qkv"], block.attn.heads, block.attn.heads, _prepare(*pair, *table))
            for name, h, pair, table in zip(NAMES, inputs, norms, tables, strict=True)
        ]
    )
    after = every[call.index + 1] if call.index + 1 < len(every) else (None, None)
    text, image = (
        _finish(call, name, x, out, rows, following, norm)
        for name, x, out, rows, following in zip(NAMES, streams, outs, every[call.index], after, strict=True)
    )
    return text, image


def modulations(call: BlockCall, temb_BE: Tensor) -> list[Rows]:
    """Return the rows of all blocks, in fp32 (or fp64); each rank reads some of the weights."""
    layers = [matrices[f"{name} modulation"] for matrices in call.every for name in NAMES]
    c_BE = F.silu(temb_BE)
    made = call.spread("modulation", [len(one.weight) for one in layers], lambda i: product(c_BE, layers[i].weight))
    rows = [x if one.bias is None else x + one.bias for x, one in zip(made, layers, strict=True)]
    return [[one.chunk(6, dim=-1) for one in rows[i : i + 2]] for i in range(0, len(rows), 2)]


def _start(call: BlockCall, x_BlE: Tensor, rows: Sequence[Tensor], norm: Norm) -> Tensor:
    """Return attention's input of a stream: what the block before has left, or norm and modulation of x."""
    handed = call.handed(x_BlE)
    return norm_modulate(x_BlE, rows[0], rows[1], norm) if handed is None else handed


def _finish(
    call: BlockCall,
    name: str,
    x_BlE: Tensor,
    out_BlHD: Tensor,
    rows: Sequence[Tensor],
    following: Sequence[Tensor] | None,
    norm: Norm,
) -> Tensor:
    """Return a stream after attention and MLP. following: the rows of the next block, for which h is left."""
    _, _, gate, shift_mlp, scale_mlp, gate_mlp = rows
    matrices = call.matrices
    up, down = matrices[f"{name} up"], matrices[f"{name} down"]
    branch = matrices[f"{name} out"](out_BlHD.flatten(2))
    x, h = gate_norm_modulate(x_BlE, gate, branch, shift_mlp, scale_mlp, norm)
    branch = down(linear_gelu(h, up.weight, up.bias))
    if following is None:
        return _bounded(added(x, gate_mlp, branch))
    x, h = gate_norm_modulate(x, gate_mlp, branch, following[0], following[1], norm)
    x = _bounded(x)
    call.hand_over(x, h)
    return x


def _prepare(q_norm: Any, k_norm: Any, cos_lD2: Tensor, sin_lD2: Tensor) -> Prepare:
    """Return RMSNorm of each head, then rotary on neighbouring pairs."""
    return Prepare("rms", True, q_norm.eps, q_norm.weight, None, k_norm.weight, None, cos_lD2, sin_lD2)


def _real(rows_lD2: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of complex rotary rows."""
    return rows_lD2.real.contiguous(), rows_lD2.imag.contiguous()


def _bounded(x_BlE: Tensor) -> Tensor:
    return x_BlE.clip(-LARGEST, LARGEST) if x_BlE.dtype == torch.float16 else x_BlE


BLOCKS: dict[str, Fused] = {"QwenImageTransformerBlock": double}
