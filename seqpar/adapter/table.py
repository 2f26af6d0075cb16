"""The cuts of diffusers' transformers, by class: where their tokens are split, which attention joins the ranks.

Where diffusers has a plan of its own (`_cp_plan`), ours are here because they do less or more: masks stay whole and are
joined once a call, text that only cross-attention reads is not split, a timestep for each token is. Tensors are cut
where they leave an embedder rather than where they enter each block, because that is one hook and compiles better.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from seqpar.adapter import hunyuan_video, qwen_image
from seqpar.adapter.cuts import (
    HELP,
    JOINED,
    Boundary,
    CutJoined,
    Cuts,
    CutTokens,
    GatherTokens,
    Joint,
    Padding,
    check,
    from_diffusers,
)
from seqpar.adapter.fused import HOME
from seqpar.adapter.processors import HunyuanVideo15Processor, MochiProcessor

IMAGE, TEXT = CutTokens("image"), CutTokens("text", may_be_empty=True)
OUT = Boundary(gathers={0: GatherTokens("image")})
TEXT_IMAGE, IMAGE_TEXT = Joint(("text", "image")), Joint(("image", "text"))
ALONE = Joint(("image",))
BETWEEN = "residuals that are added between blocks would have to be split as the blocks' tokens are"


def cuts_of(module: nn.Module, asked: Cuts | Mapping[str, Any] | None = None) -> Cuts:
    """Return the cuts of a transformer: the caller's, those of this table, or those of its `_cp_plan`.

    asked: a `Cuts`, or a plan in diffusers' form. A class that is not in the table has the cuts of the class that it
    derives from. Raises ValueError, the same on every rank, if there are none, or if they name submodules or parameters
    that the transformer does not have.
    """
    theirs: Any = getattr(module, "_cp_plan", None)
    known = next((CUTS[kind.__name__] for kind in type(module).__mro__ if kind.__name__ in CUTS), theirs)
    cuts = known if asked is None else asked
    if not cuts and not isinstance(cuts, Cuts):
        raise ValueError(f"got {type(module).__name__}, which has no known cuts of its tokens, expected some; {HELP}")
    cuts = cuts if isinstance(cuts, Cuts) else from_diffusers(module, cuts)
    check(module, cuts)
    return cuts


def _flux() -> Cuts:
    root = Boundary(
        inputs={
            "hidden_states": IMAGE,
            "encoder_hidden_states": TEXT,
            "img_ids": CutTokens("image", dim=-2),
            "txt_ids": replace(TEXT, dim=-2),
            "controlnet_block_samples": IMAGE,
            "controlnet_single_block_samples": IMAGE,
        }
    )
    both = {"transformer_blocks.*.attn": TEXT_IMAGE, "single_transformer_blocks.*.attn": TEXT_IMAGE}
    return Cuts({"": root, "proj_out": OUT}, both)


def _chroma() -> Cuts:
    """Return FLUX's cuts; its blocks make a mask for queries and keys of one for all tokens, which attention takes."""
    flux = _flux()
    zeros = {"time_text_embed.guidance_proj": Boundary(numbers=("timesteps",))}
    joint = {path: replace(joint, masked=True) for path, joint in flux.attention.items()}
    mask = "attention_mask"
    return Cuts(
        {**flux.places, **zeros}, joint, {mask: JOINED}, weighed={mask: ("encoder_hidden_states", "hidden_states")}
    )


def _flux2() -> Cuts:
    ids = {"img_ids": CutTokens("image", dim=-2), "txt_ids": replace(TEXT, dim=-2)}
    root = Boundary(inputs={"hidden_states": IMAGE, "encoder_hidden_states": TEXT, **ids})
    both = {"transformer_blocks.*.attn": TEXT_IMAGE, "single_transformer_blocks.*.attn": TEXT_IMAGE}
    cached = "kept keys and values of reference images are those of all tokens; call the pipeline without a key cache"
    return Cuts({"": root, "proj_out": OUT}, both, refused={"kv_cache_mode": cached, "kv_cache": cached})


def _flux3() -> Cuts:
    text, reference = CutTokens("text"), CutTokens("reference")  # each attends to itself alone in the first blocks
    root = Boundary(
        inputs={
            "hidden_states": IMAGE,
            "encoder_hidden_states": text,
            "image_cond_hidden_states": reference,
            "img_ids": CutTokens("image", dim=-2),
            "txt_ids": replace(text, dim=-2),
            "image_cond_ids": replace(reference, dim=-2),
        }
    )
    attention = {
        "txt_mode_blocks.*.attn": Joint(("text",)),
        "mode_blocks.image.*.attn": ALONE,
        "mode_blocks.image_cond.*.attn": Joint(("reference",)),
        "single_transformer_blocks.*.attn": Joint(("text", "image", "reference"), absent=("reference",)),
    }
    return Cuts({"": root, "proj_out": OUT}, attention)


