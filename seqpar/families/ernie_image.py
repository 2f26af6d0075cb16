"""Where ERNIE-Image's tokens are split: image and text are one sequence, whose tokens come before the batch rows."""

from __future__ import annotations

import torch
from diffusers.models.transformers.transformer_ernie_image import ErnieImageTransformer2DModelOutput

from seqpar.families import Published, latents
from seqpar.families._cuts import Boundary, Cuts, CutTokens, GatherTokens, Joint
from seqpar.families._tiny import TEXT, Tiny


def _ernie_image() -> Cuts:
    tokens = CutTokens("image and text", dim=0)
    places = {
        "pos_embed": Boundary(outputs={0: CutTokens(tokens.stream)}),
        "layers.0": Boundary(inputs={"x": tokens}),
        "layers.*": Boundary(inputs={"temb": tokens}),
        "layers.-1": Boundary(gathers={0: GatherTokens(tokens.stream, dim=0)}),
    }
    return Cuts(places, {"layers.*.self_attention": Joint((tokens.stream,))}, output=ErnieImageTransformer2DModelOutput)


CUTS = {"ErnieImageTransformer2DModel": _ernie_image()}
PUBLISHED = {
    "baidu/ERNIE-Image": Published(
        "ErnieImagePipeline",
        "ErnieImageTransformer2DModel",
        {
            **{"hidden_size": 4096, "num_attention_heads": 32, "num_layers": 36},
            "ffn_hidden_size": 12288,
            "text_in_dim": 3072,
        },
        latents(32),
    )
}
TINY = {
    "ErnieImageTransformer2DModel": Tiny(
        {"hidden_size": 48, "ffn_hidden_size": 64, "text_in_dim": 24, "rope_axes_dim": (4, 6, 6)},
        lambda config, random: {
            "hidden_states": random(2, config["in_channels"], 3 * config["patch_size"], 5 * config["patch_size"]),
            "text_bth": random(2, TEXT, 24),
            "text_lens": torch.tensor([TEXT, TEXT - 2]),
        },
    )
}
