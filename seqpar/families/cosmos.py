"""Where the tokens of Cosmos 1, 2 and 2.5 are split: those of the video; texts are read by cross-attention."""

from __future__ import annotations

from seqpar.families import Published, latents
from seqpar.families._cuts import ALONE, IMAGE, OUT, Boundary, Cuts, CutTokens
from seqpar.families._tiny import Tiny


def _cosmos() -> Cuts:
    rows, of_token = CutTokens("image", dim=0), CutTokens("image", dims=3)
    each = {"embedded_timestep": of_token, "temb": of_token, "image_rotary_emb": rows}
    each |= dict.fromkeys(("extra_pos_emb", "controlnet_residual"), IMAGE)
    places = {
        "transformer_blocks.0": Boundary(inputs={"hidden_states": IMAGE}),
        "transformer_blocks.*": Boundary(inputs=each),
        "transformer_blocks.-1": OUT,
    }
    return Cuts(places, {"transformer_blocks.*.attn1": ALONE}, local=("transformer_blocks.*.attn2",))


CUTS = {"CosmosTransformer3DModel": _cosmos()}
UNPAIRED = ("CosmosTransformer3DModel",)  # its pipelines read a call's result before the step's other call
PROMPT_TOKENS = {"CosmosTransformer3DModel": 512}
SMALL = {"num_attention_heads": 16, "extra_pos_embed_type": None}
PUBLISHED = {
    "nvidia/Cosmos-1.0-Diffusion-7B-Text2World": Published(
        "CosmosTextToWorldPipeline", "CosmosTransformer3DModel", vae=latents(frames=8)
    ),
    "nvidia/Cosmos-Predict2-2B-Text2Image": Published(
        "Cosmos2TextToImagePipeline", "CosmosTransformer3DModel", SMALL, latents(frames=4)
    ),
    "nvidia/Cosmos-Predict2.5-2B": Published(
        "Cosmos2_5_PredictBasePipeline",
        "CosmosTransformer3DModel",
        {**SMALL, "in_channels": 17, "use_crossattn_projection": True, "crossattn_proj_in_channels": 100352},
        latents(frames=4),
    ),
}
TINY = {
    "CosmosTransformer3DModel": Tiny(
        {
            "concat_padding_mask": False,
            "attention_head_dim": 12,
            "max_size": (8, 16, 16),
            "text_embed_dim": 24,
            "extra_pos_embed_type": None,
            "controlnet_block_every_n": 2,
        },
        lambda config, random: {
            "hidden_states": random(2, config["in_channels"], 3, 6, 10),
            "fps": 24,
            "block_controlnet_hidden_states": [random(2, 45, 36)],
        },
    )
}
