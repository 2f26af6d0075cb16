"""Where the tokens of HunyuanImage 2.1 and its refiner are split: as HunyuanVideo's (`hunyuan_video.py`)."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import torch

from seqpar.families import GUIDER, Published, hunyuan_video, latents
from seqpar.families._cuts import Cuts, StepBlocks
from seqpar.families._masks import Keys, Prepared, first_keys, keys_of, shorten
from seqpar.families._tiny import TEXT, Tiny

TEXTS = ("encoder_attention_mask", "encoder_hidden_states"), ("encoder_attention_mask_2", "encoder_hidden_states_2")


def _hunyuan_image() -> Cuts:
    cuts = hunyuan_video.CUTS["HunyuanVideoTransformer3DModel"]
    return replace(cuts, prepare=_prepare, keys=_keys, why_not=lambda module: None, why_eager=_picks_by_value)


def _picks_by_value(module: Any) -> str | None:
    return "it picks the tokens of two texts by their values" if module.config.text_embed_2_dim else None


def _prepare(call: Prepared) -> None:
    """Leave padding of both texts out; note whether nothing is masked then. The forward gets the masks in any case."""
    least = max(4, call.ranks), 0
    full = [shorten(call, *names, at_least) for names, at_least in zip(TEXTS, least, strict=True)]
    call.note = full[0] and (full[1] or call.arguments.get(TEXTS[1][1]) is None)


def _keys(arguments: dict[str, Any], is_full: Hashable) -> Keys:
    """Return the mask of the text: of two, the valid tokens of both are the first ones."""
    if is_full:
        return Keys()
    (name, _), (name_2, text_2) = TEXTS
    if arguments.get(text_2) is None:
        return Keys({"text": keys_of(arguments[name], "text")})
    return Keys({"text": first_keys(torch.cat([arguments[name_2], arguments[name]], dim=1) != 0)})


CUTS = {"HunyuanImageTransformer2DModel": _hunyuan_image()}
STEPS = {
    "HunyuanImageTransformer2DModel": StepBlocks(
        dict.fromkeys(("transformer_blocks", "single_transformer_blocks"), ("hidden_states", "encoder_hidden_states"))
    )
}
PUBLISHED = {
    "hunyuanvideo-community/HunyuanImage-2.1-Diffusers": Published(
        "HunyuanImagePipeline",
        "HunyuanImageTransformer2DModel",
        {"text_embed_2_dim": 1472},
        latents(64, 32),
        (2048, 2048),
        index=GUIDER,
    )
}
TINY = {
    "HunyuanImageTransformer2DModel": Tiny(
        {"text_embed_dim": 24, "text_embed_2_dim": 12, "attention_head_dim": 16, "rope_axes_dim": (8, 8)},
        lambda config, random: {
            "encoder_hidden_states": random(2, TEXT, 24),
            "encoder_hidden_states_2": random(2, 5, 12),
            "encoder_attention_mask_2": torch.arange(5) < torch.tensor([[0], [3]]),
        },
    )
}
