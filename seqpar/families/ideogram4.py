"""Where Ideogram 4's tokens are split: text and image are one packed sequence, after padding."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from diffusers.models.transformers.transformer_ideogram4 import (
    IMAGE_POSITION_OFFSET,
    LLM_TOKEN_INDICATOR,
    OUTPUT_IMAGE_INDICATOR,
    SEQUENCE_PADDING_INDICATOR,
)
from torch import Tensor

from seqpar.families import Pipelines, Published, latents, twice
from seqpar.families._cuts import Boundary, Cuts, CutTokens, GatherTokens, Joint
from seqpar.families._masks import FULL, Keys, Prepared, keys_of
from seqpar.families._tiny import Tiny

PACKED, SEGMENTS, SEVERAL = CutTokens("text and image"), "segment_ids", 2


def _ideogram4() -> Cuts:
    tokens = ("hidden_states", "encoder_hidden_states", "position_ids", "indicator")
    places = {
        "": Boundary(inputs={**dict.fromkeys(tokens, PACKED), "timestep": CutTokens(PACKED.stream, dims=2)}),
        "final_layer": Boundary(gathers={0: GatherTokens(PACKED.stream)}),
    }
    joint = {"layers.*.attention": Joint((PACKED.stream,), masked=True)}
    return Cuts(places, joint, prepare=_prepare, keys=_keys)


def _prepare(call: Prepared) -> None:
    """Note whether there is no padding, which other tokens do not attend to. Results of padding mean nothing."""
    code = call.read(call.arguments[SEGMENTS], lambda: _code(call.arguments[SEGMENTS]))
    if code == SEVERAL:
        raise ValueError(f"{SEGMENTS} has several samples in a row, expected one of each, after padding")
    call.note = code == FULL


def _code(segments_BL: Tensor) -> int:
    valid = segments_BL != SEQUENCE_PADDING_INDICATOR
    last = segments_BL.masked_fill(~valid, SEQUENCE_PADDING_INDICATOR).amax(dim=1, keepdim=True)
    return SEVERAL if bool((valid & (segments_BL != last)).any()) else int(valid.all())


def _keys(arguments: dict[str, Any], is_full: Hashable) -> Keys:
    kept = arguments[SEGMENTS] != SEQUENCE_PADDING_INDICATOR
    return Keys() if is_full else Keys({PACKED.stream: keys_of(kept, PACKED.stream)})


def _inputs(config: Mapping[str, Any], random: Callable[..., Tensor]) -> dict[str, Any]:
    """Return a call of 6 tokens of text and 15 of an image, in all rows."""
    is_image, places = torch.arange(21) >= 6, torch.arange(21)
    rows = torch.stack((places * 0, (places - 6) // 5, (places - 6) % 5), dim=1) + IMAGE_POSITION_OFFSET
    ids = torch.where(is_image[:, None], rows, places[:, None])
    indicator = torch.where(is_image, OUTPUT_IMAGE_INDICATOR, LLM_TOKEN_INDICATOR)
    return {
        "hidden_states": random(2, 21, config["in_channels"]),
        "encoder_hidden_states": random(2, 21, config["llm_features_dim"]),
        "position_ids": ids.expand(2, -1, -1),
        SEGMENTS: torch.ones(2, 21, dtype=torch.long),
        "indicator": indicator.expand(2, -1),
    }


CUTS = {"Ideogram4Transformer2DModel": _ideogram4()}
UNGUIDED = ("Ideogram4Transformer2DModel",)  # another transformer computes the second branch
PIPELINES = Pipelines(reads_layers=("Ideogram4Pipeline", "Ideogram4ModularPipeline"))
PUBLISHED = {
    "ideogram-ai/ideogram-v4": Published(
        "Ideogram4Pipeline",
        "Ideogram4Transformer2DModel",
        vae=latents(32),
        index=twice("Ideogram4Transformer2DModel", "unconditional_transformer"),
    )
}
TINY = {
    "Ideogram4Transformer2DModel": Tiny(
        {"attention_head_dim": 16, "mrope_section": (4, 2, 2), "adaln_dim": 24, "llm_features_dim": 24}, _inputs
    )
}
