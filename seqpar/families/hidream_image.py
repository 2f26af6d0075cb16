"""Where HiDream-I1's tokens are split: those of the image, of T5's text, and of each layer of Llama's text.

Each block reads another layer of Llama's text after T5's text and its last layer, and drops what becomes of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from typing import Any

import torch
from diffusers.utils.peft_utils import apply_lora_scale
from torch import Tensor

from seqpar.families import Published
from seqpar.families._cuts import IMAGE, OUT, TEXT, Boundary, CutJoined, Cuts, Joint
from seqpar.families._masks import Prepared
from seqpar.families._tiny import TEXT as LENGTH
from seqpar.families._tiny import Tiny

STREAMS = ("image", "t5", "text", "text")
PATCHES = ("hidden_states", "hidden_states_masks", "img_sizes", "img_ids")
LLAMA = "encoder_hidden_states_llama3"


def _hidream_image() -> Cuts:
    of_all = CutJoined(STREAMS, dim=1)
    places = {
        "x_embedder": Boundary(outputs={0: IMAGE}),
        "caption_projection.:-1": Boundary(outputs={0: TEXT}),
        "caption_projection.-1": Boundary(outputs={0: replace(TEXT, stream="t5")}),
        "pe_embedder": Boundary(outputs={0: of_all}),
        "double_stream_blocks.*": Boundary(inputs={"hidden_states_masks": IMAGE}),
        "single_stream_blocks.*": Boundary(inputs={"hidden_states_masks": of_all}),
        "final_layer": OUT,
    }
    joint = {f"{kind}_stream_blocks.*.block.attn1": Joint(STREAMS) for kind in ("double", "single")}
    return Cuts(places, joint, prepare=_prepare, forward=lambda module: _forward, why_eager=_counts_tokens)


def _counts_tokens(module: Any) -> str | None:
    return "it counts on the host how many tokens each expert has" if module.config.num_routed_experts else None


def _prepare(call: Prepared) -> None:
    """Take the layers of Llama's text apart, so that batch rows come first in each."""
    call.arguments[LLAMA] = list(call.arguments[LLAMA])
    call.is_cut = True


@apply_lora_scale("attention_kwargs")
def _forward(module: Any, **given: Any) -> tuple[Tensor]:
    """Return the prediction (B, C, H, W), as `HiDreamImageTransformer2DModel` does with the same arguments."""
    has_patches = given.get("hidden_states_masks") is not None
    patches: Any = map(given.__getitem__, PATCHES) if has_patches else module.patchify(given[PATCHES[0]])
    latents, masks, sizes, ids = patches
    x = module.x_embedder(latents)
    temb = module.t_embedder(given["timesteps"], latents.dtype) + module.p_embedder(given["pooled_embeds"])
    *layers, t5 = module.caption_projection

    texts = [project(given[LLAMA][k]) for project, k in zip(layers, module.config.llama_layers, strict=True)]
    first = torch.cat([t5(given["encoder_hidden_states_t5"]), texts[-1]], dim=1)
    tokens = given["encoder_hidden_states_t5"].shape[1] + 2 * given[LLAMA][0].shape[1]
    rotary = module.pe_embedder(torch.cat([ids, ids.new_zeros(len(ids), tokens, 3)], dim=1))

    doubles, kept = module.double_stream_blocks, first.shape[1]
    for block, text in zip(doubles, texts, strict=False):
        x, first = block(x, masks, torch.cat([first, text], dim=1), temb, rotary)
        first = first[:, :kept]
    if masks is not None:
        masks = torch.cat([masks, masks.new_ones(len(masks), tokens)], dim=1)
    count = x.shape[1]
    x = torch.cat([x, first], dim=1)
    for block, text in zip(module.single_stream_blocks, texts[len(doubles) :], strict=False):
        x = block(torch.cat([x, text], dim=1), masks, None, temb, rotary)[:, : count + kept]
    return (module.unpatchify(module.final_layer(x[:, :count], temb), sizes, False),)


def _inputs(config: Mapping[str, Any], random: Callable[..., Tensor]) -> dict[str, Any]:
    return {
        "hidden_states": random(2, 4, 6, 10),
        "timesteps": torch.tensor([300.0, 700.0], dtype=torch.float64),
        "encoder_hidden_states_t5": random(2, LENGTH, 24),
        LLAMA: random(2, 2, 5, 16),
        "pooled_embeds": random(2, 16),
    }


CUTS = {"HiDreamImageTransformer2DModel": _hidream_image()}
# pipelines pad an image to as many tokens as the largest has
TOKENS = {
    "HiDreamImageTransformer2DModel": lambda config, latents: (
        prod(config["max_resolution"]) // config["patch_size"] ** 2,
    )
}
PROMPT_TOKENS = {"HiDreamImageTransformer2DModel": 128}
OF_TEXT = {"HiDreamImageTransformer2DModel": r"_t\b"}
PUBLISHED = {
    "HiDream-ai/HiDream-I1-Full": Published(
        "HiDreamImagePipeline",
        "HiDreamImageTransformer2DModel",
        {
            **{"patch_size": 2, "in_channels": 16, "attention_head_dim": 128, "caption_channels": (4096, 4096)},
            **{"text_emb_dim": 2048, "axes_dims_rope": (64, 32, 32), "max_resolution": (128, 128)},
            "llama_layers": (*range(32), *(31,) * 16),
        },
    )
}
TINY = {
    "HiDreamImageTransformer2DModel": Tiny(
        {
            "patch_size": 2,
            "in_channels": 4,
            "attention_head_dim": 16,
            "axes_dims_rope": (4, 6, 6),
            "caption_channels": (24, 16),
            "text_emb_dim": 16,
            "max_resolution": (8, 10),
            "llama_layers": (0, 1, 1, 0),
        },
        _inputs,
    )
}
