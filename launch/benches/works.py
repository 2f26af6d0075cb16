"""The operations of a released transformer, of which its ceiling is made: `Work` from the arguments of its class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from launch.baselines.released import Released
from seqpar.blocks import flux
from seqpar.types.facts import Blocks, Cross, Work


def work_of_call(model: Released) -> Work:
    """Return the operations of one call."""
    if model.theirs == "WanTransformer3DModel":
        return wan_work(model.config, model.text)
    if model.theirs == "QwenImageTransformer2DModel":
        return qwen_work(model.config)
    if model.theirs == "Flux2Transformer2DModel":
        return flux2_work(model.config)
    if model.theirs == "SD3Transformer2DModel":
        return sd3_work(model.config)
    if model.theirs == "LTXVideoTransformer3DModel":
        return ltx_work(model.config, model.text)
    if model.theirs == "LTX2VideoTransformer3DModel":
        return ltx2_work(model.config, model.text)
    return flux.work(model.config)


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


def sd3_work(config: Mapping[str, Any]) -> Work:
    """Return the operations of Stable Diffusion 3 and 3.5-large: double blocks; the last one returns no text."""
    heads, dim, layers = config["num_attention_heads"], config["attention_head_dim"], config["num_layers"]
    width, area = heads * dim, config["patch_size"] ** 2
    last = replace(_double(1, width, 4 * width), apart=(((width, 3 * width),),))
    return Work(
        width=width,
        heads=heads,
        kv_heads=heads,
        head_dim=dim,
        blocks=(
            _double(layers - 1, width, 4 * width),
            replace(last, modulation=((width, 6 * width), (width, 2 * width))),
        ),
        prepares=True,
        once=((config["in_channels"] * area, width), (width, config["out_channels"] * area)),
        table=(12 * layers - 2) * width,
        live=11 * width,
        text=((config["joint_attention_dim"], width),),
        conditioning=((256, width), (config["pooled_projection_dim"], width), *((width, n * width) for n in (1, 1, 2))),
    )


def flux2_work(config: Mapping[str, Any]) -> Work:
    """Return the operations of FLUX.2: double blocks, then parallel ones, with SwiGLU and one modulation for all."""
    heads, dim = config["num_attention_heads"], config["attention_head_dim"]
    width, hidden = heads * dim, int(heads * dim * config["mlp_ratio"])
    gemms = ((width, 3 * width), (width, width), (width, 2 * hidden), (hidden, width))
    doubles = Blocks(config["num_layers"], gemms, (4 * width, 4 * width, 3 * hidden), (gemms,))
    singles = Blocks(
        count=config["num_single_layers"],
        gemms=((width, 3 * width), (width, 2 * hidden), (width + hidden, width)),
        passes=(6 * width, 3 * hidden),
        beside=((width, 2 * hidden), (hidden, width)),
    )
    sines = ((256, width), (width, width)) * 2
    return Work(
        width=width,
        heads=heads,
        kv_heads=heads,
        head_dim=dim,
        blocks=(doubles, singles),
        prepares=True,
        once=((config["in_channels"], width), (width, config["in_channels"])),
        table=(6 + 6 + 3 + 2) * width,
        live=12 * width,
        text=((config["joint_attention_dim"], width),),
        conditioning=(*sines, *((width, n * width) for n in (6, 6, 3, 2))),
        guided=False,
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


def ltx_work(config: Mapping[str, Any], text: int = 128) -> Work:
    """Return the operations of LTX-Video: those of Wan, on latents without patches."""
    hidden = 4 * config["num_attention_heads"] * config["attention_head_dim"]
    others = {"ffn_dim": hidden, "patch_size": (1, 1, 1), "text_dim": config["caption_channels"], "freq_dim": 256}
    return wan_work({**config, **others}, text)


def ltx2_work(config: Mapping[str, Any], text: int = 1024) -> Work:
    """Return the operations of LTX-2 on the video's tokens, with those where it reads its sound and is read by it.

    Left out is what the sound's own tokens cost, which every rank computes: some hundred tokens in 5 of 19 billion
    weights.
    """
    work = ltx_work(config, text)
    width, sound = work.width, config["audio_num_attention_heads"] * config["audio_attention_head_dim"]
    crossing = ((width, sound), (sound, width), (width, 2 * sound))
    (blocks,) = work.blocks
    return replace(work, blocks=(replace(blocks, gemms=(*blocks.gemms, *crossing)),))
