"""Stable Diffusion 3 and 3.5: double blocks of image and text (`_double.py`), some with attention of the image alone.

Faster than diffusers' own on every GPU: norm, modulation and gates are one pass, GELU and biases are part
of the products, q, k and v are one product that attention's kernel writes to the ranks that read them. Modulation is a
third of the weights: it is read once per call, an Nth on each of N ranks.
The arithmetic is diffusers' with fewer roundings: it is computed in fp32 (fp64 for fp64) and rounded once.
Source: Stability AI's Stable Diffusion 3 (arXiv 2403.03206) and 3.5, as diffusers implements them.
Letters: see `seqpar.types.protocols`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from diffusers.models import attention_processor
from torch import Tensor

from seqpar.families import Published
from seqpar.families._block import Block, BlockCall
from seqpar.families._cuts import ALONE, IMAGE, IMAGE_TEXT, OUT, TEXT, Boundary, Cuts, StepBlocks
from seqpar.families._double import (
    DOUBLE_EIGHT,
    DOUBLE_LAYERS,
    Rows,
    by_head,
    checked,
    double_work,
    entered,
    modulations,
    two_streams,
)
from seqpar.kernels.adaln import Norm, added, norm_modulate
from seqpar.types.facts import Blocks, Work
from seqpar.types.protocols import Prepare


def _sd3() -> Cuts:
    places = {
        "": Boundary(inputs={"block_controlnet_hidden_states": IMAGE}),
        "pos_embed": Boundary(outputs={0: IMAGE}),
        "context_embedder": Boundary(outputs={0: TEXT}),
        "proj_out": OUT,
    }
    attention = {"transformer_blocks.*.attn": IMAGE_TEXT, "transformer_blocks.*.attn2?": ALONE}
    return Cuts(places, attention, local=("image_proj.layers.*.attn",))  # of its IP-adapter, which is refused


ORDER = ("image", "text")  # in which attention joins them
CUTS = {"SD3Transformer2DModel": _sd3()}
STEPS = {"SD3Transformer2DModel": StepBlocks({"transformer_blocks": ("encoder_hidden_states", "hidden_states")})}
PAG = "its mask lets each token of the image read itself alone, by its place among all of them; draw without PAG"
UNSPLIT = {
    attention_processor.SD3IPAdapterJointAttnProcessor2_0: (
        "SD3's IP-adapter",
        "its attention to the picture also reads the image's keys, of which each rank has a part; "
        "call unload_ip_adapter()",
    ),
    attention_processor.PAGJointAttnProcessor2_0: ("PAG's PAGJointAttnProcessor2_0", PAG),
    attention_processor.PAGCFGJointAttnProcessor2_0: ("PAG's PAGCFGJointAttnProcessor2_0", PAG),
}
TEXT_TOKENS = 333  # tokens of a text: 77 of CLIP and 256 of T5
LAYERS = {**DOUBLE_LAYERS, "alone qkv": ("attn2.to_q", "attn2.to_k", "attn2.to_v"), "alone out": ("attn2.to_out.0",)}
EIGHT = (*DOUBLE_EIGHT, "alone qkv", "alone out")


def why_not(block: Any) -> str | None:
    if block._chunk_size is not None:
        return "they compute their MLPs in chunks"
    norm = type(block.attn.norm_q).__name__
    return None if norm in ("NoneType", "RMSNorm") else f"q and k have a {norm}"


def joint(
    call: BlockCall,
    block: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    joint_attention_kwargs: dict[str, Any] | None = None,
) -> tuple[Tensor | None, Tensor]:
    """Return text (B, l', E), or None after the last block, and image (B, l, E) after a block. temb: (B, E)."""
    checked(joint_attention_kwargs)
    every, alone = call.once("modulation", temb, lambda: _modulations(call, temb))
    x, attn, norm, h = hidden_states, block.attn, Norm("layer", block.norm2.eps), None
    if block.attn2 is not None:
        h = entered(call, x, every[call.index][0], norm, rounding=call.matrices["image qkv"].rounding)
        x = _attended_alone(call, block.attn2, x, alone[call.index], norm)
    prepares = {"image": _prepare(attn.norm_q, attn.norm_k), "text": _prepare(attn.norm_added_q, attn.norm_added_k)}
    streams = x, encoder_hidden_states
    image, text = two_streams(call, streams, every, prepares, attn.heads, norm, inputs=(h, None))
    return None if block.context_pre_only else text, image


def _attended_alone(call: BlockCall, attn: Any, x_BlE: Tensor, rows: Rows, norm: Norm) -> Tensor:
    """Return the image (B, l, E) after its gated attention to itself, which the input of joint attention does not have.

    So it comes first here: its result is used up before joint attention writes into the same memory.
    """
    shift, scale, gate = rows
    qkv = call.matrices["alone qkv"]
    h = norm_modulate(x_BlE, shift, scale, norm, rounding=qkv.rounding)
    stream = qkv.projected(h, attn.heads, _prepare(attn.norm_q, attn.norm_k))
    (out_BlE,) = call.attend([stream], only="image")
    return added(x_BlE, gate, call.matrices["alone out"](out_BlE))


def _prepare(q_norm: Any, k_norm: Any) -> Prepare:
    """Return the preparation of q and k: RMSNorm of each head in SD3.5, nothing in SD3."""
    return Prepare() if q_norm is None else by_head(q_norm, k_norm)


def _modulations(call: BlockCall, temb: Tensor) -> tuple[list[list[Rows]], list[Rows]]:
    """Return the rows of image and text in all blocks, and shift, scale and gate of the image's attention to itself.

    The latter are empty for a block without it. The last block has only scale and shift of the text, in this order.
    """
    every = modulations(call, temb, [f"{name} modulation" for name in ORDER])
    joined = [[image[:6], text if len(text) == 6 else text[::-1]] for image, text in every]
    return joined, [image[6:] for image, _ in every]


BLOCKS = {"JointTransformerBlock": Block(joint, ORDER, LAYERS, why_not, EIGHT)}


def work(config: Mapping[str, Any], text: int = TEXT_TOKENS) -> Work:
    """Return the planner's `Work` for diffusers' config; text: the number of text tokens.

    The last block returns no text. Of a second attention (3.5-medium), which the image has to itself, only the products
    are counted.
    """
    heads, dim, layers = config["num_attention_heads"], config["attention_head_dim"], config["num_layers"]
    width, area, channels = heads * dim, config["patch_size"] ** 2, config["in_channels"]
    blocks = _blocks(width, layers, config.get("dual_attention_layers") or ())
    return Work(
        width=width,
        heads=heads,
        kv_heads=heads,
        head_dim=dim,
        blocks=blocks,
        prepares=True,
        once=((channels * area, width), (width, (config.get("out_channels") or channels) * area)),
        table=sum(rows for kind in blocks for _, rows in kind.modulation * kind.count) + 2 * width,
        live=11 * width,
        text=((config["joint_attention_dim"], width),),
        conditioning=((256, width), (config["pooled_projection_dim"], width), *((width, n * width) for n in (1, 1, 2))),
        joined=(text,),
    )


def _blocks(width: int, layers: int, duals: Sequence[int]) -> tuple[Blocks, ...]:
    """Return the blocks with one attention, those with two, and the last one."""
    plain, qkv = double_work(0, width, 4 * width), (width, 3 * width)
    second = replace(plain, gemms=(*plain.gemms, qkv, (width, width)))
    dual = replace(second, modulation=((width, 9 * width), (width, 6 * width)))
    last = dual if layers - 1 in duals else plain
    count = sum(index < layers - 1 for index in duals)
    kinds = (
        replace(plain, count=layers - 1 - count),
        replace(dual, count=count),
        replace(last, count=1, apart=((qkv,),), modulation=(last.modulation[0], (width, 2 * width))),
    )
    return tuple(kind for kind in kinds if kind.count)


WORK = {"SD3Transformer2DModel": work}


SD35: Mapping[str, Any] = {"qk_norm": "rms_norm"}
LARGE = {"num_layers": 38, "num_attention_heads": 38, "caption_projection_dim": 2432, "pos_embed_max_size": 192}
MEDIUM = {"num_layers": 24, "num_attention_heads": 24, "caption_projection_dim": 1536, "pos_embed_max_size": 384}
PUBLISHED = {
    "stabilityai/stable-diffusion-3.5-large": Published(
        "StableDiffusion3Pipeline", "SD3Transformer2DModel", {**SD35, **LARGE}
    ),
    "stabilityai/stable-diffusion-3.5-medium": Published(
        "StableDiffusion3Pipeline",
        "SD3Transformer2DModel",
        {**SD35, **MEDIUM, "dual_attention_layers": tuple(range(13))},
    ),
}
