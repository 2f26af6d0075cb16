"""LTX-Video: a video transformer whose blocks attend to the video, then to a text whose padding is masked.

Faster than diffusers' own block, whose norms, modulation and gates are separate passes, and
whose rotary embedding reads and writes q and k in fp32. Here they are one pass each, and q, k and v are one product
that attention's kernel writes to the ranks that read them. Text is whole on every rank, so that attention to it
exchanges nothing. The arithmetic is diffusers' with fewer roundings: it is computed in fp32 (fp64 for fp64) and rounded
once.
Source: LTX-Video (arXiv 2501.00103), as diffusers implements it. Of the preset: the first pass of
configs/ltxv-13b-0.9.8-distilled.yaml of github.com/Lightricks/LTX-Video at 5260738e.
Letters: see `seqpar.types.protocols`.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from torch import Tensor

from seqpar.families import Pipelines, Preset, Published, latents
from seqpar.families._block import Block, BlockCall, DeclinedError
from seqpar.families._cross import CROSS_EIGHT, crossed_work, finished, tabled, to_whole
from seqpar.families._cuts import ALONE, IMAGE, OUT, Boundary, Cuts, CutTokens, StepBlocks
from seqpar.families._masks import Keys, Prepared
from seqpar.kernels.adaln import Norm, added, norm_modulate
from seqpar.types.facts import Work
from seqpar.types.masks import aligned_bias
from seqpar.types.protocols import Prepare, state_dtype


def _ltx() -> Cuts:
    places = {
        "": Boundary(inputs={"hidden_states": IMAGE, "timestep": CutTokens("image", dims=2)}),
        "rope": Boundary(outputs={0: IMAGE, 1: IMAGE}),
        "proj_out": OUT,
    }
    masks = {"encoder_attention_mask": "text"}
    attention, local = {"transformer_blocks.*.attn1": ALONE}, ("transformer_blocks.*.attn2",)
    return Cuts(places, attention, masks, prepare=prepare_whole, keys=no_keys, local=local)


def prepare_whole(call: Prepared) -> None:
    """Drop masks of texts that are whole on every rank, which the forward applies itself, if they mask nothing.

    They are 1 for a token, or what is added to scores, if there is a dim for queries.
    """
    for name in ("encoder_attention_mask", "audio_encoder_attention_mask"):
        mask = call.mask(name)
        if mask is not None and call.read(mask, lambda mask=mask: bool((mask == (mask.dim() == 2)).all())):
            call.drop(name)


def no_keys(arguments: dict[str, Any], note: Hashable) -> Keys:
    """Return that attention over the ranks leaves nothing out."""
    return Keys()


CUTS = {"LTXVideoTransformer3DModel": _ltx()}
STEPS = {"LTXVideoTransformer3DModel": StepBlocks({"transformer_blocks": ("hidden_states",)})}
PIPELINES = Pipelines(
    sigmas="LTX(ImageToVideo)?Pipeline",
    presets=(
        Preset(
            "distilled",
            "LTX(Condition|ImageToVideo)?Pipeline",
            7,
            {"guidance_scale": 1.0, "decode_timestep": 0.05, "decode_noise_scale": 0.025},
            (1.0, 0.9937, 0.9875, 0.9812, 0.975, 0.9094, 0.725),
            loras="ltxv?-[^/]*distilled",
        ),
    ),
)
TEXT = 128  # tokens to which the pipeline pads a text
LAYERS = {
    "qkv": ("attn1.to_q", "attn1.to_k", "attn1.to_v"),
    "out": ("attn1.to_out.0",),
    "text q": ("attn2.to_q",),
    "text kv": ("attn2.to_k", "attn2.to_v"),
    "text out": ("attn2.to_out.0",),
    "up": ("ff.net.0.proj",),
    "down": ("ff.net.2",),
}


def why_not(block: Any) -> str | None:
    return why_not_of(block.norm1, block.ff)


def why_not_of(norm: Any, *mlps: Any) -> str | None:
    """Return why a norm like those of a block, or its MLPs, are not those that functions compute, or None."""
    if norm.weight is not None:
        return "their norms have weights"
    if any(type(mlp.net[0]).__name__ != "GELU" or mlp.net[0].approximate != "tanh" for mlp in mlps):
        return "their MLPs have another activation than the tanh formula of GELU"
    return None


def block(
    call: BlockCall,
    block: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    image_rotary_emb: tuple[Tensor, Tensor],
    encoder_attention_mask: Tensor | None = None,
) -> Tensor:
    """Return the video (B, l, E) after a block.

    encoder_hidden_states: text (B, L', E). temb: (B, 1, 6 E), or (B, l, 6 E) where each token has its own timestep.
    image_rotary_emb: cosines and sines (B, l, E), each number twice. encoder_attention_mask: (B, 1, L'), added to
    the scores.
    """
    bias = key_bias(call, encoder_attention_mask)
    modulation = call.once(
        "modulation", temb, lambda: tabled([one.scale_shift_table for one in call.blocks], by_vector(temb, 6))
    )
    shift, scale, gate, *_ = modulation.every[call.index]
    norm, of, x, index = Norm("rms", block.norm1.eps), call.matrices, hidden_states, modulation.of_token
    handed, attn, text = call.handed(x), block.attn1, block.attn2
    h = handed
    if h is None:
        h = norm_modulate(x, shift, scale, norm, index_Bl=index, rounding=of["qkv"].rounding)
    rows = call.once("rotary", image_rotary_emb, lambda: by_head(image_rotary_emb, attn.heads))
    how = Prepare("rms", False, attn.norm_q.eps, attn.norm_q.weight, None, attn.norm_k.weight, None, *rows)
    (out,) = call.attend([of["qkv"].projected(h, attn.heads, how)])
    x = added(x, gate, of["out"](out), index_Bl=index)
    q = text.norm_q(of["text q"](x)).unflatten(2, (text.heads, -1))
    out = to_whole(call, q, encoder_hidden_states, of["text kv"], text.norm_k, bias)
    return finished(call, x, of["text out"](out.flatten(2)), modulation, norm)


def by_vector(temb: Tensor, count: int) -> Tensor:
    """Return a timestep's vectors (B, 1, n E) as (B, n, E), or those of each token, (B, l, n E), as (B, l, n, E)."""
    vectors = temb.unflatten(-1, (count, -1))
    return vectors[:, 0] if vectors.shape[1] == 1 else vectors


def key_bias(call: BlockCall, mask_B1L: Tensor | None, name: str = "") -> Tensor | None:
    """Return the mask of a text as attention to whole keys takes it, (B, L), made once per forward.

    name: of the text, where there are several.
    """
    if mask_B1L is None:
        return None
    if mask_B1L.dim() != 3 or mask_B1L.shape[1] != 1:
        raise DeclinedError(f"the mask of the text has the shape {tuple(mask_B1L.shape)}, not one row for each prompt")
    return call.once(f"mask of the text {name}", mask_B1L, lambda: aligned_bias(mask_B1L[:, 0]))


def by_head(rows: tuple[Tensor, Tensor], heads: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines (B, l, H, D/2) of rotary rows, in fp32 (or fp64).

    These are (B, H, l, D/2) for pairs of the halves of a head, or (B, l, E) for neighbouring pairs, each number twice.
    """
    dtype = state_dtype(rows[0].dtype)
    if rows[0].dim() == 4:
        cos, sin = (part.transpose(1, 2).to(dtype).contiguous() for part in rows)
    else:
        cos, sin = (part[..., 0::2].to(dtype).unflatten(-1, (heads, -1)).contiguous() for part in rows)
    return cos, sin


BLOCKS = {"LTXVideoTransformerBlock": Block(block, ("image",), LAYERS, why_not, CROSS_EIGHT)}


def work(config: Mapping[str, Any], text: int = TEXT) -> Work:
    """Return the planner's `Work` for diffusers' config; text: the number of text tokens."""
    width = config["num_attention_heads"] * config["attention_head_dim"]
    area = config.get("patch_size", 1) ** 2 * config.get("patch_size_t", 1)
    return crossed_work(config, 4 * width, area, text, ((config["caption_channels"], width), (256, width)))


WORK = {"LTXVideoTransformer3DModel": work}
LARGE = {"attention_head_dim": 128, "cross_attention_dim": 4096, "num_layers": 48}
PUBLISHED = {
    "Lightricks/LTX-Video": Published("LTXPipeline", "LTXVideoTransformer3DModel", vae=latents(128, 32, 8)),
    "Lightricks/LTX-Video-0.9.7-distilled": Published(
        "LTXConditionPipeline", "LTXVideoTransformer3DModel", LARGE, latents(128, 32, 8)
    ),
}
