"""Where the tokens of CogView4 and CogView3-Plus are split."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from seqpar.families import Published
from seqpar.families._cuts import IMAGE, OUT, TEXT, TEXT_IMAGE, Boundary, Cuts, CutTokens
from seqpar.families._tiny import Tiny

PLACES = {
    "transformer_blocks.0": Boundary(inputs={"hidden_states": IMAGE, "encoder_hidden_states": TEXT}),
    "proj_out": OUT,
}
ROTARY = {
    "rope": Boundary(on_device=True),
    "transformer_blocks.*": Boundary(inputs={"image_rotary_emb": CutTokens("image", dim=0)}),
}
JOINT = {"transformer_blocks.*.attn1": TEXT_IMAGE}
ADDS = {"attention_mask": "it adds 1 to the scores of some pairs of tokens"}


def _inputs(config: Mapping[str, Any], random: Callable[..., Tensor]) -> dict[str, Any]:
    size = torch.tensor([[48, 80], [40, 64]]).double()
    latents, crop = random(2, config["in_channels"], 6, 10), torch.zeros(2, 2).double()
    return {"hidden_states": latents, "original_size": size, "target_size": size, "crop_coords": crop}


CUTS = {
    "CogView4Transformer2DModel": Cuts({**PLACES, **ROTARY}, JOINT, refused=ADDS),
    "CogView3PlusTransformer2DModel": Cuts(PLACES, JOINT),
}
PROMPT_TOKENS = {"CogView3PlusTransformer2DModel": 224}
PUBLISHED = {
    "THUDM/CogView4-6B": Published(
        "CogView4Pipeline",
        "CogView4Transformer2DModel",
        {"attention_head_dim": 128, "num_attention_heads": 32, "num_layers": 28},
    ),
    "THUDM/CogView3-Plus-3B": Published("CogView3PlusPipeline", "CogView3PlusTransformer2DModel"),
}
TINY = {
    "CogView4Transformer2DModel": Tiny(
        {"condition_dim": 8}, lambda config, random: {**_inputs(config, random), "attention_mask": None}
    ),
    "CogView3PlusTransformer2DModel": Tiny({"condition_dim": 8, "pos_embed_max_size": 8}, _inputs),
}
