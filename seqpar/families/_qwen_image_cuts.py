"""Where Qwen-Image's tokens are split."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from seqpar.families import _qwen_image as qwen_image
from seqpar.families._cuts import Boundary, Cuts, CutTokens, Joint
from seqpar.families._home import HOME
from seqpar.families._shared import IMAGE, OUT, TEXT


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
