"""Loads decoders from files, and turns what they make into pictures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from torch import Tensor

from seqpar.types.keys import KeyMap
from seqpar.weights import vae_keys
from seqpar.weights.checkpoint import Checkpoint, check, find_checkpoint, open_checkpoint
from seqpar.weights.jsons import read_json
from seqpar.weights.loading import load
from seqpar.weights.parts import check_autoencoder

# what diffusers raises for a config that describes no decoder
FAILURES = (ValueError, TypeError, KeyError, IndexError, AttributeError, ZeroDivisionError, RuntimeError)


def scaled(config: Any, latents_NCHW: Tensor) -> Tensor:
    """Return a model's latents as the VAE with this config decodes them."""
    return latents_NCHW / config.scaling_factor + (getattr(config, "shift_factor", None) or 0.0)


def in_range(decoded_3HW: Tensor) -> Tensor:
    """Return a decoded picture with values in [0, 1], fp32; what is not finite becomes NaN."""
    values = decoded_3HW.float()
    # where a value is infinite, the difference is NaN, which no clamp hides
    return (values / 2 + 0.5).clamp(0, 1) + (values - values)


def check_finite(images_N3HW: Tensor, dtype: torch.dtype) -> None:
    """Raise FloatingPointError if pictures hold NaN, which a file would show as black. dtype: the decoder's."""
    bad = (~images_N3HW.isfinite().all(dim=3).all(dim=2).all(dim=1)).nonzero().flatten().tolist()
    if bad:
        raise FloatingPointError(
            f"the decoder made pixels that are not finite in {len(bad)} of {len(images_N3HW)} pictures (the first is "
            f"picture {bad[0] + 1}) in {str(dtype).removeprefix('torch.')}; try dtype fp32 or bf16, or check the "
            f"decoder's weights and scaling_factor"
        )


def preview(latents_NCHW: Tensor, factor: int) -> Tensor:
    """Return pictures (N, 3, H, W) in [0, 1] of the first three latent channels, for models without a decoder."""
    colours = latents_NCHW[:, :3].float()
    colours = colours if colours.shape[1] == 3 else colours[:, :1].expand(-1, 3, -1, -1)
    low, high = colours.amin(dim=(1, 2, 3), keepdim=True), colours.amax(dim=(1, 2, 3), keepdim=True)
    scaled = (colours - low) / (high - low).clamp_min(1e-6)
    return scaled.repeat_interleave(factor, dim=2).repeat_interleave(factor, dim=3)


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
