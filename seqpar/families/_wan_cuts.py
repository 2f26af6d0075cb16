"""Where the tokens of Wan and Wan VACE are split."""

from __future__ import annotations

from seqpar.families._cuts import Boundary, Cuts, CutTokens
from seqpar.families._shared import ALONE, IMAGE, OUT


def _wan() -> Cuts:
    places = {
        "": Boundary(inputs={"timestep": CutTokens("image", dims=2)}),
        "rope": Boundary(outputs={0: IMAGE, 1: IMAGE}),
        "blocks.0": Boundary(inputs={"hidden_states": IMAGE}),
        "proj_out": OUT,
    }
    return Cuts(places, {"blocks.*.attn1": ALONE}, local=("blocks.*.attn2",))


def _wan_vace() -> Cuts:
    wan = _wan()
    places = {
        "vace_blocks.0": Boundary(inputs={"control_hidden_states": IMAGE}),
        "vace_blocks.*": Boundary(inputs={"hidden_states": IMAGE}),
    }
    local = (*wan.local, "vace_blocks.*.attn2")
    return Cuts({**wan.places, **places}, {**wan.attention, "vace_blocks.*.attn1": ALONE}, local=local)
