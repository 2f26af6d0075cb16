"""Wan 2.1, 2.2, VACE and Animate: blocks attend to the video, then to a text and a picture's features.

Faster than diffusers' own block, whose norms and gates are separate fp32 passes. Norm,
modulation and gates are one pass here, and q, k and v are one product that attention's kernel writes to the ranks that
read them. Text is whole on every rank, so that attention to it exchanges nothing.
The arithmetic is diffusers' with fewer roundings: it is computed in fp32 (fp64 for fp64) and rounded once.
Source: Wan, as diffusers implements it. Of the preset: github.com/ModelTC/Wan2.2-Lightning at 92efeb44 (4 steps from
1000 to 0 with shift 5 in wan/utils/fm_solvers_euler.py, no guidance) and configs/distill of github.com/ModelTC/LightX2V
at f8aee98b, which has the same for Wan 2.1.
Letters: see `seqpar.types.protocols`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from seqpar.families import Pipelines, Preset, Published, latents, twice
from seqpar.families._block import Block, BlockCall, Input
from seqpar.families._cross import CROSS_EIGHT, constant, crossed_work, finished, tabled, to_whole
from seqpar.families._cuts import ALONE, IMAGE, OUT, Boundary, Cuts, CutTokens, Grouped, StepBlocks
from seqpar.families._tiny import Tiny
from seqpar.kernels.adaln import Norm, Vectors, added, gate_norm_modulate, norm_modulate
from seqpar.types.facts import Work
from seqpar.types.protocols import Prepare, state_dtype


def _wan() -> Cuts:
    places = {
        "": Boundary(inputs={"timestep": CutTokens("image", dims=2)}),
        "rope": Boundary(outputs={0: IMAGE, 1: IMAGE}),
        "blocks.0": Boundary(inputs={"hidden_states": IMAGE}),
        "proj_out": OUT,
    }
    return Cuts(places, {"blocks.*.attn1": ALONE}, local=("blocks.*.attn2",))


def _wan_vace() -> Cuts:
    wan = _wan()
    places = {
        "vace_blocks.0": Boundary(inputs={"control_hidden_states": IMAGE}),
        "vace_blocks.*": Boundary(inputs={"hidden_states": IMAGE}),
    }
    local = (*wan.local, "vace_blocks.*.attn2")
    return Cuts({**wan.places, **places}, {**wan.attention, "vace_blocks.*.attn1": ALONE}, local=local)


def _wan_animate() -> Cuts:
    """Return cuts of the tokens, which read the motion of a face in their frame besides."""
    wan = _wan()
    places = {"face_adapter.*": Boundary(grouped=Grouped("image", "hidden_states", "encoder_hidden_states"))}
    return replace(wan, places={**wan.places, **places}, local=(*wan.local, "face_adapter.*"))


TEXT = 512  # tokens of the text, as diffusers' own attention has it; a picture's features come before them
PICTURE = 257  # tokens of these features
CUTS = {
    "WanTransformer3DModel": _wan(),
    "WanVACETransformer3DModel": _wan_vace(),
    "WanAnimateTransformer3DModel": _wan_animate(),
    "ChronoEditTransformer3DModel": replace(_wan(), calls_twice=True),
}
STEPS = dict.fromkeys(CUTS, StepBlocks({"blocks": ("hidden_states",)}))


def _noise(word: str) -> tuple[str, re.Pattern[str]]:
    """Name the files of one of Wan 2.2's transformers, of which the first computes the early steps.

    The word alone counts only where nothing but versions, ranks and dtypes follows: low_poly names a style.
    """
    rest = r"lora|lightning|lightx2v|model|final|v?\d+[a-z]*|(?:v|r|rank|fp|bf|e|epoch|steps?|[at])\d+[a-z]*"
    return f"{word} noise", re.compile(rf"{word}[^a-z0-9]*noise(?![a-z])|(?<![a-z]){word}(?:[^a-z0-9]+(?:{rest}))*$")


PIPELINES = Pipelines(
    # only the model with a timestep per token (TI2V) takes an image
    image_class={"WanPipeline": ("expand_timesteps", "wan-i2v")},
    experts={"transformer": _noise("high"), "transformer_2": _noise("low")},
    left_out=re.compile(r"diffusion_model\..*norm.*\.diff(_b)?"),
    presets=(
        Preset(
            "lightning-4",
            "Wan(ImageToVideo)?Pipeline",
            4,
            {"guidance_scale": 1.0},
            (1.0, 15 / 16, 5 / 6, 5 / 8),  # the boundary of the experts, 0.875 or 0.9, is in the middle
            loras=r"(?<!\d)4[-_]?steps?|step_distill|wan[^/]*lightning",
        ),
    ),
)
WITHOUT_ROWS = ("control_hidden_states_scale",)  # a number per block of VACE
LAYERS = {
    "qkv": ("attn1.to_q", "attn1.to_k", "attn1.to_v"),
    "out": ("attn1.to_out.0",),
    "text q": ("attn2.to_q",),
    "text kv": ("attn2.to_k", "attn2.to_v"),
    "picture kv": ("attn2.add_k_proj", "attn2.add_v_proj"),
    "text out": ("attn2.to_out.0",),
    "up": ("ffn.net.0.proj",),
    "down": ("ffn.net.2",),
}


def block(
    call: BlockCall, block: Any, hidden_states: Tensor, encoder_hidden_states: Tensor, temb: Tensor, rotary_emb: Any
) -> Tensor:
    """Return the video (B, l, E) after a block.

    encoder_hidden_states: text (B, L', E), after a picture's features where the model takes some. temb: (B, 6, E), or
    (B, l, 6, E) where each token has its own timestep. rotary_emb: cosines and sines (1, l, 1, D), each number
    twice.
    """
    return _computed(call, block, hidden_states, encoder_hidden_states, temb, rotary_emb)


def _computed(call: BlockCall, block: Any, x_BlE: Tensor, text_BLE: Tensor, temb: Tensor, rotary_emb: Any) -> Tensor:
    """Return a stream after self-attention, attention to the text, and the MLP."""
    modulation = call.once("modulation", temb, lambda: tabled([one.scale_shift_table for one in call.blocks], temb))
    table = call.once("rotary", rotary_emb, lambda: _pairs(rotary_emb, state_dtype(x_BlE.dtype)), shared=True)
    shift, scale, gate, *_ = modulation.every[call.index]
    # VACE's embedders leave the channels apart, which only its first blocks see
    norm, of, x = Norm("layer", block.norm1.eps), call.matrices, x_BlE.contiguous()
    handed, attn = call.handed(x), block.attn1
    h = handed
    if h is None:
        h = norm_modulate(x, shift, scale, norm, index_Bl=modulation.of_token, rounding=of["qkv"].rounding)
    how = Prepare("rms", False, attn.norm_q.eps, attn.norm_q.weight, None, attn.norm_k.weight, None, *table)
    (out,) = call.attend([of["qkv"].projected(h, attn.heads, how)])
    x, h = _to_text(call, x, gate, of["out"](out), block.norm2, modulation.of_token)
    branch = of["text out"](_attended(call, block.attn2, h, text_BLE))
    return finished(call, x, branch, modulation, norm)


def vace(
    call: BlockCall,
    block: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    control_hidden_states: Tensor,
    temb: Tensor,
    rotary_emb: Any,
) -> tuple[Tensor | None, Tensor]:
    """Return what VACE adds to the video (B, l, E) after one of its blocks, and its own stream (B, l, E)."""
    x = control_hidden_states
    if (first := call.matrices.get("in")) is not None:
        x = first(x) + hidden_states
    x = _computed(call, block, x, encoder_hidden_states, temb, rotary_emb)
    last = call.matrices.get("added")
    return None if last is None else last(x), x


def _to_text(
    call: BlockCall, x_BlE: Tensor, gate: Vectors, branch_BlE: Tensor, norm: nn.Module, index: Tensor | None
) -> tuple[Tensor, Input]:
    """Return x + gate * branch, and its norm with weight and bias, where the model has one, for attention to text."""
    if not isinstance(norm, nn.LayerNorm):
        x = added(x_BlE, gate, branch_BlE, index_Bl=index)
        return x, x
    zero, of, reader = constant(call, 0.0, x_BlE), Norm("layer", norm.eps, norm.weight), call.matrices["text q"]
    shift = norm.bias[None]
    return gate_norm_modulate(x_BlE, gate, branch_BlE, shift, zero, of, index_Bl=index, rounding=reader.rounding)


def _attended(call: BlockCall, attention: Any, h_BlE: Input, text_BLE: Tensor) -> Tensor:
    """Return attention (B, l, E) to the text, plus attention to a picture's features where the model has layers."""
    of, heads = call.matrices, (attention.heads, -1)
    q = attention.norm_q(of["text q"](h_BlE)).unflatten(2, heads)
    count = text_BLE.shape[1] - TEXT if "picture kv" in of else 0
    parts = [(text_BLE[:, count:], of["text kv"], attention.norm_k)]
    if "picture kv" in of:
        parts.append((text_BLE[:, :count], of["picture kv"], attention.norm_added_k))
    outs = [to_whole(call, q, *part) for part in parts]
    return sum(outs[1:], outs[0]).flatten(2)


def _pairs(rows: tuple[Tensor, Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosines and sines (l, D/2) of rotary rows (1, l, 1, D) that hold each number twice."""
    cos, sin = rows
    return cos[0, :, 0, 0::2].to(dtype).contiguous(), sin[0, :, 0, 1::2].to(dtype).contiguous()


BLOCKS = {
    "WanTransformerBlock": Block(block, ("image",), LAYERS, eight=CROSS_EIGHT),
    "WanVACETransformerBlock": Block(
        vace, ("image",), {**LAYERS, "in": ("proj_in",), "added": ("proj_out",)}, eight=CROSS_EIGHT
    ),
}


def work(config: Mapping[str, Any], text: int = TEXT) -> Work:
    """Return the planner's `Work` for diffusers' config; text: the number of text tokens.

    A picture's features are counted as if they were tokens of the text, and Animate's faces are not counted. VACE's own
    blocks have one more product, which adds to the video, and the first of them has another one.
    """
    frames, rows, columns = config["patch_size"]
    keys = text + (PICTURE if config.get("added_kv_proj_dim") else 0)
    heads, dim = config["num_attention_heads"], config["attention_head_dim"]
    sizes = (config["text_dim"], heads * dim), (config["freq_dim"], heads * dim)
    alike = crossed_work(config, config["ffn_dim"], frames * rows * columns, keys, sizes)
    if not (layers := config.get("vace_layers")):
        return alike
    (blocks,), added = alike.blocks, (alike.width, alike.width)
    first = replace(blocks, count=1, gemms=(*blocks.gemms, added, added))
    others = replace(blocks, count=len(layers) - 1, gemms=(*blocks.gemms, added))
    return replace(alike, blocks=(first, others, blocks))


WORK = dict.fromkeys(("WanTransformer3DModel", "WanVACETransformer3DModel", "WanAnimateTransformer3DModel"), work)
ANIMATE = {
    "inject_face_latents_blocks": 1,
    "motion_encoder_size": 8,
    "motion_style_dim": 12,
    "motion_dim": 4,
    "motion_encoder_dim": 8,
    "face_encoder_hidden_dim": 6,
}
WAN, VIDEO = "WanTransformer3DModel", latents(frames=4)
SMALL = {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30}
MIDDLE = {"num_attention_heads": 24, "ffn_dim": 14336, "num_layers": 30, "in_channels": 48, "out_channels": 48}
OF_PICTURE = {"in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 5120}
PUBLISHED = {
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": Published("WanPipeline", WAN, SMALL, VIDEO),
    "Wan-AI/Wan2.1-T2V-14B-Diffusers": Published("WanPipeline", WAN, vae=VIDEO),
    "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers": Published("WanImageToVideoPipeline", WAN, OF_PICTURE, VIDEO),
    "Wan-AI/Wan2.1-VACE-14B-diffusers": Published("WanVACEPipeline", "WanVACETransformer3DModel", vae=VIDEO),
    "Wan-AI/Wan2.2-T2V-A14B-Diffusers": Published("WanPipeline", WAN, vae=VIDEO, index=twice(WAN)),
    "Wan-AI/Wan2.2-I2V-A14B-Diffusers": Published(
        "WanImageToVideoPipeline", WAN, {"in_channels": 36}, VIDEO, index=twice(WAN)
    ),
    "Wan-AI/Wan2.2-TI2V-5B-Diffusers": Published("WanPipeline", WAN, MIDDLE, latents(48, 16, 4)),
    "Wan-AI/Wan2.2-Animate-14B-Diffusers": Published(
        "WanAnimatePipeline", "WanAnimateTransformer3DModel", {"added_kv_proj_dim": 5120}, VIDEO
    ),
    "nvidia/ChronoEdit-14B-Diffusers": Published(
        "ChronoEditPipeline", "ChronoEditTransformer3DModel", OF_PICTURE, VIDEO
    ),
}
TINY = {
    "WanVACETransformer3DModel": Tiny(
        {"vace_layers": [0, 1]},
        lambda config, random: {
            "control_hidden_states": random(2, config["vace_in_channels"], 3, 6, 10),
            "control_hidden_states_scale": torch.tensor([0.7, 1.2], dtype=torch.float64),
        },
    ),
    # 5 frames of 15 tokens, and 13 of a face
    "WanAnimateTransformer3DModel": Tiny(
        {**ANIMATE, "motion_encoder_channel_sizes": {"8": 6, "4": 6}},
        lambda config, random: {
            "hidden_states": random(2, config["in_channels"], 5, 6, 10),
            "pose_hidden_states": random(2, config["latent_channels"], 4, 6, 10),
            "face_pixel_values": random(2, 3, 13, 8, 8),
        },
    ),
}
