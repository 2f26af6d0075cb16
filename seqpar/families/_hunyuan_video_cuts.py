"""Where the tokens of HunyuanVideo and HunyuanVideo 1.5 are split."""

from __future__ import annotations

from typing import Any

from seqpar.families import _hunyuan_video as hunyuan_video
from seqpar.families._cuts import Boundary, Cuts, CutTokens, Joint
from seqpar.families._home import HOME
from seqpar.families._hunyuan_video_processor import HunyuanVideo15Processor
from seqpar.families._shared import IMAGE, OUT, TEXT

REFINER = ("context_embedder.token_refiner.refiner_blocks.*.attn",)  # it runs before the text is cut


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
        places,
        both,
        padding=hunyuan_video.PADDING,
        key_masks=hunyuan_video.key_masks,
        why_not=_replaces_tokens,
        local=REFINER,
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
        local=REFINER,
    )


def _picks_by_value(module: Any) -> str | None:
    """Return why a class that derives from diffusers' runs eagerly: its own forward computes it."""
    return (
        None if type(module).__module__.startswith(HOME) else "its forward may pick the tokens of texts by their values"
    )
