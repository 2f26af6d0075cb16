"""The operations of a released transformer, of which its ceiling is made: `Work` from the arguments of its class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launch.baselines.released import Released
from seqpar.models import flux
from seqpar.types.facts import Blocks, Cross, Work


def work_of_call(model: Released) -> Work:
    """Return the operations of one call."""
    if model.theirs == "WanTransformer3DModel":
        return wan_work(model.config, model.text)
    if model.theirs == "QwenImageTransformer2DModel":
        return qwen_work(model.config)
    recognised = flux.recognise({}, {**model.config, "_class_name": model.theirs})
    assert recognised is not None
    return flux.work(recognised[0])


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
