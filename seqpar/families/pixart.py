"""Where the tokens of DiT and PixArt are split."""

from __future__ import annotations

import torch

from seqpar.families import Published, latents
from seqpar.families._cuts import ALONE, IMAGE, OUT, Boundary, Cuts, StepBlocks
from seqpar.families._tiny import Tiny


def _from_patches(out: str) -> Cuts:
    """Return the cuts of models of one stream of image patches, with or without cross-attention to text."""
    places = {"pos_embed": Boundary(outputs={0: IMAGE}), out: OUT}
    return Cuts(places, {"transformer_blocks.*.attn1": ALONE}, local=("transformer_blocks.*.attn2",))


CUTS = {"PixArtTransformer2DModel": _from_patches("proj_out"), "DiTTransformer2DModel": _from_patches("proj_out_2")}
STEPS = {"PixArtTransformer2DModel": StepBlocks({"transformer_blocks": ("hidden_states",)})}
PROMPT_TOKENS = {"PixArtTransformer2DModel": 300}
PUBLISHED = {
    "PixArt-alpha/PixArt-Sigma-XL-2-1024-MS": Published(
        "PixArtSigmaPipeline", "PixArtTransformer2DModel", {"caption_channels": 4096}, latents(4)
    ),
    "facebook/DiT-XL-2-256": Published(
        "DiTPipeline", "DiTTransformer2DModel", {"out_channels": 8}, latents(4), (256, 256)
    ),
}
TINY = {
    "PixArtTransformer2DModel": Tiny(
        {"caption_channels": 24, "sample_size": 16},
        lambda config, random: {"added_cond_kwargs": {"resolution": None, "aspect_ratio": None}},
    ),
    "DiTTransformer2DModel": Tiny(
        {"sample_size": 6},
        lambda config, random: {"hidden_states": random(2, 4, 6, 6), "class_labels": torch.tensor([3, 5])},
    ),
}
