"""Where Chroma's tokens are split."""

from __future__ import annotations

from dataclasses import replace

from seqpar.families._cuts import JOINED, Boundary, Cuts
from seqpar.families._flux_cuts import _flux


def _chroma() -> Cuts:
    """Return FLUX's cuts; its blocks make a mask for queries and keys of one for all tokens, which attention takes."""
    flux = _flux()
    zeros = {"time_text_embed.guidance_proj": Boundary(numbers=("timesteps",))}
    joint = {path: replace(joint, masked=True) for path, joint in flux.attention.items()}
    mask = "attention_mask"
    return Cuts(
        {**flux.places, **zeros}, joint, {mask: JOINED}, weighed={mask: ("encoder_hidden_states", "hidden_states")}
    )
