"""CogVideoX: blocks whose layers read text and video alike, of which only the modulation differs.

Faster than diffusers' own on every GPU: text and video are one stream from block to block: each norm with
its modulation and gate is one pass, and each layer one product, for both. The norms' weights need no further pass: the
kernel has the one, and the bias is added to the shift, once per call for all blocks.
The arithmetic is diffusers' with fewer roundings: it is computed in fp32 (fp64 for fp64) and rounded once.
Source: CogVideoX (arXiv 2408.06072), as diffusers implements it.
Letters: see `seqpar.types.protocols`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from seqpar.families import Pipelines, Published, latents
from seqpar.families._block import EIGHT, Block, BlockCall, Input, reads_next
from seqpar.families._cuts import IMAGE, OUT, TEXT, TEXT_IMAGE, Boundary, Cuts, CutTokens, StepBlocks
from seqpar.families._double import NAMES, checked, modulations, pairs
from seqpar.families._tiny import Tiny
from seqpar.kernels.adaln import Norm, added, gate_norm_modulate, norm_modulate
from seqpar.types.facts import Blocks, Work
from seqpar.types.protocols import Prepare


def _cogvideox() -> Cuts:
    places = {
        "": Boundary(inputs={"image_rotary_emb": CutTokens("image", dim=0)}),
        "transformer_blocks.0": Boundary(inputs={"hidden_states": IMAGE, "encoder_hidden_states": TEXT}),
        "proj_out": OUT,
    }
    return Cuts(places, {"transformer_blocks.*.attn1": TEXT_IMAGE})


CUTS = {"CogVideoXTransformer3DModel": _cogvideox()}
STEPS = {"CogVideoXTransformer3DModel": StepBlocks({"transformer_blocks": ("hidden_states", "encoder_hidden_states")})}
PIPELINES = Pipelines(one_result=("CogVideoXImageToVideo",))
TEXT_TOKENS = 226  # tokens to which the pipeline pads a text
LAYERS = {
    "modulation": ("norm1.linear",),
    "mlp modulation": ("norm2.linear",),
    "qkv": ("attn1.to_q", "attn1.to_k", "attn1.to_v"),
    "out": ("attn1.to_out.0",),
    "up": ("ff.net.0.proj",),
    "down": ("ff.net.2",),
}


def why_not(block: Any) -> str | None:
    if getattr(block.ff.net[0], "approximate", None) != "tanh":
        return f"their MLPs have a {type(block.ff.net[0]).__name__} other than GELU by its tanh formula"
    return "their norms have no weights" if block.norm1.norm.weight is None else None


class NormRows(NamedTuple):
    """A norm and what follows it: shift, scale and gate, (2 B, E) each, of the video and then of the text."""

    norm: Norm
    shift: Tensor
    scale: Tensor
    gate: Tensor


class Tokens(NamedTuple):
    """Text and video as one stream (B, l' + l, E), the input of attention made of it, and the row of each token."""

    x: Tensor
    h: Input
    of_token: Tensor


def block(
    call: BlockCall,
    block: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    attention_kwargs: dict[str, Any] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return video (B, l, E) and text (B, l', E) after a block: views of one stream, which is left for the next one.

    temb: (B, C). image_rotary_emb: cosines and sines of the video, (l, D), each number twice; None: there are none.
    """
    checked(attention_kwargs)
    every = call.once("modulation", temb, lambda: _modulations(call, temb))
    tokens = _joined(call, encoder_hidden_states, hidden_states, every[call.index][0])
    attn, of, count = block.attn1, call.matrices, encoder_hidden_states.shape[1]
    how = _prepare(call, attn, image_rotary_emb, count, tokens.x)
    (out,) = call.attend([of["qkv"].projected(tokens.h, attn.heads, how)])
    tokens = _finished(call, tokens, of["out"](out), every)
    text, video = tokens.x[:, :count], tokens.x[:, count:]
    if call.index + 1 < len(every):
        call.hand_over(video, (text, tokens))
    return video, text


def _finished(call: BlockCall, tokens: Tokens, branch_BlE: Tensor, every: list[tuple[NormRows, NormRows]]) -> Tokens:
    """Return the tokens after attention, the branch, and after the MLP, with the next block's input."""
    (mine, mlp), of, index = every[call.index], call.matrices, tokens.of_token
    up, down, rows = of["up"], of["down"], (mlp.shift, mlp.scale, mlp.norm)
    x, h = gate_norm_modulate(tokens.x, mine.gate, branch_BlE, *rows, index_Bl=index, rounding=up.rounding)
    branch = down(up.gelu(h, down))
    if call.index + 1 == len(every):
        return tokens._replace(x=added(x, mlp.gate, branch, index_Bl=index))
    (after, _), rounding = every[call.index + 1], reads_next(call, "qkv")
    rows = after.shift, after.scale, after.norm
    x, h = gate_norm_modulate(x, mlp.gate, branch, *rows, index_Bl=index, rounding=rounding)
    return Tokens(x, h, index)


def _joined(call: BlockCall, text: Tensor, video: Tensor, rows: NormRows) -> Tokens:
    """Return the tokens as the last block has left them for these very tensors, or made of them."""
    left, tokens = call.handed(video) or (None, None)
    if tokens is not None and left is text:
        return tokens
    counts, each = (text.shape[1], video.shape[1]), len(rows.shift) // 2  # one for all videos, or one a video
    of_video = (torch.arange(len(video), dtype=torch.int32, device=video.device) % each)[:, None]
    index = torch.cat([(of_video + each).expand(-1, counts[0]), of_video.expand(-1, counts[1])], dim=1)
    x = torch.cat([text, video], dim=1)
    rounding = call.matrices["qkv"].rounding
    h = norm_modulate(x, rows.shift, rows.scale, rows.norm, index_Bl=index, rounding=rounding)
    return Tokens(x, h, index)


def _prepare(call: BlockCall, attn: Any, rows: tuple[Tensor, Tensor] | None, text: int, x_BlE: Tensor) -> Prepare:
    """Return the preparation of q and k: LayerNorm of each head, then rotary, which leaves tokens of the text alone."""
    q, k = attn.norm_q, attn.norm_k
    how = Prepare("layer", True, q.eps, q.weight, q.bias, k.weight, k.bias)
    if rows is None:
        return how
    cos, sin = call.once("rows of all tokens", rows, lambda: _behind_text(text, *pairs(call, rows, x_BlE)))
    return replace(how, cos_lD2=cos, sin_lD2=sin)


def _behind_text(count: int, cos_lD2: Tensor, sin_lD2: Tensor) -> tuple[Tensor, Tensor]:
    """Return rotary rows with those of so many tokens before them, which turn nothing."""
    cos, sin = (F.pad(rows, (0, 0, count, 0), value=angle) for rows, angle in ((cos_lD2, 1.0), (sin_lD2, 0.0)))
    return cos, sin


def _modulations(call: BlockCall, temb: Tensor) -> list[tuple[NormRows, NormRows]]:
    """Return what belongs to the two norms of every block, in fp32 (or fp64); all blocks take a few passes together.

    The norm's bias b before the modulation, (n w + b) (1 + scale) + shift, is a part of the shift after it.
    """
    norms = [part.norm for one in call.blocks for part in (one.norm1, one.norm2)]
    rows = modulations(call, temb, ["modulation", "mlp modulation"], len(norms[0].weight))
    rows_N2xBE = torch.stack([torch.stack(vectors) for each in rows for vectors in each]).unflatten(1, (2, 3))
    shift, scale, gate = (part.flatten(1, 2) for part in rows_N2xBE.unbind(2))  # those of the video come first
    biases_NE = torch.stack([norm.bias for norm in norms]).to(shift.dtype)
    shift = torch.addcmul(shift + biases_NE[:, None], scale, biases_NE[:, None])
    every = [
        NormRows(Norm("layer", norm.eps, norm.weight), *three)
        for norm, *three in zip(norms, shift, scale, gate, strict=True)
    ]
    return list(zip(every[0::2], every[1::2], strict=True))


BLOCKS = {"CogVideoXBlock": Block(block, NAMES, LAYERS, why_not, EIGHT)}


def work(config: Mapping[str, Any], text: int = TEXT_TOKENS) -> Work:
    """Return the planner's `Work` for diffusers' config; text: the number of text tokens.

    Text and video share the layers of a block, but for those of the modulation.
    """
    heads, dim, layers = config["num_attention_heads"], config["attention_head_dim"], config["num_layers"]
    width, inner, channels = heads * dim, config["time_embed_dim"], config["in_channels"]
    area = config["patch_size"] ** 2 * (config.get("patch_size_t") or 1)
    gemms = ((width, 3 * width), (width, width), (width, 4 * width), (4 * width, width))
    return Work(
        width=width,
        heads=heads,
        kv_heads=heads,
        head_dim=dim,
        blocks=(Blocks(layers, gemms, (4 * width, 4 * width), modulation=((inner, 6 * width),) * 2),),
        prepares=True,
        once=((channels * area, width), (width, (config.get("out_channels") or channels) * area)),
        table=12 * layers * width,
        live=11 * width,
        text=((config["text_embed_dim"], width),),
        conditioning=((width, inner), (inner, inner), (inner, 2 * width)),
        joined=(text,),
    )


WORK = {"CogVideoXTransformer3DModel": work}
LARGE = {"num_attention_heads": 48, "num_layers": 42, "use_rotary_positional_embeddings": True}
PUBLISHED = {
    "THUDM/CogVideoX-2b": Published("CogVideoXPipeline", "CogVideoXTransformer3DModel", vae=latents(frames=4)),
    "THUDM/CogVideoX-5b": Published("CogVideoXPipeline", "CogVideoXTransformer3DModel", LARGE, latents(frames=4)),
    "THUDM/CogVideoX-5b-I2V": Published(
        "CogVideoXImageToVideoPipeline",
        "CogVideoXTransformer3DModel",
        {**LARGE, "in_channels": 32, "use_learned_positional_embeddings": True},
        latents(frames=4),
    ),
}
TINY = {
    "CogVideoXTransformer3DModel": Tiny(
        {"sample_width": 10, "sample_height": 6, "sample_frames": 9, "max_text_seq_length": 7},
        lambda config, random: {"hidden_states": random(2, 3, config["in_channels"], 6, 10)},
    )
}
