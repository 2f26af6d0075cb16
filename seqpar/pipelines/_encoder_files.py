"""Reads text and image encoders of transformers as fast as other weights.

When it wins: where an encoder's files are safetensors in the dtype that is asked for. transformers copies tensor after
tensor out of mapped files, at a fifth of the rate at which `seqpar.weights.loading` reads them; it gets the tensors on
the device, and its own code gives them their places.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from seqpar.types.keys import KeyMap, Source
from seqpar.weights.checkpoint import Checkpoint, open_checkpoint
from seqpar.weights.jsons import read_json
from seqpar.weights.loading import Pool

FILES = ("model.safetensors", "model.safetensors.index.json")  # transformers reads others, and chooses among several


def read_encoder(kind: Any, folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """Return what `kind.from_pretrained(folder, dtype=dtype, device_map=device)` does, with the same values.

    kind: a class of transformers. Raises ValueError if weights are not finite.
    """
    checkpoint = _readable(folder, dtype)
    if checkpoint is None:
        return kind.from_pretrained(folder, dtype=dtype, device_map={"": device})  # the host never holds it whole
    config = kind.config_class.from_pretrained(folder)
    encoder = kind.from_pretrained(
        None, config=config, state_dict=_tensors(checkpoint, device), dtype=dtype, device_map={"": device}
    )
    encoder.name_or_path = encoder.config.name_or_path = str(folder)
    if encoder.can_generate() and (folder / "generation_config.json").is_file():
        encoder.generation_config = type(encoder.generation_config).from_pretrained(folder)
    return encoder


def _readable(folder: Path, dtype: torch.dtype) -> Checkpoint | None:
    """Return the files of an encoder, or None where transformers does more than to give tensors their places."""
    config = read_json(folder / "config.json")
    if "quantization_config" in config or (folder / "adapter_config.json").exists():
        return None
    files = [folder / name for name in FILES if (folder / name).is_file()]
    if len(files) != 1:
        return None
    checkpoint = open_checkpoint(files[0])
    numbers = {kept for kept in checkpoint.dtypes.values() if kept.is_floating_point}
    return checkpoint if numbers <= {dtype} else None


def _tensors(checkpoint: Checkpoint, device: torch.device) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint by their keys, on the device."""
    kept, names = checkpoint.dtypes, list(checkpoint.shapes)
    keys = KeyMap({name: Source((name,)) for name in names})
    like = {name: torch.empty(shape, dtype=kept[name], device="meta") for name, shape in checkpoint.shapes.items()}
    with Pool(checkpoint, device, 1) as pool:
        return dict(zip(names, pool.placed(names, keys, like), strict=True))
