"""Where FLUX.3's tokens are split."""

from __future__ import annotations

from dataclasses import replace

from seqpar.families._cuts import Boundary, Cuts, CutTokens, Joint
from seqpar.families._shared import ALONE, IMAGE, OUT


def _flux3() -> Cuts:
    text, reference = CutTokens("text"), CutTokens("reference")  # each attends to itself alone in the first blocks
    root = Boundary(
        inputs={
            "hidden_states": IMAGE,
            "encoder_hidden_states": text,
            "image_cond_hidden_states": reference,
            "img_ids": CutTokens("image", dim=-2),
            "txt_ids": replace(text, dim=-2),
            "image_cond_ids": replace(reference, dim=-2),
        }
    )
    attention = {
        "txt_mode_blocks.*.attn": Joint(("text",)),
        "mode_blocks.image.*.attn": ALONE,
        "mode_blocks.image_cond.*.attn": Joint(("reference",)),
        "single_transformer_blocks.*.attn": Joint(("text", "image", "reference"), absent=("reference",)),
    }
    return Cuts({"": root, "proj_out": OUT}, attention)
