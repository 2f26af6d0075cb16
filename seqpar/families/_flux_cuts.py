"""Where FLUX.1's tokens are split."""

from __future__ import annotations

from dataclasses import replace

from seqpar.families._cuts import Boundary, Cuts, CutTokens
from seqpar.families._shared import IMAGE, OUT, TEXT, TEXT_IMAGE


def _flux() -> Cuts:
    root = Boundary(
        inputs={
            "hidden_states": IMAGE,
            "encoder_hidden_states": TEXT,
            "img_ids": CutTokens("image", dim=-2),
            "txt_ids": replace(TEXT, dim=-2),
            "controlnet_block_samples": IMAGE,
            "controlnet_single_block_samples": IMAGE,
        }
    )
    both = {"transformer_blocks.*.attn": TEXT_IMAGE, "single_transformer_blocks.*.attn": TEXT_IMAGE}
    return Cuts({"": root, "proj_out": OUT}, both)
