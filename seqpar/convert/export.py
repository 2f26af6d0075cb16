"""Writes the weights of any published format as a safetensors folder under the names of one format.

A key map says how the tensors of a file make ours. It only moves numbers, so that it can be run backwards: on tensors
of consecutive numbers it tells where each number of the file goes.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import diffusers
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from seqpar.loading.keys import KeyMap, Source
from seqpar.loop.blueprint import Blueprint

STEM = "diffusion_pytorch_model"
SHARD_BYTES = 5 << 30  # of one file, as diffusers writes them; also the most that is held in memory


def tensors_of(blueprint: Blueprint, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    """Yield (key, tensor) under the names of the folder that the model's `folder_config` describes, one at a time.

    dtype: None keeps the file's. Raises ValueError for a model that no folder holds.
    """
    checkpoint, keys = blueprint.checkpoint, blueprint.keys
    if checkpoint is None or keys is None:
        raise ValueError(f"got {blueprint.name} with random weights, expected a checkpoint to convert")
    name, config = folder_config(blueprint)
    target: KeyMap = blueprint.module.KEY_MAPS[name](blueprint.config)
    shapes = _shapes(config, checkpoint.shapes, target)
    kept = dict.fromkeys(target.repeats.values())
    for ours, source in target.sources.items():
        parameter = keys.sources[ours].combine(*map(checkpoint.tensor, keys.sources[ours].keys))
        for key, tensor in uncombined(parameter.to(dtype or parameter.dtype), source, shapes).items():
            if key in kept:
                kept[key] = tensor
            yield key, tensor
    for key, twin in target.repeats.items():
        copied = kept[twin]
        assert copied is not None
        yield key, copied.clone()
    if shapes is not checkpoint.shapes:  # what diffusers' class has and never reads; it would warn of its absence
        for key in sorted(target.ignored & shapes.keys()):
            yield key, torch.zeros(shapes[key], dtype=dtype)


def folder_config(blueprint: Blueprint) -> tuple[str, dict[str, Any]]:
    """Return the key map and the config.json of the folder that holds this model."""
    describe = getattr(blueprint.module, "folder_config", None)
    if describe is None:
        raise ValueError(f"got {blueprint.name}, which is already in diffusers' format, expected an original file")
    return describe(blueprint.config)


def uncombined(parameter: Tensor, source: Source, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Return the tensors from which a source makes this parameter."""
    sizes = [torch.Size(shapes[key]).numel() for key in source.keys]
    numbers = torch.arange(sum(sizes)).split(sizes)
    places = source.combine(*(part.view(shapes[key]) for part, key in zip(numbers, source.keys, strict=True)))
    if places.shape != parameter.shape or not torch.equal(places.flatten().sort().values, torch.arange(sum(sizes))):
        raise ValueError(f"got {', '.join(source.keys)}, whose numbers are not each in the model once")
    flat = parameter.new_empty(sum(sizes))
    flat[places.flatten()] = parameter.flatten()
    parts = zip(source.keys, flat.split(sizes), strict=True)
    return {key: part.view(shapes[key]).clone() for key, part in parts}


def _shapes(
    config: Mapping[str, Any], given: Mapping[str, tuple[int, ...]], target: KeyMap
) -> Mapping[str, tuple[int, ...]]:
    """Return the shapes of the target's keys: the file's, if it has them, or those of diffusers' class."""
    wanted = {key for source in target.sources.values() for key in source.keys}
    if wanted <= given.keys():
        return given
    with torch.device("meta"):
        model = getattr(diffusers, config["_class_name"]).from_config(known_to_diffusers(config))
    return {**given, **{key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}}


def known_to_diffusers(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config without the fields of our own, about which diffusers would warn."""
    return {key: value for key, value in config.items() if key not in ("freq_shift", "pos_scaling", "pos_stored")}


@contextmanager
def _disk_named(folder: Path) -> Iterator[None]:
    """Turn the library's own error of writing, such as one of a full disk, into an OSError that names the folder."""
    try:
        yield
    except SafetensorError as error:
        code = errno.ENOSPC if "os error 28" in str(error) else errno.EIO
        raise OSError(code, f"cannot write the weights: {error}", str(folder)) from error


def write_folder(folder: Path, config: Mapping[str, Any], tensors: Iterable[tuple[str, Tensor]]) -> int:
    """Write config.json and safetensors files with an index if there are several; return the number of bytes."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**config, "_diffusers_version": diffusers.__version__}, indent=2))
    held, held_bytes, total = dict[str, Tensor](), 0, 0
    written: list[list[str]] = []

    def write() -> None:
        with _disk_named(folder):
            save_file(held, folder / f"{len(written)}.part", metadata={"format": "pt"})
        written.append([*held])
        held.clear()

    for key, tensor in tensors:
        if held and held_bytes + tensor.nbytes > SHARD_BYTES:
            write()
            held_bytes = 0
        held[key] = tensor.contiguous()
        held_bytes, total = held_bytes + tensor.nbytes, total + tensor.nbytes
    write()
    _name(folder, written, total)
    return total


def _name(folder: Path, written: list[list[str]], total: int) -> None:
    """Give the files their names, which hold their number, and write the index of several."""
    names = [f"{STEM}-{index:05d}-of-{len(written):05d}.safetensors" for index in range(1, len(written) + 1)]
    names = names if len(names) > 1 else [f"{STEM}.safetensors"]
    for index, name in enumerate(names):
        (folder / f"{index}.part").rename(folder / name)
    if len(names) > 1:
        places = {key: name for name, keys in zip(names, written, strict=True) for key in keys}
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / f"{STEM}.safetensors.index.json").write_text(json.dumps(index, indent=2))
