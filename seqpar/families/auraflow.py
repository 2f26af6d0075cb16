"""Where AuraFlow's tokens are split."""

from __future__ import annotations

from seqpar.families import Pipelines, Published, latents
from seqpar.families._cuts import IMAGE, OUT, TEXT, TEXT_IMAGE, Boundary, Cuts
from seqpar.families._tiny import Tiny

PLACES = {
    "pos_embed": Boundary(outputs={0: IMAGE}),
    "joint_transformer_blocks.0": Boundary(inputs={"encoder_hidden_states": TEXT}),
    "proj_out": OUT,
}
BLOCKS_OF_BOTH = ("joint_transformer_blocks.*.attn", "single_transformer_blocks.*.attn")
CUTS = {"AuraFlowTransformer2DModel": Cuts(PLACES, dict.fromkeys(BLOCKS_OF_BOTH, TEXT_IMAGE))}
PIPELINES = Pipelines(sigmas="AuraFlow")
PUBLISHED = {
    "fal/AuraFlow-v0.3": Published(
        "AuraFlowPipeline", "AuraFlowTransformer2DModel", {"pos_embed_max_size": 9216}, latents(4)
    )
}
TINY = {
    "AuraFlowTransformer2DModel": Tiny(
        {"caption_projection_dim": 96}, lambda config, random: {"hidden_states": random(2, 4, 6, 10)}
    )
}
