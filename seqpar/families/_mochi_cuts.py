"""Where Mochi's tokens are split."""

from __future__ import annotations

from seqpar.families._cuts import Boundary, Cuts, CutTokens, Joint
from seqpar.families._mochi_processor import MochiProcessor
from seqpar.families._shared import IMAGE, OUT, TEXT


def _mochi() -> Cuts:
    places = {
        "time_embed": Boundary(outputs={1: TEXT}),
        "rope": Boundary(outputs={0: CutTokens("image", dim=0), 1: CutTokens("image", dim=0)}),
        "transformer_blocks.0": Boundary(inputs={"hidden_states": IMAGE}),
        "transformer_blocks.*": Boundary(inputs={"encoder_attention_mask": TEXT}),
        "proj_out": OUT,
    }
    joint = {"transformer_blocks.*.attn1": Joint(("image", "text"), masked=True, processor=MochiProcessor)}
    mask = "encoder_attention_mask"
    # diffusers' processor adds the outputs of a text's tokens to its first places, wherever the tokens are
    return Cuts(places, joint, masks={mask: "text"}, kept=(mask,), at_end=(mask,))
