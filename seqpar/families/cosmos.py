"""Where the tokens of Cosmos 1, 2 and 2.5 are split: those of the video; texts are read by cross-attention."""

from __future__ import annotations

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
