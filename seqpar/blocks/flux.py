"""FLUX.1: double blocks of text and image (`_double.py`), then single blocks of both, whose MLP is beside attention.

When it wins: on every GPU, over diffusers' own blocks, where the model of ours (`seqpar.models.flux`) does not compute:
with a ControlNet's residuals, for example. Norm, modulation and gates are one pass, GELU and biases are part of the
products, and between single blocks the tokens stay one stream.
The arithmetic is diffusers' with fewer roundings: it is computed in fp32 (fp64 for fp64) and rounded once.
Source: Black Forest Labs' FLUX.1, as diffusers implements it.
Letters: see `seqpar.types.protocols`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from seqpar.blocks._double import NAMES, Rows, bounded, modulations, two_streams
from seqpar.kernels.adaln import Norm, gate_norm_modulate, norm_modulate
from seqpar.kernels.gelu import linear_gelu
from seqpar.types.fused import BlockCall, DeclinedError, Fused, added
from seqpar.types.protocols import Given, Prepare, state_dtype

STREAMS = {"FluxTransformerBlock": NAMES, "FluxSingleTransformerBlock": NAMES}
PRODUCTS = {
    "FluxTransformerBlock": {
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
    },
    "FluxSingleTransformerBlock": {
        "modulation": ("norm.linear",),
        "qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
        "up": ("proj_mlp",),
        "out": ("proj_out",),  # the columns of attention, then those of the MLP
    },
}


def why_not(block: Any) -> str | None:
    """See `seqpar.blocks`."""
    return None


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
    _check(joint_attention_kwargs)
    names = [f"{name} modulation" for name in NAMES]
    every = call.once("double", temb, lambda: modulations(call, temb, names, 6))
    rows, text = _rotary(call, image_rotary_emb, hidden_states), encoder_hidden_states.shape[1]
    attn = block.attn
    prepares = (
        _prepare(attn.norm_added_q, attn.norm_added_k, *(part[:text] for part in rows)),
        _prepare(attn.norm_q, attn.norm_k, *(part[text:] for part in rows)),
    )
    norm = Norm("layer", block.norm1.norm.eps)
    return two_streams(call, (encoder_hidden_states, hidden_states), every, prepares, attn.heads, norm)


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
    _check(joint_attention_kwargs)
    every = [rows for (rows,) in call.once("single", temb, lambda: modulations(call, temb, ["modulation"], 3))]
    (shift, scale, gate), norm = every[call.index], Norm("layer", block.norm.norm.eps)
    handed = call.handed(hidden_states)
    if handed is not None and handed[0] is encoder_hidden_states:
        _, x, h = handed
    else:
        x = torch.cat([encoder_hidden_states, hidden_states], dim=1)
        h = norm_modulate(x, shift, scale, norm)
    how = _prepare(block.attn.norm_q, block.attn.norm_k, *_rotary(call, image_rotary_emb, x))
    x, h = _following(x, gate, _branch(call, h, how, block.attn.heads), every[call.index + 1 :], norm)
    x = bounded(x)
    text, image = x[:, : encoder_hidden_states.shape[1]], x[:, encoder_hidden_states.shape[1] :]
    if h is not None:
        call.hand_over(image, (text, x, h))
    return text, image


def _branch(call: BlockCall, h_BlE: Tensor, how: Prepare, heads: int) -> Tensor:
    """Return the branch (B, l, E) of a single block.

    The MLP does not read attention's output, so it runs while keys and values travel. Its product and that of
    attention's output add up in one buffer, so the two inputs are never concatenated.
    """
    width, up, out = h_BlE.shape[-1], call.matrices["up"], call.matrices["out"]
    q, k, v = call.matrices["qkv"](h_BlE).unflatten(-1, (3, heads, -1)).unbind(2)
    of_attention, of_mlp = out.weight.split((q.shape[2] * q.shape[3], len(up.weight)), dim=1)
    made: list[Tensor] = []
    (attended,) = call.attend(
        [Given(q, k, v, how)], beside=lambda: made.append(F.linear(linear_gelu(h_BlE, *up), of_mlp, out.bias))
    )
    (branch_BlE,) = made
    branch_BlE.view(-1, width).addmm_(attended.reshape(-1, of_attention.shape[1]), of_attention.t())
    return branch_BlE


def _following(
    x_BlE: Tensor, gate_BE: Tensor, branch_BlE: Tensor, after: list[Rows], norm: Norm
) -> tuple[Tensor, Tensor | None]:
    """Return x + gate * branch, and the input that is made of it for the next block, if there is one."""
    if not after:
        return added(x_BlE, gate_BE, branch_BlE), None
    return gate_norm_modulate(x_BlE, gate_BE, branch_BlE, after[0][0], after[0][1], norm)


def _check(options: dict[str, Any] | None) -> None:
    if options:
        raise DeclinedError(f"attention has the arguments {', '.join(options)}")


def _rotary(call: BlockCall, rows: tuple[Tensor, Tensor], x_BlE: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines (l, D/2) of rows (l, D) that hold each number twice, once a forward."""
    dtype = state_dtype(x_BlE.dtype)
    cos, sin = call.once("rotary", rows, lambda: [part[:, 0::2].to(dtype).contiguous() for part in rows])
    return cos, sin


def _prepare(q_norm: Any, k_norm: Any, cos_lD2: Tensor, sin_lD2: Tensor) -> Prepare:
    """Return RMSNorm of each head, then rotary on neighbouring pairs."""
    return Prepare("rms", True, q_norm.eps, q_norm.weight, None, k_norm.weight, None, cos_lD2, sin_lD2)


BLOCKS: dict[str, Fused] = {"FluxTransformerBlock": double, "FluxSingleTransformerBlock": single}