def _qwen_image() -> Cuts:
    places = {
        "": Boundary(inputs={"hidden_states": IMAGE, "controlnet_block_samples": IMAGE}),
        "pos_embed": Boundary(outputs={0: CutTokens("image", dim=0), 1: replace(TEXT, dim=0)}),
        "transformer_blocks.0": Boundary(inputs={"encoder_hidden_states": TEXT}),
        "transformer_blocks.*": Boundary(inputs={"modulate_index": IMAGE}),
        "proj_out": OUT,
    }
    joint = {"transformer_blocks.*.attn": Joint(("text", "image"), masked=True)}
    masks = {"encoder_hidden_states_mask": "text"}
    return Cuts(places, joint, masks=masks, forward=qwen_image.forward_of, why_eager=_indexes_images)


def _attends_in_order(module: Any) -> str:
    return "its text attends to earlier tokens alone and its images to those before them, which no strategy splits"


def _indexes_images(module: Any) -> str | None:
    """Return why an edit model of a class that derives from diffusers' runs eagerly: its own forward computes it."""
    own = module.config.zero_cond_t and not type(module).__module__.startswith(HOME)
    return "its forward may copy which tokens are of reference images from the host" if own else None


def _wan() -> Cuts:
    places = {
        "": Boundary(inputs={"timestep": CutTokens("image", dims=2)}),
        "rope": Boundary(outputs={0: IMAGE, 1: IMAGE}),
        "blocks.0": Boundary(inputs={"hidden_states": IMAGE}),
        "proj_out": OUT,
    }
    return Cuts(places, {"blocks.*.attn1": ALONE})


def _wan_vace() -> Cuts:
    wan = _wan()
    places = {
        "vace_blocks.0": Boundary(inputs={"control_hidden_states": IMAGE}),
        "vace_blocks.*": Boundary(inputs={"hidden_states": IMAGE}),
    }
    return Cuts({**wan.places, **places}, {**wan.attention, "vace_blocks.*.attn1": ALONE})


def _sd3() -> Cuts:
    places = {
        "": Boundary(inputs={"block_controlnet_hidden_states": IMAGE}),
        "pos_embed": Boundary(outputs={0: IMAGE}),
        "context_embedder": Boundary(outputs={0: TEXT}),
        "proj_out": OUT,
    }
    return Cuts(places, {"transformer_blocks.*.attn": IMAGE_TEXT, "transformer_blocks.*.attn2?": ALONE})


def _cogvideox() -> Cuts:
    places = {
        "": Boundary(inputs={"image_rotary_emb": CutTokens("image", dim=0)}),
        "transformer_blocks.0": Boundary(inputs={"hidden_states": IMAGE, "encoder_hidden_states": TEXT}),
        "proj_out": OUT,
    }
    return Cuts(places, {"transformer_blocks.*.attn1": TEXT_IMAGE})


def _hunyuan_video() -> Cuts:
    rows = CutTokens("image", dim=0)
    text = CutTokens("text")  # its modules take the last 0 tokens for all tokens
    places = {
        "rope": Boundary(outputs={0: rows, 1: rows}),
        "transformer_blocks.0": Boundary(inputs={"hidden_states": IMAGE, "encoder_hidden_states": text}),
        "proj_out": OUT,
    }
    joint = Joint(("image", "text"), masked=True)
    both = {"transformer_blocks.*.attn": joint, "single_transformer_blocks.*.attn": joint}
    return Cuts(
        places, both, padding=hunyuan_video.PADDING, key_masks=hunyuan_video.key_masks, why_not=_replaces_tokens
    )


def _replaces_tokens(module: Any) -> str | None:
    if module.config.image_condition_type != "token_replace":
        return None
    return (
        "image_condition_type token_replace modulates the tokens of the first frame in another way, by their number "
        "in the whole video"
    )


def _hunyuan_video15() -> Cuts:
    rows = CutTokens("image", dim=0)
    places = {
        "rope": Boundary(outputs={0: rows, 1: rows}),
        "transformer_blocks.0": Boundary(inputs={"hidden_states": IMAGE, "encoder_hidden_states": TEXT}),
        "transformer_blocks.*": Boundary(inputs={"attention_mask": TEXT}),
        "proj_out": OUT,
    }
    return Cuts(
        places,
        {"transformer_blocks.*.attn": Joint(("image", "text"), masked=True, processor=HunyuanVideo15Processor)},
        padding=hunyuan_video.PADDING_15,
        key_masks=hunyuan_video.key_masks_15,
        forward=lambda module: hunyuan_video.forward_15,
        why_eager=_picks_by_value,
    )


def _picks_by_value(module: Any) -> str | None:
    """Return why a class that derives from diffusers' runs eagerly: its own forward computes it."""
    return (
        None if type(module).__module__.startswith(HOME) else "its forward may pick the tokens of texts by their values"
    )


def _ltx() -> Cuts:
    places = {
        "": Boundary(inputs={"hidden_states": IMAGE, "timestep": CutTokens("image", dims=2)}),
        "rope": Boundary(outputs={0: IMAGE, 1: IMAGE}),
        "proj_out": OUT,
    }
    masks = {"encoder_attention_mask": "text"}
    return Cuts(places, {"transformer_blocks.*.attn1": ALONE}, masks=masks, passed=tuple(masks))


