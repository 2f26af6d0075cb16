"""Where Cosmos 3's tokens are split: those of video, sound and action, which follow the text.

The text attends causally to itself alone, so every rank computes the whole of it, and the other tokens read it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from diffusers.models.transformers.transformer_cosmos3 import Cosmos3OmniTransformerOutput
from torch import Tensor

from seqpar.families import Published, latents
from seqpar.families._cuts import Boundary, Cuts, CutTokens, GatherTokens, Joint
from seqpar.families._masks import Keys
from seqpar.families._tiny import Tiny


def _cosmos3() -> Cuts:
    rows = CutTokens("video", dim=0)
    places = {
        "layers.0": Boundary(inputs={"gen_seq": rows}),
        "layers.*": Boundary(inputs={"rotary_emb": (None, None, rows, rows)}),
        "norm_moe_gen": Boundary(gathers={0: GatherTokens(rows.stream, dim=0)}),
    }
    joint = {"layers.*.self_attn": Joint((rows.stream,), after_prefix=True)}
    reads = {"action_tokens": "it checks on the host which robots actions are for"}
    return Cuts(places, joint, keys=_keys, eager_with=reads, output=Cosmos3OmniTransformerOutput)


def _keys(arguments: dict[str, Any], note: Hashable) -> Keys:
    return Keys(prefix=arguments["und_len"])


def _inputs(config: Mapping[str, Any], random: Callable[..., Tensor]) -> dict[str, Any]:
    """Return a call of 7 tokens of text, 3 frames of 15 of a video, of which the first is given, and 4 of sound."""
    places, video, sound, noisy = torch.arange(56), slice(7, 52), slice(52, 56), slice(22, 52)
    return {
        "input_ids": torch.tensor([3, 1, 4, 1, 5, 9, 2]),
        "text_indexes": places[:7],
        "position_ids": torch.stack((places, places // 5, places % 5)).double(),
        "und_len": 7,
        "sequence_length": 56,
        "vision_tokens": [random(1, config["latent_channel"], 3, 6, 10)],
        "vision_token_shapes": [(3, 3, 5)],
        "vision_sequence_indexes": places[video],
        "vision_mse_loss_indexes": places[noisy],
        "vision_timesteps": torch.full((30,), 700.0, dtype=torch.float64),
        "vision_noisy_frame_indexes": [torch.tensor([1, 2])],
        "sound_tokens": [random(config["sound_dim"], 4)],
        "sound_token_shapes": [(4, 1, 1)],
        "sound_sequence_indexes": places[sound],
        "sound_mse_loss_indexes": places[sound],
        "sound_timesteps": torch.full((4,), 700.0, dtype=torch.float64),
        "sound_noisy_frame_indexes": [torch.arange(4)],
    }


CUTS = {"Cosmos3OmniTransformer": _cosmos3()}
OF_TEXT = {"Cosmos3OmniTransformer": r"mlp\."}
UNPAIRED = ("Cosmos3OmniTransformer",)  # its pipeline reads a call's result before the step's other call
SIZES = {"hidden_size": 48, "head_dim": 16, "intermediate_size": 64, "vocab_size": 16, "rope_axes_dim": (4, 2, 2)}
LATENTS = {"latent_channel": 4, "patch_latent_dim": 16, "sound_gen": True, "sound_dim": 6}
PUBLISHED = {
    "nvidia/Cosmos3-Nano": Published(
        "Cosmos3OmniPipeline",
        "Cosmos3OmniTransformer",
        {"sound_gen": True, "sound_dim": 64, "action_gen": True, "action_dim": 64},
        latents(48, 16, 4),
        (720, 1280),
        189,
    )
}
TINY = {"Cosmos3OmniTransformer": Tiny({**SIZES, **LATENTS}, _inputs)}
