"""The operations of transformers that have no model of ours: `Work` from the arguments of diffusers' classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from seqpar.types.facts import Blocks, Cross, Work


def _double(count: int, width: int, hidden: int) -> Blocks:
    """Return blocks in which text and image have their own weights and attend together."""
    gemms = ((width, 3 * width), (width, width), (width, hidden), (hidden, width))
    passes = (4 * width, 4 * width, 2 * hidden)
    return Blocks(count, gemms, passes, (gemms,), ((width, 6 * width), (width, 6 * width)))


def qwen_work(config: Mapping[str, Any]) -> Work:
    """Return the operations of Qwen-Image: double blocks only."""
    heads, dim, layers = config["num_attention_heads"], config["attention_head_dim"], config["num_layers"]
    width, patch = heads * dim, config["patch_size"]
    return Work(
        width=width,
        heads=heads,
        kv_heads=heads,
        head_dim=dim,
        blocks=(_double(layers, width, 4 * width),),
        prepares=True,
        once=((config["in_channels"], width), (width, patch * patch * config["out_channels"])),
        table=(12 * layers + 2) * width,
        live=11 * width,
        text=((config["joint_attention_dim"], width),),
        conditioning=((256, width), (width, width), (width, 2 * width)),
    )


def wan_work(config: Mapping[str, Any], text: int = 512) -> Work:
    """Return the operations of Wan 2.1: self-attention, cross-attention to the text, and an MLP."""
    heads, dim, layers = config["num_attention_heads"], config["attention_head_dim"], config["num_layers"]
    width, hidden = heads * dim, config["ffn_dim"]
    frames, rows, columns = config["patch_size"]
    area = frames * rows * columns
    blocks = Blocks(
        layers,
        ((width, 3 * width), (width, width), (width, width), (width, width), (width, hidden), (hidden, width)),
        (4 * width, 4 * width, 4 * width, 2 * hidden),
        cross=Cross(text, ((width, 2 * width),)),
    )
    return Work(
        width=width,
        heads=heads,
        kv_heads=heads,
        head_dim=dim,
        blocks=(blocks,),
        prepares=True,
        once=((config["in_channels"] * area, width), (width, config["out_channels"] * area)),
        table=6 * width * layers + 2 * width,
        live=4 * width + 2 * hidden,
        text=((config["text_dim"], width), (width, width)),
        conditioning=((config["freq_dim"], width), (width, width), (width, 6 * width)),
    )


def sd3_work(config: Mapping[str, Any]) -> Work:
    """Return the operations of Stable Diffusion 3.5 large: double blocks; in the last, text gives keys and values."""
    heads, dim, layers = config["num_attention_heads"], config["attention_head_dim"], config["num_layers"]
    width, area = heads * dim, config["patch_size"] ** 2
    most = _double(layers - 1, width, 4 * width)
    last = replace(most, count=1, apart=(most.gemms[:1],), modulation=((width, 6 * width), (width, 2 * width)))
    return Work(
        width=width,
        heads=heads,
        kv_heads=heads,
        head_dim=dim,
        blocks=(most, last),
        prepares=True,
        once=((config["in_channels"] * area, width), (width, config["out_channels"] * area)),
        table=(12 * layers - 2) * width,
        live=11 * width,
        text=((config["joint_attention_dim"], width),),
        conditioning=(
            (256, width),
            (width, width),
            (config["pooled_projection_dim"], width),
            (width, width),
            (width, 2 * width),
        ),
    )


def cogvideo_work(config: Mapping[str, Any]) -> Work:
    """Return the operations of CogVideoX: text and video share all weights but those of the modulation."""
    heads, dim, layers = config["num_attention_heads"], config["attention_head_dim"], config["num_layers"]
    width, area, condition = heads * dim, config["patch_size"] ** 2, config["time_embed_dim"]
    blocks = Blocks(
        layers,
        ((width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)),
        (4 * width, 4 * width, 8 * width),
        modulation=((condition, 6 * width),) * 2,
    )
    return Work(
        width=width,
        heads=heads,
        kv_heads=heads,
        head_dim=dim,
        blocks=(blocks,),
        prepares=True,
        once=((config["in_channels"] * area, width), (width, config["out_channels"] * area)),
        table=(12 * layers + 2) * width,
        live=11 * width,
        text=((config["text_embed_dim"], width),),
        conditioning=((width, condition), (condition, condition), (condition, 2 * width)),
    )
