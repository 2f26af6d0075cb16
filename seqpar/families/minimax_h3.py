"""Where MiniMax-H3's tokens are split: text, sound and video are one packed sequence.

Rows enter and leave it by their places, so that it is whole before the first block and after the last layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from diffusers.models.transformers.transformer_minimax_h3 import MiniMaxH3TransformerOutput
from torch import Tensor

from seqpar.families._cuts import Boundary, Cuts, CutTokens, GatherTokens, Joint
from seqpar.families._masks import Prepared
from seqpar.families._tiny import Tiny

PACKED = CutTokens("text, sound and video")


def _minimax_h3() -> Cuts:
    row, out = replace(PACKED, dim=0), Boundary(gathers={0: GatherTokens(PACKED.stream)})
    places = {
        "rope": Boundary(outputs={0: row, 1: row}),
        "transformer_blocks.0": Boundary(inputs={"hidden_states": PACKED}),
        "transformer_blocks.*": Boundary(inputs={"adaln_indices": row}),
        "norm_out": Boundary(inputs={"timestep_indices": row}),
        "proj_out": out,
        "audio_proj_out": out,
    }
    joint, text = {"transformer_blocks.*.attn": Joint((PACKED.stream,))}, ("token_refiner.refiner_blocks.*.attn",)
    return Cuts(places, joint, local=text, prepare=_prepare, output=MiniMaxH3TransformerOutput)


def _prepare(call: Prepared) -> None:
    """Add a timestep that no token has, if there are as many as batch rows, with which they would be split."""
    timesteps, rows = call.arguments["timestep"], len(call.arguments["hidden_states"])
    if len(timesteps) == rows > 1:
        call.cut(timestep=torch.cat([timesteps, timesteps[-1:]]))


def _inputs(config: Mapping[str, Any], random: Callable[..., Tensor]) -> dict[str, Any]:
    """Return a call of 5 tokens of text, 3 of sound and 9 of video."""
    tags, places = torch.tensor([1, 2, 0, 0, 1, 0, 2, 0, 0, 1, 0, 1, 0, 2, 0, 1, 0]), torch.arange(17)
    return {
        "hidden_states": random(2, 9, 4 * config["in_channels"]),
        "audio_hidden_states": random(2, 3, config["audio_in_channels"]),
        "encoder_hidden_states": random(2, 5, config["text_dim"]),
        "timestep_indices": (tags == 0).long(),
        "token_tags": tags,
        "position_ids": torch.stack((places // 6, places // 3 % 2, places % 3), dim=1),
        **{f"{name}_indices": places[tags == tag] for tag, name in enumerate(("video", "text", "audio"))},
    }


CUTS = {"MiniMaxH3Transformer3DModel": _minimax_h3()}
UNGUIDED = ("MiniMaxH3Transformer3DModel",)  # guidance is distilled
TINY = {"MiniMaxH3Transformer3DModel": Tiny(inputs=_inputs)}
