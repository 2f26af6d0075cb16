"""Opens checkpoints in their authors' formats: DiT, Large-DiT, U-ViT and autoencoders."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any, TypeVar

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

from seqpar.convert import consolidated, dit, large_dit, uvit, vae
from seqpar.loading.checkpoint import Checkpoint, check, checkpoint_context, from_state_dict, open_checkpoint, stamp
from seqpar.loading.keys import KeyMap
from seqpar.loading.pickles import load_pickle, tensors_in
from seqpar.loop.blueprint import Blueprint
from seqpar.loop.models import dit as dit_model
from seqpar.loop.models import large_dit as large_dit_model
from seqpar.loop.models import uvit as uvit_model

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
    """Return an original checkpoint as a model of seqpar, and the config.json of the folder that holds it.

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
        blueprint, config = _recognised(checkpoint, args, heads, len(parts) or 1)
        if heads not in (None, blueprint.config.num_attention_heads):
            raise ValueError(f"--heads is {heads}, but this model has {blueprint.config.num_attention_heads}")
        assert blueprint.keys is not None
        check(blueprint.meta(), checkpoint, blueprint.keys)
    return blueprint, config


def _recognised(
    checkpoint: Checkpoint, args: Mapping[str, Any], heads: int | None, parts: int
) -> tuple[Blueprint, dict[str, Any]]:
    name, shapes = checkpoint.name, checkpoint.shapes
    if dit.is_original(shapes):
        config = dit.config_of(checkpoint, args, heads)
        return Blueprint(name, dit_model, config, checkpoint, dit.key_map(config)), dit.folder_config(config)
    if large_dit.is_original(shapes):
        config = large_dit.config_of(shapes, args, heads, parts)
        keys = large_dit_model.key_map(config)
        return Blueprint(name, large_dit_model, config, checkpoint, keys), large_dit.folder_config(config)
    if uvit.is_original(shapes):
        config = uvit.config_of(shapes)
        return Blueprint(name, uvit_model, config, checkpoint, uvit.key_map(config)), uvit.folder_config(config)
    keys = ", ".join(f"{key:.100}" for key in list(shapes)[:3])
    raise ValueError(
        f"keys like {keys} belong to no checkpoint of DiT, Large-DiT, UniDiffuser or a latent-diffusion VAE"
    )


def open_autoencoder(path: Path) -> tuple[dict[str, Any], Checkpoint, KeyMap]:
    """Return diffusers' config of an original autoencoder, its checkpoint, and the key map to AutoencoderKL."""
    checkpoint, _ = open_file(path)
    with checkpoint_context(checkpoint):
        config = vae.config_of(checkpoint.shapes)
        with torch.device("meta"):
            model: Any = AutoencoderKL.from_config(config)
        keys = vae.key_map(model.state_dict(), checkpoint.shapes)
        check(model, checkpoint, keys)
    return config, checkpoint, keys


def _plain(args: Any) -> dict[str, Any]:
    """Return arguments that are numbers, text or None; {} for anything but a Namespace or dict."""
    values = vars(args) if isinstance(args, Namespace) else args if isinstance(args, dict) else {}
    kinds = (str, int, float, type(None))
    return {name: value for name, value in values.items() if isinstance(name, str) and isinstance(value, kinds)}


def _unwrapped(state: Mapping[str, T]) -> dict[str, T]:
    """Return a state dict without the prefixes of wrappers that all of its keys have."""
    for prefix in WRAPPERS:
        if all(key.startswith(prefix) for key in state):
            return _unwrapped({key.removeprefix(prefix): tensor for key, tensor in state.items()})
    return dict(state)
