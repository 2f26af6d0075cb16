"""Krea 2: blocks of one stream, text before the image, whose attention has fewer heads of keys and values, and a gate.

Faster than diffusers' own on every GPU: norm, modulation and gates are one pass, SwiGLU and the gate of
attention's output are one each. Keys and values stay the 12 heads that they are: diffusers repeats them for the 48 of
the queries. Attention's gate is a product that runs while keys and values travel.
The arithmetic is diffusers' with fewer roundings: it is computed in fp32 (fp64 for fp64) and rounded once.
Source: Krea 2, as diffusers implements it.
Letters: see `seqpar.types.protocols`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seqpar.families import Pipelines, Published
from seqpar.families._block import EIGHT, Block, BlockCall, reads_next, rounding_for, unrounded
from seqpar.families._cuts import IMAGE, OUT, Boundary, CutJoined, Cuts, CutTokens, Joint, StepBlocks
from seqpar.families._double import NAMES, pairs
from seqpar.families._masks import Prepared, shorten
from seqpar.families._tiny import Tiny
from seqpar.kernels.activations import sigmoid_gate
from seqpar.kernels.adaln import Norm, added, gate_norm_modulate, norm_modulate
from seqpar.types.facts import Blocks, Work
from seqpar.types.protocols import Prepare, state_dtype


def _krea2() -> Cuts:
    inputs = {
        "hidden_states": IMAGE,
        "encoder_hidden_states": CutTokens("text"),  # the text's own blocks attend to it alone
        "position_ids": CutJoined(("text", "image")),
    }
    joint = {
        "text_fusion.refiner_blocks.*.attn": Joint(("text",), masked=True),
        "transformer_blocks.*.attn": Joint(("text", "image"), masked=True),
    }
    places, local = {"": Boundary(inputs), "final_layer": OUT}, ("text_fusion.layerwise_blocks.*.attn",)
    return Cuts(places, joint, {MASK: "text"}, prepare=_prepare, local=local, calls_twice=True)


MASK = "encoder_attention_mask"


def _prepare(call: Prepared) -> None:
    """Leave padding out wherever it lies, if the rows of the text's places are all equal, and drop a full mask."""
    if (mask := call.arguments.get(MASK)) is None:
        return
    if mask.is_floating_point():
        raise ValueError(f"{MASK} is floating, and attention would add its numbers to scores; pass a mask of bool")
    total, rows = mask.shape[1] if mask.dim() > 1 else 0, call.arguments.get("position_ids")

    def are_equal() -> bool:
        if not isinstance(rows, Tensor) or len(rows) < total:
            return False
        text = rows[:total]
        return bool(call.read(rows, lambda: _are_equal(text), total))

    full = shorten(call, MASK, "encoder_hidden_states", max(4, call.ranks), are_equal)
    tokens = call.arguments[MASK].shape[1] if mask.dim() > 1 else 0
    if tokens < total and isinstance(rows, Tensor):
        call.cut(position_ids=torch.cat([rows[:tokens], rows[total:]]))
    if full:
        call.drop(MASK)


def _are_equal(rows: Tensor) -> int:
    return int((rows == rows[:1]).all().item())


CUTS = {"Krea2Transformer2DModel": _krea2()}
STEPS = {"Krea2Transformer2DModel": StepBlocks({"transformer_blocks": ("hidden_states",)})}
PIPELINES = Pipelines(sigmas="Krea2", distilled={"Krea2": "is_distilled"})
LAYERS = {
    "qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "gate": ("attn.to_gate",),
    "out": ("attn.to_out.0",),
    "up": ("ff.gate", "ff.up"),
    "down": ("ff.down",),
}
TEXT = 64  # tokens of a text: a usual prompt's, without padding


class BlockRows(NamedTuple):
    """What the norms of one block need: scale, shift and gate of attention, then of SwiGLU, (B, E), and weights."""

    rows: Sequence[Tensor]
    norm: Norm
    norm_mlp: Norm
    q_weight: Tensor
    k_weight: Tensor


def block(
    call: BlockCall,
    block: Any,
    hidden_states: Tensor,
    temb: Tensor,
    image_rotary_emb: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
) -> Tensor:
    """Return text and image (B, l' + l, E), one stream, after a block.

    temb: (B, 1, 6 E), of all blocks. image_rotary_emb: cosines and sines (l' + l, D), each number twice.
    attention_mask: the cuts name the transformer's own, which counts.
    """
    every = call.once("rows", temb, lambda: _rows(call.blocks, temb))
    x, mine, of, attn = hidden_states, every[call.index], call.matrices, block.attn
    (scale, shift, *_), h = mine.rows, call.handed(x)
    if h is None:
        h = norm_modulate(x, shift, scale, mine.norm, rounding=rounding_for(of, "qkv", "gate"))
    cos, sin = pairs(call, image_rotary_emb, x)
    how = Prepare("rms", True, attn.norm_q.eps, mine.q_weight, None, mine.k_weight, None, cos, sin)
    gates = list[Tensor]()
    stream = of["qkv"].projected(h, attn.num_heads, how, attn.num_kv_heads)
    (out,) = call.attend([stream], beside=lambda: gates.append(of["gate"](h)))
    branch = of["out"](sigmoid_gate(unrounded(out), *gates))
    return _finished(call, x, branch, every)


