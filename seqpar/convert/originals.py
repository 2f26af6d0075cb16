"""Opens checkpoints in their authors' formats: DiT, Large-DiT, U-ViT and autoencoders."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePath
from typing import Any, TypeVar

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from torch import Tensor

from seqpar.convert import consolidated
from seqpar.convert.formats import FORMATS, Original, Shapes
from seqpar.loading.checkpoint import Checkpoint, check, checkpoint_context, from_state_dict, open_checkpoint, stamp
from seqpar.loading.pickles import load_pickle, tensors_in
from seqpar.loop.blueprint import Blueprint
from seqpar.types.keys import KeyMap, TensorSource, count_layers, shape_of

T = TypeVar("T")
NESTED = ("ema", "model", "state_dict")  # where training checkpoints keep their weights; the first one is taken
WRAPPERS = ("module.", "_orig_mod.")  # key prefixes of DistributedDataParallel and torch.compile
PATHS = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
# what training scripts save among their arguments; paths are read as names of files, which nothing opens
ALLOWED: list[Any] = [
    Namespace,
    *((PurePath, f"{module}.{name}") for module in ("pathlib", "pathlib._local") for name in PATHS),
]


def open_file(path: Path) -> tuple[Checkpoint, dict[str, Any]]:
    """Open a state dict or training checkpoint; return its weights, and the training script's arguments ({} if none).

    Raises ValueError if the file holds anything other than tensors and plain values.
    """
    if path.suffix == ".safetensors":
        return open_checkpoint(path), {}
    now, content = stamp(path), load_pickle(path, ALLOWED)
    args = content.get("args") if isinstance(content, dict) else None
    if isinstance(content, dict):
        content = next((content[name] for name in NESTED if isinstance(content.get(name), dict)), content)
    return from_state_dict(str(path), _unwrapped(tensors_in(path, content)), {path: now}), _plain(args)


def open_transformer(path: Path, heads: int | None = None) -> tuple[Blueprint, dict[str, Any]]:
    """An original checkpoint as a model of seqpar, and the config.json of the folder that holds it.

    path: a file, or a folder of consolidated parts. heads: the number of attention heads, where the file does not state
    it. Raises ValueError if no model of seqpar has these keys and shapes. Reads headers and tables of positions only.
    """
    if parts := consolidated.parts_of(path):
        checkpoint = consolidated.merged([open_file(part)[0] for part in parts])
        arguments = parts[0].parent / consolidated.ARGUMENTS
        args = _plain(load_pickle(arguments, ALLOWED)) if arguments.is_file() else {}
        if (size := args.get("model_parallel_size", len(parts))) != len(parts):
            raise ValueError(
                f"{len(parts)} part(s) in {arguments.parent}, but {arguments.name} has model_parallel_size={size}"
            )
    else:
        checkpoint, args = open_file(path)
    with checkpoint_context(checkpoint):
        shapes = checkpoint.shapes
        found = next((known for known in FORMATS if known.is_original(shapes)), None)
        if found is None:
            examples = ", ".join(f"{key:.100}" for key in list(shapes)[:3])
            raise ValueError(
                f"keys like {examples} belong to no checkpoint of DiT, Large-DiT, UniDiffuser or a latent-diffusion VAE"
            )
        config = found.config_of(Original(checkpoint, args, heads, len(parts) or 1))
        if heads not in (None, config.num_attention_heads):
            raise ValueError(f"--heads is {heads}, but this model has {config.num_attention_heads}")
        keys = found.key_map(config)
        blueprint = Blueprint(checkpoint.name, found.model, config, checkpoint, keys)
        check(blueprint.meta(), checkpoint, keys)
    return blueprint, found.folder_config(config)


def _plain(args: Any) -> dict[str, Any]:
    # arguments that are numbers, text or None
    values = vars(args) if isinstance(args, Namespace) else args if isinstance(args, dict) else {}
    kinds = (str, int, float, type(None))
    return {name: value for name, value in values.items() if isinstance(name, str) and isinstance(value, kinds)}


def _unwrapped(state: Mapping[str, T]) -> dict[str, T]:
    for prefix in WRAPPERS:
        if all(key.startswith(prefix) for key in state):
            return _unwrapped({key.removeprefix(prefix): tensor for key, tensor in state.items()})
    return dict(state)


# Autoencoders of the latent-diffusion code, as diffusers' AutoencoderKL -----------------------------------------------

NAMES = {"to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "proj_out", "group_norm": "norm"}  # of attention layers
SCALE = 0.18215  # of Stable Diffusion's latents, which UniDiffuser and DiT use
TRAINING = ("loss.", "model_ema.")  # prefixes of keys that only training uses


def is_autoencoder(shapes: Iterable[str]) -> bool:
    """Whether these are keys of an original autoencoder."""
    return "decoder.up.0.block.0.conv1.weight" in shapes


def open_autoencoder(path: Path) -> tuple[dict[str, Any], Checkpoint, KeyMap]:
    """Diffusers' config of an original autoencoder, its checkpoint, and the key map to AutoencoderKL."""
    checkpoint, _ = open_file(path)
    with checkpoint_context(checkpoint):
        config = _autoencoder_config(checkpoint.shapes)
        with torch.device("meta"):
            model: Any = AutoencoderKL.from_config(config)
        levels = count_layers(checkpoint.shapes, "decoder.up")
        sources = {key: TensorSource((_original(key, levels),), _combine(key)) for key in model.state_dict()}
        keys = KeyMap(sources, frozenset(key for key in checkpoint.shapes if key.startswith(TRAINING)))
        check(model, checkpoint, keys)
    return config, checkpoint, keys


def _autoencoder_config(shapes: Shapes) -> dict[str, Any]:
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
