"""Wan 2.1 and 2.2: video transformers whose blocks attend to the video, then to a text, and to a picture's features.

When it wins: on every GPU, over diffusers' own block, whose norms and gates are fp32 passes of their own. Norm,
modulation and gates are one pass here, and q, k and v are one product that attention's kernel writes to the ranks that
read them. Text is whole on every rank, so that attention to it exchanges nothing.
The arithmetic is diffusers' with fewer roundings: it is computed in fp32 (fp64 for fp64) and rounded once.
Source: Wan, as diffusers implements it.
Letters: see `seqpar.types.protocols`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from seqpar.kernels.adaln import Norm, gate_norm_modulate, norm_modulate
from seqpar.kernels.gelu import linear_gelu
from seqpar.types.fused import BlockCall, DeclinedError, Fused, added
from seqpar.types.protocols import Prepare, Projected, state_dtype

TEXT = 512  # tokens of the text, as diffusers' own attention has it; a picture's features come before them
STREAMS = {"WanTransformerBlock": ("image",)}
PRODUCTS = {
    "WanTransformerBlock": {
        "qkv": ("attn1.to_q", "attn1.to_k", "attn1.to_v"),
        "out": ("attn1.to_out.0",),
        "text q": ("attn2.to_q",),
        "text kv": ("attn2.to_k", "attn2.to_v"),
        "picture kv": ("attn2.add_k_proj", "attn2.add_v_proj"),
        "text out": ("attn2.to_out.0",),
        "up": ("ffn.net.0.proj",),
        "down": ("ffn.net.2",),
    }
}


def why_not(block: Any) -> str | None:
    """See `seqpar.blocks`."""
    return None


def block(
    call: BlockCall, block: Any, hidden_states: Tensor, encoder_hidden_states: Tensor, temb: Tensor, rotary_emb: Any
) -> Tensor:
    """Return the video (B, l, E) after a block.

    encoder_hidden_states: text (B, L', E), after a picture's features where the model takes some. temb: (B, 6, E).
    rotary_emb: cosines and sines (1, l, 1, D), each number twice.
    """
    if temb.dim() != 3:
        raise DeclinedError("each token has a timestep of its own")
    every = call.once("modulation", temb, lambda: modulations(call.blocks, temb))
    table = call.once("rotary", rotary_emb, lambda: _pairs(rotary_emb, state_dtype(hidden_states.dtype)))
    shift, scale, gate, *of_mlp = every[call.index]
    norm, of, x = Norm("layer", block.norm1.eps), call.matrices, hidden_states
    handed, attn = call.handed(x), block.attn1
    h = norm_modulate(x, shift, scale, norm) if handed is None else handed
    how = Prepare("rms", False, attn.norm_q.eps, attn.norm_q.weight, None, attn.norm_k.weight, None, *table)
    (out,) = call.attend([Projected(h, *of["qkv"], attn.heads, attn.heads, how)])
    x, h = _to_text(x, gate, of["out"](out.flatten(2)), block.norm2)
    branch = of["text out"](_attended(call, block.attn2, h, encoder_hidden_states))
    return _finished(call, x, branch, of_mlp, every[call.index + 1 :], norm)


def _finished(
    call: BlockCall,
    x_BlE: Tensor,
    branch_BlE: Tensor,
    of_mlp: Sequence[Tensor],
    after: Sequence[Sequence[Tensor]],
    norm: Norm,
) -> Tensor:
    """Return the video after attention to the text, the branch, and after the MLP. after: rows of the next blocks."""
    shift, scale, gate = of_mlp
    x, h = gate_norm_modulate(x_BlE, torch.ones_like(gate[:1]), branch_BlE, shift, scale, norm)
    branch = call.matrices["down"](linear_gelu(h, *call.matrices["up"]))
    if not after:
        return added(x, gate, branch)
    x, h = gate_norm_modulate(x, gate, branch, after[0][0], after[0][1], norm)
    call.hand_over(x, h)
    return x


def modulations(blocks: Sequence[Any], temb_B6E: Tensor) -> list[tuple[Tensor, ...]]:
    """Return shift, scale and gate (B, E) of attention, then of the MLP, of all blocks; in fp32 (or fp64)."""
    wide = state_dtype(temb_B6E.dtype)
    tables_N16E = torch.stack([one.scale_shift_table.to(wide) for one in blocks])
    return [rows.unbind(1) for rows in (tables_N16E + temb_B6E.to(wide)).unbind(0)]


def _to_text(x_BlE: Tensor, gate_BE: Tensor, branch_BlE: Tensor, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """Return x + gate * branch, and its norm with weight and bias, where the model has one, for attention to text."""
    if not isinstance(norm, nn.LayerNorm):
        x = added(x_BlE, gate_BE, branch_BlE)
        return x, x
    weight, bias = (one.to(gate_BE.dtype)[None] for one in (norm.weight, norm.bias))
    return gate_norm_modulate(x_BlE, gate_BE, branch_BlE, bias, weight - 1, Norm("layer", norm.eps))


def _attended(call: BlockCall, attention: Any, h_BlE: Tensor, text_BLE: Tensor) -> Tensor:
    """Return attention (B, l, E) to the text, plus attention to a picture's features where the model has layers."""
    of, heads = call.matrices, (attention.heads, -1)
    q = attention.norm_q(of["text q"](h_BlE)).unflatten(2, heads)
    count = text_BLE.shape[1] - TEXT if "picture kv" in of else 0
    parts = [(text_BLE[:, count:], of["text kv"], attention.norm_k)]
    if "picture kv" in of:
        parts.append((text_BLE[:, :count], of["picture kv"], attention.norm_added_k))
    outs = []
    for tokens, matrix, norm in parts:
        k, v = matrix(tokens).chunk(2, dim=-1)
        outs.append(call.local(q, norm(k).unflatten(2, heads), v.unflatten(2, heads)))
    return sum(outs[1:], outs[0]).flatten(2)


def _pairs(rows: tuple[Tensor, Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosines and sines (l, D/2) of rotary rows (1, l, 1, D) that hold each number twice."""
    cos, sin = rows
    return cos[0, :, 0, 0::2].to(dtype).contiguous(), sin[0, :, 0, 1::2].to(dtype).contiguous()


BLOCKS: dict[str, Fused] = {"WanTransformerBlock": block}
