"""A VAE's folder or file: open, check, load."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from torch import Tensor

from seqpar.loading import vae_keys
from seqpar.loading.checkpoint import Checkpoint, check, find_checkpoint, open_checkpoint
from seqpar.loading.jsons import read_json
from seqpar.loading.keys import KeyMap
from seqpar.loading.parts import check_autoencoder
from seqpar.loading.placing import load

# what diffusers raises for a config that describes no decoder
FAILURES = (ValueError, TypeError, KeyError, IndexError, AttributeError, ZeroDivisionError, RuntimeError)


def vae_factor(config: Any) -> int:
    """Return the number of pixels along each side of a latent pixel."""
    return 2 ** (len(config.block_out_channels) - 1)


def check_vae(path: Path) -> Any:
    """Check the weights of a decoder against its config, and return the config.

    path: a folder of diffusers or ppdiffusers, or an original latent-diffusion file, whose shapes are its config. This
    reads only the file's header. Raises ValueError if a key is missing, unknown or of another shape.
    """
    return open_vae(path)[0].config


def load_vae(path: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """Load the decoder that `check_vae` accepted; the same file is checked and loaded."""
    vae, checkpoint, keys = open_vae(path)
    load(vae, checkpoint, keys, dtype, device)
    return vae.eval()


def decoder_tensors(path: Path) -> tuple[dict[str, Any], Iterator[tuple[str, Tensor]]]:
    """Return diffusers' config of a decoder, and its weights under diffusers' names, one at a time."""
    model, checkpoint, keys = open_vae(path)
    config = {key: value for key, value in model.config.items() if not key.startswith("_")}
    sources = keys.sources.items()
    weights = ((key, source.combine(*map(checkpoint.read, source.keys)).clone()) for key, source in sources)
    return {"_class_name": "AutoencoderKL", **config}, weights


def open_vae(path: Path) -> tuple[Any, Checkpoint, KeyMap]:
    """Return the decoder on the meta device, its checkpoint and the key map between the two, which fit together."""
    if path.is_dir():
        source, config = path / "config.json", read_json(path / "config.json")
        name = config.get("_class_name", "AutoencoderKL")
        if name != "AutoencoderKL":
            raise ValueError(f"got decoder {path} of class {name}, expected AutoencoderKL")
        checkpoint = open_checkpoint(find_checkpoint(path))
    else:
        source, checkpoint = path, open_checkpoint(path)
        config = vae_keys.config_of(checkpoint.shapes)
    check_autoencoder(config, source)
    try:
        with torch.device("meta"):
            model: Any = AutoencoderKL.from_config(config)
    except FAILURES as error:
        raise ValueError(f"got {source}, which describes no AutoencoderKL: {error}") from error
    keys = vae_keys.key_map(model.state_dict(), checkpoint.shapes)
    check(model, checkpoint, keys)
    return model, checkpoint, keys
