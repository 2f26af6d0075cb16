"""The folder of an AutoencoderKL: open, check, load."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

from seqpar.loading.checkpoint import Checkpoint, check, check_layers, find_checkpoint, open_checkpoint
from seqpar.loading.errors import FAILURES
from seqpar.loading.keys import KeyMap, TensorSource
from seqpar.loading.parts import check_autoencoder, read_json
from seqpar.loading.placing import load

OLD = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}  # names of diffusers before 0.15


def key_map(expected: Iterable[str], shapes: Mapping[str, tuple[int, ...]]) -> KeyMap:
    """Return the key map of an AutoencoderKL, whose keys are `expected`; attention layers may have their old names."""
    return KeyMap({key: TensorSource((key if key in shapes else _old(key, shapes),)) for key in expected})


def _old(key: str, shapes: Iterable[str]) -> str:
    match = re.fullmatch(r"(.*\.attentions\.\d+\.)(to_q|to_k|to_v|to_out\.0)(\.\w+)", key)
    old = f"{match[1]}{OLD[match[2]]}{match[3]}" if match else key
    return old if old in shapes else key


def vae_factor(config: Any) -> int:
    """Return the number of pixels along each side of a latent pixel."""
    return 2 ** (len(config.block_out_channels) - 1)


def check_vae(folder: Path) -> Any:
    """Check a VAE's weights against its config, and return the config; reads headers.

    Raises ValueError if a key is missing, unknown or of another shape.
    """
    return open_vae(folder)[0].config


def load_vae(folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """Load the VAE that `check_vae` accepted."""
    vae, checkpoint, keys = open_vae(folder)
    load(vae, checkpoint, keys, dtype, device)
    return vae.eval()


def open_vae(folder: Path) -> tuple[Any, Checkpoint, KeyMap]:
    """Return the VAE on the meta device, its checkpoint and the key map between the two, which fit together."""
    file = folder / "config.json"
    config = read_json(file)
    name = config.get("_class_name", "AutoencoderKL")
    if name != "AutoencoderKL":
        raise ValueError(f"VAE {folder} is a {name}; only AutoencoderKL is supported here")
    checkpoint = open_checkpoint(find_checkpoint(folder))
    check_autoencoder(config, file)
    check_layers(config, checkpoint, file)
    try:
        with torch.device("meta"):
            model: Any = AutoencoderKL.from_config(config)
    except FAILURES as error:
        raise ValueError(f"{file} describes no AutoencoderKL: {error}") from error
    keys = key_map(model.state_dict(), checkpoint.shapes)
    check(model, checkpoint, keys)
    return model, checkpoint, keys
