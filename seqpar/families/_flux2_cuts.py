"""Where FLUX.2's tokens are split."""

from __future__ import annotations

from dataclasses import replace

from seqpar.families._cuts import Boundary, Cuts, CutTokens
from seqpar.families._shared import IMAGE, OUT, TEXT, TEXT_IMAGE


def _flux2() -> Cuts:
    ids = {"img_ids": CutTokens("image", dim=-2), "txt_ids": replace(TEXT, dim=-2)}
    root = Boundary(inputs={"hidden_states": IMAGE, "encoder_hidden_states": TEXT, **ids})
    both = {"transformer_blocks.*.attn": TEXT_IMAGE, "single_transformer_blocks.*.attn": TEXT_IMAGE}
    cached = "kept keys and values of reference images are those of all tokens; call the pipeline without a key cache"
    return Cuts({"": root, "proj_out": OUT}, both, refused={"kv_cache_mode": cached, "kv_cache": cached})
