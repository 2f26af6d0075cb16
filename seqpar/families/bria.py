"""Where the tokens of Bria and Bria FIBO are split: as FLUX.1's (`flux.py`), and those of FIBO's layers of text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from seqpar.families import Pipelines, Published, latents
from seqpar.families._cuts import TEXT, Boundary, Cuts
from seqpar.families._tiny import TEXT as LENGTH
from seqpar.families._tiny import Tiny
from seqpar.families.flux import cuts_of_kin


def _bria() -> Cuts:
    residuals = {"controlnet_single_block_samples": "diffusers adds it at places that depend on the text's length"}
    return replace(cuts_of_kin("controlnet_block_samples"), refused=residuals)


def _bria_fibo() -> Cuts:
    cuts = cuts_of_kin()
    inputs = {**cuts.places[""].inputs, "text_encoder_layers": TEXT}
    return replace(cuts, places={**cuts.places, "": Boundary(inputs)})


def _inputs(config: Mapping[str, Any], random: Callable[..., Tensor]) -> dict[str, Any]:
    width, layers = config["text_encoder_dim"], config["num_layers"] + config["num_single_layers"]
    return {"text_encoder_layers": [random(2, LENGTH, width) for _ in range(layers)]}


CUTS = {"BriaTransformer2DModel": _bria(), "BriaFiboTransformer2DModel": _bria_fibo()}
PIPELINES = Pipelines(sigmas="Bria")
PROMPT_TOKENS = {"BriaTransformer2DModel": 128}
SMALL = {"attention_head_dim": 96, "num_layers": 8, "num_single_layers": 28, "axes_dims_rope": [8, 44, 44]}
PUBLISHED = {
    "briaai/BRIA-3.2": Published("BriaPipeline", "BriaTransformer2DModel", {**SMALL, "in_channels": 16}, latents(4)),
    "briaai/FIBO": Published(
        "BriaFiboPipeline",
        "BriaFiboTransformer2DModel",
        {"in_channels": 48, "num_layers": 8, "text_encoder_dim": 2048},
        latents(48, 16),
    ),
}
TINY = {
    "BriaTransformer2DModel": Tiny({"pooled_projection_dim": 16}),
    "BriaFiboTransformer2DModel": Tiny({"text_encoder_dim": 12, "pooled_projection_dim": 16}, _inputs),
}
