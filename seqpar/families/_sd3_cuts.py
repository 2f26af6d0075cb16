"""Where SD3's tokens are split."""

from __future__ import annotations

from seqpar.families._cuts import Boundary, Cuts
from seqpar.families._shared import ALONE, IMAGE, IMAGE_TEXT, OUT, TEXT


def _sd3() -> Cuts:
    places = {
        "": Boundary(inputs={"block_controlnet_hidden_states": IMAGE}),
        "pos_embed": Boundary(outputs={0: IMAGE}),
        "context_embedder": Boundary(outputs={0: TEXT}),
        "proj_out": OUT,
    }
    attention = {"transformer_blocks.*.attn": IMAGE_TEXT, "transformer_blocks.*.attn2?": ALONE}
    return Cuts(places, attention, local=("image_proj.layers.*.attn",))  # of its IP-adapter, which is refused
