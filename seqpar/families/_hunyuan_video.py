"""The key masks of HunyuanVideo, and 1.5's forward without a look at values, so that a call can be a CUDA graph.

1.5's text comes from three encoders, each with padding. diffusers puts the valid tokens first by boolean indices, row
by row, and asks whether there is a picture; both wait for the device. A stable sort of the mask gives the same order,
and a mask of no tokens stands for no picture.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers.utils.peft_utils import apply_lora_scale
from torch import Tensor

from seqpar.families._cuts import Padding
from seqpar.families._names import FULL
from seqpar.types.protocols import from_patches

LLM, BYT5, PICTURE = range(3)  # rows of the embedding that tells the encoders apart


PADDING = {"encoder_attention_mask": Padding("encoder_hidden_states", least=4, on_ranks=True)}
PADDING_15 = {
    "encoder_attention_mask": Padding("encoder_hidden_states", least=2),
    "encoder_attention_mask_2": Padding("encoder_hidden_states_2"),
    "image_embeds": Padding("image_embeds"),
}


@apply_lora_scale("attention_kwargs")
def forward_15(module: Any, **arguments: Any) -> tuple[Tensor]:
    """Return the prediction (B, C, T, H, W), as `HunyuanVideo15Transformer3DModel` does with the same arguments."""
    video, config = arguments["hidden_states"], module.config
    rotary = module.rope(video)
    temb = module.time_embed(arguments["timestep"], timestep_r=arguments.get("timestep_r"))
    x, (text, mask) = module.x_embedder(video), _text(module, arguments)
    for block in module.transformer_blocks:
        x, text = block(x, text, temb, mask, rotary)
    patch = config.patch_size_t, config.patch_size, config.patch_size
    frames, height, width = (side // own * own for side, own in zip(video.shape[2:], patch, strict=True))
    return (from_patches(module.proj_out(module.norm_out(x, temb)), patch, (frames, height, width)),)


def key_masks(arguments: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the mask (B, L) bool of the text's keys in HunyuanVideo 1.0, for a call's arguments.

    diffusers takes as many first tokens as the call's mask has tokens.
    """
    return {"text": _first(arguments["encoder_attention_mask"])}


def key_masks_15(arguments: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the mask (B, L) bool of the text's keys in HunyuanVideo 1.5, for a call's arguments."""
    return {"text": _first(_masks(arguments))}


def _first(mask_BL: Tensor) -> Tensor:
    """Return a mask of as many first tokens as another one has tokens, (B, L) bool."""
    places = torch.arange(mask_BL.shape[1], device=mask_BL.device)
    return places < mask_BL.sum(dim=1, dtype=torch.int)[:, None]


def _masks(arguments: Mapping[str, Any]) -> Tensor:
    """Return the masks of the picture, of ByT5's text and of the language model's text, joined, (B, L) bool."""
    picture = arguments["image_embeds"]
    has_picture = (picture != 0).any().expand(picture.shape[:2])
    texts = (arguments[f"encoder_attention_mask{name}"] != 0 for name in ("_2", ""))
    return torch.cat([has_picture, *texts], dim=1)


def _text(module: Any, arguments: Mapping[str, Any]) -> tuple[Tensor, Tensor | None]:
    """Return the text (B, L, E), in each row the tokens of all encoders, then zeros, and its mask (B, L).

    There is no mask where nothing is padding.
    """
    llm, timestep = arguments["encoder_hidden_states"], arguments["timestep"]
    parts = (
        (PICTURE, module.image_embedder(arguments["image_embeds"])),
        (BYT5, module.context_embedder_2(arguments["encoder_hidden_states_2"])),
        (LLM, module.context_embedder(llm, timestep, arguments["encoder_attention_mask"])),
    )
    named = [x + module.cond_type_embed(x.new_full(x.shape[:2], kind, dtype=torch.long)) for kind, x in parts]
    text_BLE = torch.cat(named, dim=1)
    if PADDING_15.keys() <= set(arguments[FULL]):
        return text_BLE, None
    masks_BL = _masks(arguments)
    order = masks_BL.byte().argsort(dim=1, descending=True, stable=True)
    mask_BL = _first(masks_BL)
    return text_BLE.take_along_dim(order[..., None], dim=1).masked_fill(~mask_BL[..., None], 0), mask_BL
