"""The operations of a released transformer, of which its ceiling is made: `Work` from the arguments of its class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from launch.baselines.released import Released
from seqpar.blocks import chroma, flux, krea2
from seqpar.types.facts import Blocks, Cross, Work


def work_of_call(model: Released) -> Work:
    """Return the operations of one call."""
    if model.theirs == "WanTransformer3DModel":
        return wan_work(model.config, model.text)
    if model.theirs == "QwenImageTransformer2DModel":
        return qwen_work(model.config)
    if model.theirs == "Flux2Transformer2DModel":
        return flux2_work(model.config)
    if model.theirs == "Flux3Transformer2DModel":
        return flux3_work(model.config)
    if model.theirs == "SD3Transformer2DModel":
        return sd3_work(model.config)
    if model.theirs == "ChromaTransformer2DModel":
        return chroma.work(model.config)
    if model.theirs == "CogVideoXTransformer3DModel":
        return cogvideox_work(model.config)
    if model.theirs == "Krea2Transformer2DModel":
        return krea2.work(model.config)
    if model.theirs == "ZImageTransformer2DModel":
        return z_image_work(model.config)
    if model.theirs.startswith("HunyuanVideo"):
        return hunyuan_video_work(model.config, model.text)
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


def cogvideox_work(config: Mapping[str, Any]) -> Work:
    """Return the operations of CogVideoX: blocks whose layers text and video share, with modulation of each."""
    heads, dim, layers = config["num_attention_heads"], config["attention_head_dim"], config["num_layers"]
    width, area, inner = heads * dim, config["patch_size"] ** 2, config["time_embed_dim"]
    gemms = ((width, 3 * width), (width, width), (width, 4 * width), (4 * width, width))
    passes = (4 * width, 4 * width, 8 * width)
    return Work(
        width=width,
        heads=heads,
        kv_heads=heads,
        head_dim=dim,
        blocks=(Blocks(layers, gemms, passes, modulation=((inner, 6 * width),) * 2),),
        prepares=True,
        once=((config["in_channels"] * area, width), (width, config["out_channels"] * area)),
        table=12 * layers * width,
        live=11 * width,
        text=((config["text_embed_dim"], width),),
        conditioning=((width, inner), (inner, inner), (inner, 2 * width)),
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


def flux3_work(config: Mapping[str, Any]) -> Work:
    """Return the operations of FLUX.3: parallel blocks with SwiGLU of text and image apart, then of both.

    The former attend to one stream each and are counted as if they attended to both, which adds half a percent at 4096
    and 512 tokens.
    """
    heads, dim = config["num_attention_heads"], config["attention_head_dim"]
    width, hidden = heads * dim, int(heads * dim * config["mlp_ratio"])
    gemms = ((width, 3 * width), (width, 2 * hidden), (hidden, width), (width, width))
    beside, passes = ((width, 2 * hidden), (hidden, width)), (7 * width, 3 * hidden)
    apart = Blocks(config["num_layers"], gemms, passes, (gemms,), beside=beside)
    joint = Blocks(config["num_single_layers"], gemms, passes, beside=beside)
    return Work(
        width=width,
        heads=heads,
        kv_heads=heads,
        head_dim=dim,
        blocks=(apart, joint),
        prepares=True,
        once=((config["in_channels"], width), (width, config["in_channels"])),
        table=(4 * 3 + 2) * width,
        live=12 * width,
        text=((config["joint_attention_dim"], width),),
        conditioning=((256, width), (width, width), *((width, n * width) for n in (3, 3, 3, 3, 2))),
        guided=False,
    )


def z_image_work(config: Mapping[str, Any]) -> Work:
    """Return the operations of Z-Image: blocks of one stream with SwiGLU.

    Those that refine the image alone are counted as if they had the text with them, and those that refine the text are
    not counted: of 4096 and 128 tokens, either is a fifth of a percent.
    """
    heads, width = config["n_heads"], config["dim"]
    hidden, layers = int(width / 3 * 8), config["n_layers"] + config["n_refiner_layers"]
    gemms = ((width, 3 * width), (width, width), (width, 2 * hidden), (hidden, width))
    area, condition = 4 * config["in_channels"], min(width, 256)
    blocks = Blocks(layers, gemms, (4 * width, 4 * width, 3 * hidden), modulation=((condition, 4 * width),))
    return Work(
        width=width,
        heads=heads,
        kv_heads=config["n_kv_heads"],
        head_dim=width // heads,
        blocks=(blocks,),
        prepares=True,
        once=((area, width), (width, area)),
        table=4 * width * layers + width,
        live=4 * width + 3 * hidden,
        text=((config["cap_feat_dim"], width),),
        conditioning=((256, 1024), (1024, condition), (condition, width)),
    )


def hunyuan_video_work(config: Mapping[str, Any], text: int) -> Work:
    """Return the operations of HunyuanVideo 1.0 or 1.5 with a text of so many tokens, which two blocks refine first."""
    heads, dim, refiners = config["num_attention_heads"], config["attention_head_dim"], config["num_refiner_layers"]
    width, hidden = heads * dim, int(heads * dim * config["mlp_ratio"])
    doubles, singles = config["num_layers"], config.get("num_single_layers", 0)
    area, sines = config["patch_size_t"] * config["patch_size"] ** 2, 3 if config.get("guidance_embeds") else 2
    # q, k, v and the output, scores and sums over the text, and the MLP
    refiner = (*((width, width),) * 4, *((text, width),) * 2, (width, 4 * width), (4 * width, width))
    pooled = config["text_embed_dim"], *([config["pooled_projection_dim"]] if singles else [])
    return Work(
        width=width,
        heads=heads,
        kv_heads=heads,
        head_dim=dim,
        blocks=(_double(doubles, width, hidden), *([_parallel(singles, width, hidden)] if singles else [])),
        prepares=True,
        once=((config["in_channels"] * area, width), (width, config["out_channels"] * area)),
        table=(12 * doubles + 3 * singles + 2) * width,
        live=12 * width,
        text=((config["text_embed_dim"], width), *refiner * refiners),
        conditioning=(
            *((256, width), (width, width)) * sines,
            *(gemm for wide in pooled for gemm in ((wide, width), (width, width))),
            *((width, 2 * width),) * (refiners + 1),
        ),
        guided=not config.get("guidance_embeds"),
    )


def _parallel(count: int, width: int, hidden: int) -> Blocks:
    """Return blocks in which attention and an MLP with GELU are side by side."""
    return Blocks(
        count=count,
        gemms=((width, 3 * width), (width, hidden), (width + hidden, width)),
        passes=(6 * width,),
        modulation=((width, 3 * width),),
        beside=((width, hidden), (hidden, width)),
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
