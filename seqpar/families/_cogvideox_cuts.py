"""Where CogVideoX's tokens are split."""

from __future__ import annotations

from seqpar.families._cuts import Boundary, Cuts, CutTokens
from seqpar.families._shared import IMAGE, OUT, TEXT, TEXT_IMAGE


def _cogvideox() -> Cuts:
    places = {
        "": Boundary(inputs={"image_rotary_emb": CutTokens("image", dim=0)}),
        "transformer_blocks.0": Boundary(inputs={"hidden_states": IMAGE, "encoder_hidden_states": TEXT}),
        "proj_out": OUT,
    }
    return Cuts(places, {"transformer_blocks.*.attn1": TEXT_IMAGE})
