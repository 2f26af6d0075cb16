"""Where the tokens of SkyReels-V2 are split: Wan's (`wan.py`), with a timestep for each frame."""

from __future__ import annotations

from typing import Any

import torch

from seqpar.families import Published, latents
from seqpar.families._cuts import ALONE, IMAGE, OUT, Boundary, Cuts, CutTokens
from seqpar.families._tiny import Tiny


def _skyreels_v2() -> Cuts:
    places = {
        "rope": Boundary(outputs={0: IMAGE, 1: IMAGE}),
        "blocks.0": Boundary(inputs={"hidden_states": IMAGE}),
        "blocks.*": Boundary(inputs={"temb": CutTokens("image", dim=2, dims=4)}),
        "blocks.-1": OUT,
    }
    return Cuts(places, {"blocks.*.attn1": ALONE}, why_not=_masks_causally, local=("blocks.*.attn2",))


def _masks_causally(module: Any) -> str | None:
    causal = module.config.num_frame_per_block > 1
    return "its frames attend to those before them alone, which no strategy splits" if causal else None


CUTS = {"SkyReelsV2Transformer3DModel": _skyreels_v2()}
PROMPT_TOKENS = {"SkyReelsV2Transformer3DModel": 512}
LARGE = {"num_attention_heads": 40, "ffn_dim": 13824, "num_layers": 40}
PUBLISHED = {
    f"Skywork/SkyReels-V2-{name}-14B-720P-Diffusers": Published(
        pipeline, "SkyReelsV2Transformer3DModel", LARGE, latents(frames=4)
    )
    for name, pipeline in (("T2V", "SkyReelsV2Pipeline"), ("DF", "SkyReelsV2DiffusionForcingPipeline"))
}
TINY = {
    "SkyReelsV2Transformer3DModel": Tiny(
        {"attention_head_dim": 12, "text_dim": 24, "freq_dim": 16, "ffn_dim": 48, "rope_max_seq_len": 32},
        lambda config, random: {
            "timestep": torch.tensor([[300, 400, 500], [600, 700, 800]]),
            "enable_diffusion_forcing": True,
        },
    )
}
