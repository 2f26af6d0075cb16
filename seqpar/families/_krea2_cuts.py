"""Where Krea 2's tokens are split."""

from __future__ import annotations

from seqpar.families._cuts import Boundary, CutJoined, Cuts, CutTokens, Joint, Padding
from seqpar.families._shared import IMAGE, OUT


def _krea2() -> Cuts:
    inputs = {
        "hidden_states": IMAGE,
        "encoder_hidden_states": CutTokens("text"),  # the text's own blocks attend to it alone
        "position_ids": CutJoined(("text", "image")),
    }
    joint = {
        "text_fusion.refiner_blocks.*.attn": Joint(("text",), masked=True),
        "transformer_blocks.*.attn": Joint(("text", "image"), masked=True),
    }
    mask = "encoder_attention_mask"
    padding = {mask: Padding("encoder_hidden_states", 4, on_ranks=True, rows="position_ids")}  # a text's rows are 0
    places, local = {"": Boundary(inputs), "final_layer": OUT}, ("text_fusion.layerwise_blocks.*.attn",)
    return Cuts(places, joint, {mask: "text"}, padding=padding, bools=(mask,), local=local)
