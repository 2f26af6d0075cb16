"""Where LTX-Video's tokens are split."""

from __future__ import annotations

from seqpar.families._cuts import Boundary, Cuts, CutTokens
from seqpar.families._shared import ALONE, IMAGE, OUT


def _ltx() -> Cuts:
    places = {
        "": Boundary(inputs={"hidden_states": IMAGE, "timestep": CutTokens("image", dims=2)}),
        "rope": Boundary(outputs={0: IMAGE, 1: IMAGE}),
        "proj_out": OUT,
    }
    masks = {"encoder_attention_mask": "text"}
    attention, local = {"transformer_blocks.*.attn1": ALONE}, ("transformer_blocks.*.attn2",)
    return Cuts(places, attention, masks, passed=tuple(masks), local=local)