def _ltx2() -> Cuts:
    """Return the cuts of the video; its sound is some hundred tokens, which every rank computes whole.

    Their products take the time of reading the weights, which a split would not shorten.
    """
    coords = Boundary(inputs={"coords": CutTokens("image", dim=2)})
    root = {"hidden_states": IMAGE, "timestep": CutTokens("image", dims=2), "video_keyframes_mask": IMAGE}
    places = {"": Boundary(inputs=root), "rope": coords, "cross_attn_rope": coords, "proj_out": OUT}
    own = Joint(("image",), skipped_by="all_perturbed")
    sound = Joint(("image",), whole_queries=True)
    attention = {"transformer_blocks.*.attn1": own, "transformer_blocks.*.video_to_audio_attn": sound}
    masks = {"encoder_attention_mask": "text", "audio_encoder_attention_mask": "text of the sound"}
    return Cuts(places, attention, masks=masks, passed=tuple(masks))


def _from_patches(out: str) -> Cuts:
    """Return the cuts of models of one stream of image patches, with or without cross-attention to text."""
    return Cuts({"pos_embed": Boundary(outputs={0: IMAGE}), out: OUT}, {"transformer_blocks.*.attn1": ALONE})


def _lumina2() -> Cuts:
    joint = CutTokens("text and image")
    places = {
        "rope_embedder": Boundary(outputs={2: IMAGE, 3: joint}),
        "noise_refiner.0": Boundary(inputs={"hidden_states": IMAGE}),
        "noise_refiner.-1": OUT,
        "layers.0": Boundary(inputs={"hidden_states": joint}),
        "norm_out": Boundary(gathers={0: GatherTokens(joint.stream)}),
    }
    both = {"noise_refiner.*.attn": ALONE, "layers.*.attn": Joint((joint.stream,))}
    return Cuts(places, both, why_eager=_reads_lengths)


def _reads_lengths(module: Any) -> str:
    return "it reads the lengths of the texts on the host"


def _z_image() -> Cuts:
    joint = CutTokens("text and image")
    places = {
        "noise_refiner.*": Boundary(inputs={"freqs_cis": IMAGE, "noise_mask": IMAGE}),
        "noise_refiner.0": Boundary(inputs={"x": IMAGE}),
        "noise_refiner.-1": OUT,
        "layers.*": Boundary(inputs={"freqs_cis": joint, "noise_mask": joint}),
        "layers.0": Boundary(inputs={"x": joint}),
        "layers.-1": Boundary(gathers={0: GatherTokens(joint.stream)}),
    }
    both = {"noise_refiner.*.attention": ALONE, "layers.*.attention": Joint((joint.stream,))}
    return Cuts(places, both, refused={"controlnet_block_samples": BETWEEN})


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
    mask = "encoder_attention_mask"
    padding = {mask: Padding("encoder_hidden_states", 4, on_ranks=True, rows="position_ids")}  # a text's rows are 0
    return Cuts({"": Boundary(inputs), "final_layer": OUT}, joint, masks={mask: "text"}, padding=padding, bools=(mask,))


def _mochi() -> Cuts:
    places = {
        "time_embed": Boundary(outputs={1: TEXT}),
        "rope": Boundary(outputs={0: CutTokens("image", dim=0), 1: CutTokens("image", dim=0)}),
        "transformer_blocks.0": Boundary(inputs={"hidden_states": IMAGE}),
        "transformer_blocks.*": Boundary(inputs={"encoder_attention_mask": TEXT}),
        "proj_out": OUT,
    }
    joint = {"transformer_blocks.*.attn1": Joint(("image", "text"), masked=True, processor=MochiProcessor)}
    return Cuts(places, joint, masks={"encoder_attention_mask": "text"}, kept=("encoder_attention_mask",))


CUTS = {
    "FluxTransformer2DModel": _flux(),
    "ChromaTransformer2DModel": _chroma(),
    "Flux2Transformer2DModel": _flux2(),
    "Flux3Transformer2DModel": _flux3(),
    "QwenImageTransformer2DModel": _qwen_image(),
    "QwenImage21Transformer2DModel": Cuts({}, {}, why_not=_attends_in_order, why_eager=_reads_lengths),
    "WanTransformer3DModel": _wan(),
    "WanVACETransformer3DModel": _wan_vace(),
    "ChronoEditTransformer3DModel": _wan(),
    "SD3Transformer2DModel": _sd3(),
    "CogVideoXTransformer3DModel": _cogvideox(),
    "HunyuanVideoTransformer3DModel": _hunyuan_video(),
    "HunyuanVideo15Transformer3DModel": _hunyuan_video15(),
    "LTXVideoTransformer3DModel": _ltx(),
    "LTX2VideoTransformer3DModel": _ltx2(),
    "PixArtTransformer2DModel": _from_patches("proj_out"),
    "DiTTransformer2DModel": _from_patches("proj_out_2"),
    "Lumina2Transformer2DModel": _lumina2(),
    "ZImageTransformer2DModel": _z_image(),
    "MochiTransformer3DModel": _mochi(),
    "Krea2Transformer2DModel": _krea2(),
}
