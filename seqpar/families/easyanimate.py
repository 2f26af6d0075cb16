"""Where EasyAnimate's tokens are split."""

from __future__ import annotations

from seqpar.families import Published, latents
from seqpar.families._cuts import IMAGE, OUT, TEXT, TEXT_IMAGE, Boundary, Cuts, CutTokens
from seqpar.families._tiny import TEXT as LENGTH
from seqpar.families._tiny import Tiny

ROWS = CutTokens("image", dim=0)
PLACES = {
    "rope_embedding": Boundary(outputs={0: ROWS, 1: ROWS}, on_device=True),
    "transformer_blocks.0": Boundary(inputs={"hidden_states": IMAGE, "encoder_hidden_states": TEXT}),
    "proj_out": OUT,
}
CUTS = {"EasyAnimateTransformer3DModel": Cuts(PLACES, {"transformer_blocks.*.attn1": TEXT_IMAGE})}
SIZES = {"in_channels": 16, "out_channels": 16, "patch_size": 2}
PUBLISHED = {
    "alibaba-pai/EasyAnimateV5.1-12b-zh-diffusers": Published(
        "EasyAnimatePipeline",
        "EasyAnimateTransformer3DModel",
        {**SIZES, "num_attention_heads": 48, "add_norm_text_encoder": True},
        latents(frames=4),
    )
}
TINY = {
    "EasyAnimateTransformer3DModel": Tiny(
        {"attention_head_dim": 16, "text_embed_dim": 24, "in_channels": 4, "out_channels": 4, "patch_size": 2},
        lambda config, random: {
            "hidden_states": random(2, config["in_channels"], 3, 6, 10),
            "encoder_hidden_states": random(2, LENGTH, 24),
        },
    )
}
