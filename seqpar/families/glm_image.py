"""Where GLM-Image's tokens are split. Reference images are read as keys and values that every rank has whole."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor

from seqpar.families import Pipelines, Published
from seqpar.families._cuts import IMAGE, OUT, TEXT, Boundary, Cuts, CutTokens, Joint
from seqpar.families._masks import Keys, Prepared
from seqpar.families._tiny import Tiny
from seqpar.types.protocols import from_patches


def _glm_image() -> Cuts:
    places = {
        "rope": Boundary(on_device=True),
        "transformer_blocks.0": Boundary(inputs={"hidden_states": IMAGE, "encoder_hidden_states": TEXT}),
        "transformer_blocks.*": Boundary(inputs={"image_rotary_emb": CutTokens("image", dim=0)}),
        "proj_out": OUT,
    }
    return Cuts(
        places,
        {"transformer_blocks.*.attn1": Joint(("text", "image"), after_prefix=True)},
        prepare=_prepare,
        keys=_keys,
        refused={"attention_mask": "it adds 1 to the scores of some pairs of tokens"},
        forward=lambda module: _forward,
        of_batch=("kv_caches",),
    )


def _forward(module: Any, **given: Any) -> tuple[Tensor]:
    """Return the prediction (B, C, H, W), as `GlmImageTransformer2DModel` does with the same arguments."""
    latents, text = given["hidden_states"], module.glyph_projector(given["encoder_hidden_states"])
    rotary = given.get("image_rotary_emb")
    rotary = module.rope(latents) if rotary is None else rotary
    prior = module.prior_token_embedding(given["prior_token_id"])
    drop = given["prior_token_drop"]  # of tokens, or of whole rows
    prior = prior.masked_fill(drop.view(*drop.shape, *[1] * (prior.dim() - drop.dim())), 0)
    x = module.image_projector(latents)
    x = x + module.prior_projector(prior)
    temb = module.time_condition_embed(given["timestep"], given["target_size"], given["crop_coords"], x.dtype)
    caches, mask = given.get("kv_caches"), given.get("attention_mask")
    for index, block in enumerate(module.transformer_blocks):
        cache = None if caches is None else caches[index]
        x, text = block(x, text, temb, rotary, mask, given.get("attention_kwargs"), kv_cache=cache)
    size = module.config.patch_size
    return (from_patches(module.proj_out(module.norm_out(x, temb)), (1, size, size), latents.shape[2:]),)


def _mode(arguments: Mapping[str, Any]) -> str | None:
    caches = arguments.get("kv_caches")
    return None if caches is None else caches[0].mode


def _prepare(call: Prepared) -> None:
    """Drop caches that a call does not use: they keep its rows together."""
    if _mode(call.arguments) not in ("write", "read"):
        call.drop("kv_caches")


def _keys(arguments: dict[str, Any], note: Hashable) -> Keys:
    """Let every rank compute the keys and values of reference images, once per image."""
    return Keys(is_whole=_mode(arguments) == "write")


def _inputs(config: Mapping[str, Any], random: Callable[..., Tensor]) -> dict[str, Any]:
    return {
        "hidden_states": random(2, config["in_channels"], 6, 10),
        "prior_token_id": torch.arange(30).view(2, 15),
        "prior_token_drop": torch.arange(30).view(2, 15) % 4 == 0,
        "target_size": torch.tensor([[48, 80]]).double().expand(2, -1),
        "crop_coords": torch.zeros(2, 2).double(),
        "attention_mask": None,
    }


CUTS = {"GlmImageTransformer2DModel": _glm_image()}
UNPAIRED = ("GlmImageTransformer2DModel",)  # its pipeline reads a call's result before the step's other call
PIPELINES = Pipelines(several_images=("GlmImage",))
PUBLISHED = {
    "zai-org/GLM-Image": Published(
        "GlmImagePipeline", "GlmImageTransformer2DModel", {"attention_head_dim": 128, "num_attention_heads": 32}
    )
}
TINY = {"GlmImageTransformer2DModel": Tiny({"condition_dim": 8, "prior_vq_quantizer_codebook_size": 30}, _inputs)}
