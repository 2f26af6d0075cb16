"""Original autoencoders of the latent-diffusion code, as diffusers' AutoencoderKL."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from seqpar.loading.keys import KeyMap, TensorSource, count_layers, shape_of

NAMES = {"to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "proj_out", "group_norm": "norm"}  # of attention layers
SCALE = 0.18215  # of Stable Diffusion's latents, which UniDiffuser and DiT use
TRAINING = ("loss.", "model_ema.")  # prefixes of keys that only training uses


def is_original(shapes: Iterable[str]) -> bool:
    """Return whether these are keys of an original autoencoder."""
    return "decoder.up.0.block.0.conv1.weight" in shapes


def config_of(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Return diffusers' config from the tensors' shapes."""
    levels = count_layers(shapes, "encoder.down")
    return {
        "_class_name": "AutoencoderKL",
        "in_channels": shape_of(shapes, "encoder.conv_in.weight", 4)[1],
        "out_channels": shape_of(shapes, "decoder.conv_out.weight", 4)[0],
        "down_block_types": ["DownEncoderBlock2D"] * levels,
        "up_block_types": ["UpDecoderBlock2D"] * levels,
        "block_out_channels": [
            shape_of(shapes, f"encoder.down.{level}.block.0.conv1.weight", 4)[0] for level in range(levels)
        ],
        "layers_per_block": count_layers(shapes, "encoder.down.0.block"),
        "latent_channels": shape_of(shapes, "post_quant_conv.weight", 4)[0],
        "scaling_factor": SCALE,
    }


def key_map(expected: Iterable[str], shapes: Mapping[str, tuple[int, ...]]) -> KeyMap:
    """Return the key map to diffusers' AutoencoderKL, whose keys are `expected`."""
    levels = count_layers(shapes, "decoder.up")
    ignored = frozenset(key for key in shapes if key.startswith(TRAINING))
    return KeyMap({key: TensorSource((_original(key, levels),), _combine(key)) for key in expected}, ignored)


def _combine(key: str) -> Any:
    def flat(tensor: Tensor) -> Tensor:  # attention layers are 1 x 1 convolutions in the original
        return tensor.flatten(1) if tensor.shape[2:] == (1, 1) else tensor

    return flat if ".attentions." in key and key.endswith(".weight") else lambda tensor: tensor


def _original(key: str, levels: int) -> str:
    key = re.sub(r"mid_block\.resnets\.(\d)", lambda m: f"mid.block_{int(m[1]) + 1}", key)
    key = re.sub(r"mid_block\.attentions\.0\.(to_out\.0|\w+)", lambda m: f"mid.attn_1.{NAMES[m[1]]}", key)
    key = re.sub(r"down_blocks\.(\d+)\.resnets\.(\d+)", r"down.\1.block.\2", key)
    key = re.sub(r"down_blocks\.(\d+)\.downsamplers\.0", r"down.\1.downsample", key)
    key = re.sub(r"up_blocks\.(\d+)", lambda m: f"up.{levels - 1 - int(m[1])}", key)
    key = re.sub(r"(up\.\d+)\.resnets\.(\d+)", r"\1.block.\2", key)
    key = key.replace(".upsamplers.0", ".upsample").replace("conv_shortcut", "nin_shortcut")
    return key.replace("conv_norm_out", "norm_out")
