"""Chroma: the blocks of FLUX.1 (`flux.py`), whose modulation is given to them: one network makes that of all blocks.

Faster than diffusers' own on every GPU: norm, modulation and gates are one pass, GELU and biases are
part of the products, and a single block's two inputs are never concatenated. A block knows no modulation but its own,
so it makes its own input, which reads the tokens once more than FLUX.1 does: 2 E bytes per token.
The arithmetic is diffusers' with fewer roundings: it is computed in fp32 (fp64 for fp64) and rounded once.
Source: lodestones' Chroma, as diffusers implements it.
Letters: see `seqpar.types.protocols`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from seqpar.families import Pipelines, Published, flux
from seqpar.families._block import Block, BlockCall, rounding_for
from seqpar.families._cuts import Boundary, Cuts, StepBlocks
from seqpar.families._double import (
    DOUBLE_EIGHT,
    DOUBLE_LAYERS,
    NAMES,
    PARALLEL_EIGHT,
    PARALLEL_LAYERS,
    branch,
    by_head,
    checked,
    following,
    of_both,
    pairs,
    two_streams,
)
from seqpar.families._masks import JOINED, MOST, Keys, Prepared, keys_of, mask_code
from seqpar.kernels.adaln import Norm, norm_modulate
from seqpar.types.facts import Work


def _chroma() -> Cuts:
    """Return FLUX's cuts; its blocks make a mask for queries and keys of one for all tokens, which attention takes."""
    cuts = flux.CUTS["FluxTransformer2DModel"]
    zeros = {"time_text_embed.guidance_proj": Boundary(numbers=("timesteps",))}
    joint = {path: replace(joint, masked=True) for path, joint in cuts.attention.items()}
    return Cuts({**cuts.places, **zeros}, joint, {MASK: JOINED}, prepare=_prepare, keys=_keys, calls_twice=True)


MASK = "attention_mask"


def _prepare(call: Prepared) -> None:
    """Drop a full mask. Note how many tokens at the end of the text are padding, where attention can weigh it so."""
    batch, text = call.arguments["encoder_hidden_states"].shape[:2]
    tokens, mask = text + call.arguments["hidden_states"].shape[1], call.mask(MASK)
    weighs = call.moves_only and mask is not None and mask.shape[1] == tokens and len(mask) in (1, batch)
    code = mask_code(call, MASK, lambda mask: weighs and _padding(mask, text), (weighs, text))
    if code:
        call.drop(MASK)
        call.note = code >> 2


def _padding(mask: Tensor, text: int) -> int:
    """Return how many zeros a mask has, if they are one run that ends where the text ends, identical in all rows.

    mask: (B, L) floating ones and zeros; others return 0, because bools leave padding out, so that it has no weight. So
    does a single zero: not every kernel attends to one key.
    """
    if not mask.is_floating_point() or mask.dim() > 2:
        return 0
    zeros = (mask[0] == 0).byte()
    first, count = torch.stack([zeros.argmax(), zeros.sum()]).tolist()
    place = torch.arange(mask.shape[1], device=mask.device)
    alike = bool(((mask == 0) == ((place >= first) & (place < first + count))).all())
    return count if alike and first + count == text and 1 < count < MOST else 0


def _keys(arguments: dict[str, Any], padding: Any) -> Keys:
    if (mask := arguments.get(MASK)) is None:
        return Keys(padding=padding or 0)
    arguments[MASK] = None
    return Keys({JOINED: keys_of(mask, JOINED)})


CUTS = {"ChromaTransformer2DModel": _chroma()}
STEPS = {
    "ChromaTransformer2DModel": StepBlocks(
        {
            "transformer_blocks": ("encoder_hidden_states", "hidden_states"),
            "single_transformer_blocks": ("hidden_states",),
        }
    )
}
PIPELINES = Pipelines(sigmas="Chroma")


def double(
    call: BlockCall,
    block: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    image_rotary_emb: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    joint_attention_kwargs: dict[str, Any] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return text (B, l', E) and image (B, l, E) after a block.

    temb: (B, 12, E), the rows of the image, then those of the text. image_rotary_emb: cosines and sines of text and
    image, (l' + l, D), each number twice. attention_mask: the cuts name the transformer's own, which counts.
    """
    checked(joint_attention_kwargs)
    image, text = temb[:, :6].unbind(1), temb[:, 6:].unbind(1)
    known = [(text, image)] * (call.index + 1)  # the last one is this block's: those of later blocks are not known
    rows, count = pairs(call, image_rotary_emb, hidden_states), encoder_hidden_states.shape[1]
    prepares = of_both(block.attn, [part[:count] for part in rows], [part[count:] for part in rows])
    norm = Norm("layer", block.norm2.eps)
    return two_streams(call, (encoder_hidden_states, hidden_states), known, prepares, block.attn.heads, norm)


def single(
    call: BlockCall,
    block: Any,
    hidden_states: Tensor,
    temb: Tensor,
    image_rotary_emb: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    joint_attention_kwargs: dict[str, Any] | None = None,
) -> Tensor:
    """Return text and image (B, l' + l, E), one stream, after a block. temb: (B, 3, E). See `double`."""
    checked(joint_attention_kwargs)
    (shift, scale, gate), norm, of = temb.unbind(1), Norm("layer", block.norm.norm.eps), call.matrices
    h = norm_modulate(hidden_states, shift, scale, norm, rounding=rounding_for(of, "qkv", "up"))
    how = by_head(block.attn.norm_q, block.attn.norm_k, *pairs(call, image_rotary_emb, hidden_states))
    both = of["out"].split_inputs(block.attn.inner_dim)
    of_block = branch(call, h, how, block.attn.heads, of["qkv"], of["up"].gelu, both)
    x, _ = following(hidden_states, gate, of_block, (), norm)
    return x


def _without_modulation(layers: Mapping[str, Sequence[str]]) -> dict[str, Sequence[str]]:
    return {name: paths for name, paths in layers.items() if not name.endswith("modulation")}


BLOCKS = {
    "ChromaTransformerBlock": Block(double, NAMES, _without_modulation(DOUBLE_LAYERS), eight=DOUBLE_EIGHT),
    "ChromaSingleTransformerBlock": Block(single, NAMES, _without_modulation(PARALLEL_LAYERS), eight=PARALLEL_EIGHT),
}


def work(config: Mapping[str, Any], text: int = flux.TEXT_TOKENS) -> Work:
    """Return the planner's `Work` for diffusers' config: FLUX.1's, whose modulation one network of few layers makes."""
    others = {"guidance_embeds": False, "pooled_projection_dim": config["joint_attention_dim"]}
    alike = flux.work({**config, **others}, text)
    hidden, width = config["approximator_hidden_dim"], alike.width
    layers = ((hidden, hidden),) * (2 * config["approximator_layers"])
    return replace(
        alike,
        blocks=tuple(replace(kind, modulation=()) for kind in alike.blocks),
        conditioning=((config["approximator_num_channels"], hidden), *layers, (hidden, width)),
        guided=True,
    )


WORK = {"ChromaTransformer2DModel": work}


PUBLISHED = {"lodestones/Chroma1-HD": Published("ChromaPipeline", "ChromaTransformer2DModel")}
