"""Where the tokens of HunyuanImage 2.1 and its refiner are split: as HunyuanVideo's (`hunyuan_video.py`)."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.utils.peft_utils import apply_lora_scale
from torch import Tensor

from seqpar.families import GUIDER, Published, hunyuan_video, latents
from seqpar.families._cuts import NOTE, Cuts, StepBlocks
from seqpar.families._masks import Keys, Prepared, first_keys, keys_of, shorten, valid_first
from seqpar.families._tiny import TEXT, Tiny
from seqpar.types.protocols import from_patches

TEXTS = ("encoder_attention_mask", "encoder_hidden_states"), ("encoder_attention_mask_2", "encoder_hidden_states_2")


def _hunyuan_image() -> Cuts:
    cuts = hunyuan_video.CUTS["HunyuanVideoTransformer3DModel"]
    return replace(cuts, prepare=_prepare, keys=_keys, forward=lambda module: _forward, why_not=lambda module: None)


@apply_lora_scale("attention_kwargs")
def _forward(module: Any, **given: Any) -> tuple[Tensor]:
    """Return the prediction (B, C, H, W), as `HunyuanImageTransformer2DModel` does with the same arguments."""
    latents, patch = given["hidden_states"], module.config.patch_size
    rotary = module.rope(latents)
    times = {name: given.get(name) for name in ("guidance", "timestep_r")}
    temb = module.time_guidance_embed(given["timestep"], **times)
    x, (text, mask_BL) = module.x_embedder(latents), _text(module, given)
    # attention has the text's mask of the call; a user's own processor, on one rank, has this one
    mask = None if mask_BL is None else F.pad(mask_BL, (x.shape[1], 0), value=True)[:, None, None]
    for block in (*module.transformer_blocks, *module.single_transformer_blocks):
        x, text = block(x, text, temb, attention_mask=mask, image_rotary_emb=rotary)
    size = tuple(side // own * own for side, own in zip(latents.shape[2:], patch, strict=True))
    of_video: Any = (1, *patch)[-3:]
    return (from_patches(module.proj_out(module.norm_out(x, temb)), of_video, size),)


def _text(module: Any, given: Mapping[str, Any]) -> tuple[Tensor, Tensor | None]:
    """Return the text (B, L, E), in each row the valid tokens of the second text, then of the first, then padding.

    With its mask (B, L), or None where nothing is padding.
    """
    (name, first), (name_2, second) = TEXTS
    mask = given[name].bool()
    text = module.context_embedder(given[first], given["timestep"], mask)
    if module.context_embedder_2 is None or given.get(second) is None:
        return text, None if given[NOTE] else mask
    text = torch.cat([module.context_embedder_2(given[second]), text], dim=1)
    if given[NOTE]:  # nothing is masked
        return text, None
    masks_BL = torch.cat([given[name_2].bool(), mask], dim=1)
    return text.take_along_dim(valid_first(masks_BL)[..., None], dim=1), first_keys(masks_BL)


def _prepare(call: Prepared) -> None:
    """Leave padding of both texts out; note whether nothing is masked then. The forward gets the masks in any case."""
    if call.config.get("text_embed_2_dim") is None:  # a model of one text
        for name in TEXTS[1]:
            call.drop(name)
        call.note = shorten(call, *TEXTS[0], max(4, call.ranks))
        return
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
