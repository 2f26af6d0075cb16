"""A VAE's folder or file: open, check, load."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from torch import Tensor

from seqpar.loading.checkpoint import Checkpoint, check, find_checkpoint, open_checkpoint
from seqpar.loading.keys import KeyMap, Source, count_layers, shape_of
from seqpar.loading.parts import check_autoencoder, read_json
from seqpar.loading.placing import load

OLD = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
ORIGINAL = {"to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "proj_out", "group_norm": "norm"}
SCALE = 0.18215  # of Stable Diffusion's latents, which UniDiffuser and DiT use
TRAINING = ("loss.", "model_ema.")  # prefixes of keys that only training uses


def is_original(shapes: Iterable[str]) -> bool:
    """Return whether these keys are the original autoencoder's."""
    return "decoder.up.0.block.0.conv1.weight" in shapes


def config_of(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Return diffusers' config of an original autoencoder from the shapes of its tensors."""
    levels = count_layers(shapes, "encoder.down")
    widths = [shape_of(shapes, f"encoder.down.{level}.block.0.conv1.weight", 4)[0] for level in range(levels)]
    return {
        "in_channels": shape_of(shapes, "encoder.conv_in.weight", 4)[1],
        "out_channels": shape_of(shapes, "decoder.conv_out.weight", 4)[0],
        "down_block_types": ["DownEncoderBlock2D"] * levels,
        "up_block_types": ["UpDecoderBlock2D"] * levels,
        "block_out_channels": widths,
        "layers_per_block": count_layers(shapes, "encoder.down.0.block"),
        "latent_channels": shape_of(shapes, "post_quant_conv.weight", 4)[0],
        "scaling_factor": SCALE,
    }


def key_map(expected: Iterable[str], shapes: Mapping[str, tuple[int, ...]]) -> KeyMap:
    """Return the key map of diffusers' AutoencoderKL, whose keys are `expected`, for files with any of the names."""
    if is_original(shapes):
        levels = count_layers(shapes, "decoder.up")
        ignored = frozenset(key for key in shapes if key.startswith(TRAINING))
        return KeyMap({key: Source((_original(key, levels),), _unfold(key)) for key in expected}, ignored)
    return KeyMap({key: Source((key if key in shapes else _renamed(key, OLD, shapes),)) for key in expected})


def _unfold(key: str) -> Any:
    """Return the function that makes a linear layer's weight of a 1 x 1 convolution's."""

    def unfold(tensor: Tensor) -> Tensor:
        return tensor.flatten(1) if tensor.shape[2:] == (1, 1) else tensor

    return unfold if ".attentions." in key and key.endswith(".weight") else lambda tensor: tensor


def _renamed(key: str, names: Mapping[str, str], shapes: Iterable[str]) -> str:
    """Return the key with the old name of its attention layer, if a file has that one."""
    match = re.fullmatch(r"(.*\.attentions\.\d+\.)(to_q|to_k|to_v|to_out\.0)(\.\w+)", key)
    old = f"{match[1]}{names[match[2]]}{match[3]}" if match else key
    return old if old in shapes else key


def _original(key: str, levels: int) -> str:
    """Return the original name of a key of diffusers."""
    key = re.sub(r"mid_block\.resnets\.(\d)", lambda m: f"mid.block_{int(m[1]) + 1}", key)
    key = re.sub(r"mid_block\.attentions\.0\.(to_out\.0|\w+)", lambda m: f"mid.attn_1.{ORIGINAL[m[1]]}", key)
    key = re.sub(r"down_blocks\.(\d+)\.resnets\.(\d+)", r"down.\1.block.\2", key)
    key = re.sub(r"down_blocks\.(\d+)\.downsamplers\.0", r"down.\1.downsample", key)
    key = re.sub(r"up_blocks\.(\d+)", lambda m: f"up.{levels - 1 - int(m[1])}", key)
    key = re.sub(r"(up\.\d+)\.resnets\.(\d+)", r"\1.block.\2", key)
    key = key.replace(".upsamplers.0", ".upsample").replace("conv_shortcut", "nin_shortcut")
    return key.replace("conv_norm_out", "norm_out")


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
        config = config_of(checkpoint.shapes)
    check_autoencoder(config, source)
    try:
        with torch.device("meta"):
            model: Any = AutoencoderKL.from_config(config)
    except FAILURES as error:
        raise ValueError(f"got {source}, which describes no AutoencoderKL: {error}") from error
    keys = key_map(model.state_dict(), checkpoint.shapes)
    check(model, checkpoint, keys)
    return model, checkpoint, keys