def _finished(call: BlockCall, x_BlE: Tensor, branch_BlE: Tensor, every: Sequence[BlockRows]) -> Tensor:
    """Return the tokens after attention, the branch, and after SwiGLU; the next block's input is left for it."""
    mine, of = every[call.index], call.matrices
    _, _, gate, scale_mlp, shift_mlp, gate_mlp = mine.rows
    up, down = of["up"], of["down"]
    x, h = gate_norm_modulate(x_BlE, gate, branch_BlE, shift_mlp, scale_mlp, mine.norm_mlp, rounding=up.rounding)
    branch = down(up.swiglu(h, down))
    if call.index + 1 == len(every):
        return added(x, gate_mlp, branch)
    after = every[call.index + 1]
    scale, shift, *_ = after.rows
    rounding = reads_next(call, "qkv", "gate")
    x, h = gate_norm_modulate(x, gate_mlp, branch, shift, scale, after.norm, rounding=rounding)
    call.hand_over(x, h)
    return x


def _rows(blocks: Sequence[Any], temb: Tensor) -> list[BlockRows]:
    """Return the modulation of all blocks, whose tables are added to temb, and weights of norms, which are 1 + theirs.

    They are in fp32 (or fp64); each kind takes one addition for all blocks.
    """
    wide = state_dtype(temb.dtype)
    tables = torch.stack([one.scale_shift_table for one in blocks]).to(wide)
    rows_NB6E = tables[:, None] + temb.to(wide).view(len(temb), 6, -1)
    norms_N2E, of_heads_N2D = (
        torch.stack([part.weight for one in parts for part in one]).to(wide).unflatten(0, (-1, 2)) + 1
        for parts in ([(x.norm1, x.norm2) for x in blocks], [(x.attn.norm_q, x.attn.norm_k) for x in blocks])
    )
    return [
        BlockRows(rows.unbind(1), Norm("rms", one.norm1.eps, first), Norm("rms", one.norm2.eps, second), *of_heads)
        for one, rows, (first, second), of_heads in zip(blocks, rows_NB6E, norms_N2E, of_heads_N2D, strict=True)
    ]


BLOCKS = {"Krea2TransformerBlock": Block(block, NAMES, LAYERS, eight=(*EIGHT, "gate"))}


def work(config: Mapping[str, Any], text: int = TEXT) -> Work:
    """Return the planner's `Work` for diffusers' config; text: the number of text tokens.

    Of the blocks of the text alone, their products are counted.
    """
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    dim, layers = config["attention_head_dim"], config["num_layers"]
    width, hidden, channels = heads * dim, config["intermediate_size"], config["in_channels"]
    gemms = ((width, width + 2 * groups * dim), (width, width), (width, width), (width, 2 * hidden), (hidden, width))
    passes = (3 * width, 4 * width, 4 * width, 3 * hidden)
    return Work(
        width=width,
        heads=heads,
        kv_heads=groups,
        head_dim=dim,
        blocks=(Blocks(layers, gemms, passes, beside=((width, width),)),),
        prepares=True,
        once=((channels, width), (width, channels)),
        table=6 * width * layers,
        live=4 * width + 2 * hidden,
        text=_text(config, width),
        conditioning=((config["timestep_embed_dim"], width), (width, width), (width, 6 * width)),
        joined=(text,),
    )


def _text(config: Mapping[str, Any], width: int) -> tuple[tuple[int, int], ...]:
    """Return the products of a text token: blocks on each of its layers, blocks on their sum, and the projection."""
    inner, hidden, layers = (config[name] for name in ("text_hidden_dim", "text_intermediate_size", "num_text_layers"))
    kept = inner * config["text_num_key_value_heads"] // config["text_num_attention_heads"]
    outputs = ((inner, 3 * inner + 2 * kept), (inner, 2 * hidden), (hidden, inner))
    rows = layers * config["num_layerwise_text_blocks"] + config["num_refiner_text_blocks"]
    return (*((i, rows * o) for i, o in outputs), (layers, inner), (inner, width), (width, width))


WORK = {"Krea2Transformer2DModel": work}
PUBLISHED = {
    "krea/Krea-2-Raw": Published("Krea2Pipeline", "Krea2Transformer2DModel"),
    "krea/Krea-2-Turbo": Published("Krea2Pipeline", "Krea2Transformer2DModel", index={"is_distilled": True}),
}
TINY = {
    "Krea2Transformer2DModel": Tiny(
        inputs=lambda config, random: {
            "encoder_hidden_states": random(2, 7, config["num_text_layers"], config["text_hidden_dim"]),
            "encoder_attention_mask": torch.arange(7) < torch.tensor([[7], [5]]),
            "position_ids": torch.cat([torch.zeros(7, 3), torch.ones(15, 3).cumsum(0)]).double(),
        }
    )
}
