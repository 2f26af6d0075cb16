"""Writes weights as a folder of safetensors.

A key map states how the tensors of a file make ours. It only moves numbers, so it can be run backwards: on tensors of
consecutive numbers it shows where each number of the file goes.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from seqpar.loop.blueprint import Blueprint
from seqpar.loop.models.dit import LEARNED
from seqpar.types.keys import KeyMap, TensorSource

STEM = "diffusion_pytorch_model"
OURS = ("freq_shift", "pos_scaling", "pos_stored")  # fields of config.json that seqpar alone reads
SHARD_BYTES = 5 << 30  # of one file, as diffusers writes them; also the most that is held in memory


def tensors_of(blueprint: Blueprint, config: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield (key, tensor) of the folder that `config` describes, one at a time."""
    checkpoint, keys = blueprint.checkpoint, blueprint.keys
    assert checkpoint is not None
    assert keys is not None
    target: KeyMap = blueprint.module.key_map(blueprint.config)
    shapes = _shapes(config, checkpoint.shapes, target)
    kept = dict.fromkeys(target.repeats.values())
    for name, source in target.sources.items():
        parameter = keys.sources[name].combine(*map(checkpoint.tensor, keys.sources[name].keys))
        for key, tensor in uncombined(parameter, source, shapes).items():
            if key in kept:
                kept[key] = tensor
            yield key, tensor
    for key, twin in target.repeats.items():
        copied = kept[twin]
        assert copied is not None
        yield key, copied.clone()
    if shapes is not checkpoint.shapes:  # what diffusers' class has and never reads; it would warn of its absence
        for key in sorted(target.ignored & shapes.keys()):
            yield key, torch.zeros(shapes[key])


def uncombined(parameter: Tensor, source: TensorSource, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """The tensors from which a source makes this parameter."""
    sizes = [torch.Size(shapes[key]).numel() for key in source.keys]
    numbers = torch.arange(sum(sizes)).split(sizes)
    places = source.combine(*(part.view(shapes[key]) for part, key in zip(numbers, source.keys, strict=True)))
    if places.shape != parameter.shape or not torch.equal(places.flatten().sort().values, torch.arange(sum(sizes))):
        raise ValueError(f"{', '.join(source.keys)}: not every number is in the model exactly once")
    flat = parameter.new_empty(sum(sizes))
    flat[places.flatten()] = parameter.flatten()
    parts = zip(source.keys, flat.split(sizes), strict=True)
    return {key: part.view(shapes[key]).clone() for key, part in parts}


def _shapes(
    config: Mapping[str, Any], given: Mapping[str, tuple[int, ...]], target: KeyMap
) -> Mapping[str, tuple[int, ...]]:
    # the shapes of the target's keys: the file's, if it has them, or those of diffusers' class
    expected = {key for source in target.sources.values() for key in source.keys}
    if expected <= given.keys():
        return given
    known = {key: value for key, value in config.items() if key not in OURS}  # diffusers would warn about others
    kind: Any = getattr(diffusers, config["_class_name"].replace(LEARNED, "DiTTransformer2DModel"))
    with torch.device("meta"):
        model = kind.from_config(known)
    return {**given, **{key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}}


def write_folder(folder: Path, config: Mapping[str, Any], tensors: Iterable[tuple[str, Tensor]]) -> int:
    """Write config.json and safetensors files with an index if there are several; return the number of bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config, "_diffusers_version": diffusers.__version__}, indent=2))
    held, held_bytes, total = dict[str, Tensor](), 0, 0
    written: list[list[str]] = []

    def write() -> None:
        try:
            save_file(held, folder / f"{len(written)}.part", metadata={"format": "pt"})
        except SafetensorError as error:
            code = errno.ENOSPC if "os error 28" in str(error) else errno.EIO
            raise OSError(code, f"cannot write the weights: {error}", str(folder)) from error
        written.append([*held])
        held.clear()

    for key, tensor in tensors:
        if held and held_bytes + tensor.nbytes > SHARD_BYTES:
            write()
            held_bytes = 0
        held[key] = tensor.contiguous()
        held_bytes, total = held_bytes + tensor.nbytes, total + tensor.nbytes
    write()

    # now that the number of files is known, their names, and an index if there are several
    names = [f"{STEM}-{index:05d}-of-{len(written):05d}.safetensors" for index in range(1, len(written) + 1)]
    names = names if len(names) > 1 else [f"{STEM}.safetensors"]
    for index, name in enumerate(names):
        (folder / f"{index}.part").rename(folder / name)
    if len(names) > 1:
        places = {key: name for name, keys in zip(names, written, strict=True) for key in keys}
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / f"{STEM}.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return total
