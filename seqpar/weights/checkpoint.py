"""Reads checkpoints: it checks every key and shape before it loads the first weight, then loads one tensor at a time.

A model's `KeyMap` states which keys of a file make each of its parameters. The checks run on meta tensors, so that a
wrong file is refused after reading its header, not gigabytes of weights.
"""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

SUFFIXES = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json")


@dataclass(frozen=True)
class Source:
    """The checkpoint keys from which one parameter is made, and the function that combines their tensors."""

    keys: tuple[str, ...]
    combine: Callable[..., Tensor] = lambda tensor: tensor


@dataclass(frozen=True)
class KeyMap:
    """How a checkpoint maps to a model.

    sources: parameter -> source. ignored: keys that are not read. repeats: key -> the key whose values it must equal.
    """

    sources: Mapping[str, Source]
    ignored: frozenset[str] = frozenset()
    repeats: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Checkpoint:
    """The shapes of all tensors by key, and a function that reads one tensor; `name` is used in messages."""

    name: str
    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str], Tensor]


def from_state_dict(name: str, state: Mapping[str, Tensor]) -> Checkpoint:
    """Return a checkpoint for a state dict in memory."""
    return Checkpoint(name, {key: tuple(tensor.shape) for key, tensor in state.items()}, state.__getitem__)


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a .safetensors, .bin, .pt or .pth file, or the index of a sharded checkpoint.

    Raises ValueError if the file is missing or truncated, or if it holds anything other than tensors.
    """
    if not path.is_file():
        raise ValueError(f"got checkpoint {path}, expected a file; there is none")
    if path.name.endswith(".index.json"):
        return _sharded(path)
    return _safetensors(path) if path.suffix == ".safetensors" else _pickled(path)


def find_checkpoint(folder: Path, stem: str = "diffusion_pytorch_model") -> Path:
    """Return the checkpoint file of a diffusers model folder; `ValueError` lists the names that were tried."""
    names = [stem + suffix for suffix in SUFFIXES]
    found = next((folder / name for name in names if (folder / name).is_file()), None)
    if found is None:
        raise ValueError(f"got {folder} without weights, expected one of {', '.join(names)}")
    return found


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; `ValueError` if the file is missing or holds no JSON object."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"got {path}, expected a readable JSON file: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"got {path} holding a {type(value).__name__}, expected a JSON object")
    return value


def load(model: nn.Module, checkpoint: Checkpoint, keys: KeyMap, dtype: torch.dtype, device: torch.device) -> None:
    """Check all keys and shapes, then load the parameters of `model` (built on the meta device) one at a time."""
    check(model, checkpoint, keys)
    for key, twin in keys.repeats.items():
        if not torch.equal(checkpoint.read(key), checkpoint.read(twin)):
            raise ValueError(
                f"{checkpoint.name}: {key} differs from {twin}, expected equal tensors; such a model "
                f"conditions each block differently, which is not implemented"
            )
    for name, source in keys.sources.items():
        tensor = source.combine(*(checkpoint.read(key) for key in source.keys))
        tensor = tensor.to(device=device, dtype=dtype, copy=True).contiguous()
        model.load_state_dict({name: tensor}, strict=False, assign=True)


def check(model: nn.Module, checkpoint: Checkpoint, keys: KeyMap) -> None:
    """Raise ValueError if keys are missing or unknown, or if they make a parameter of another shape."""
    used = {key for source in keys.sources.values() for key in source.keys} | set(keys.repeats)
    missing, unknown = used - set(checkpoint.shapes), set(checkpoint.shapes) - used - keys.ignored
    if missing or unknown:
        raise ValueError(
            f"{checkpoint.name}: wrong keys. Missing {len(missing)}: {_some(missing)}. "
            f"Unknown {len(unknown)}: {_some(unknown)}"
        )
    for name, parameter in model.named_parameters():
        source = keys.sources[name]
        shapes = [checkpoint.shapes[key] for key in source.keys]
        got = f"{', '.join(source.keys)} of shape {', '.join(map(str, shapes))}"
        try:
            made = tuple(source.combine(*(torch.empty(shape, device="meta") for shape in shapes)).shape)
        except (RuntimeError, IndexError) as error:
            raise ValueError(f"{checkpoint.name}: got {got}, which cannot make {name}: {error}") from error
        if made != tuple(parameter.shape):
            raise ValueError(f"{checkpoint.name}: got {got}, expected {tuple(parameter.shape)} for {name}")


def shape_of(shapes: Mapping[str, tuple[int, ...]], key: str, dims: int) -> tuple[int, ...]:
    """Return the shape of a key from which `recognise` reads sizes.

    Raises `ValueError` if the key is missing, has another number of dims than `dims`, or has an empty dim.
    """
    if key not in shapes:
        raise ValueError(
            f"got a checkpoint that lacks {key}, expected a complete one: the model's sizes follow from it"
        )
    if len(shapes[key]) != dims or 0 in shapes[key]:
        raise ValueError(f"got a checkpoint with {key} of shape {shapes[key]}, expected {dims} dims, none empty")
    return shapes[key]


def count_layers(shapes: Mapping[str, tuple[int, ...]], prefix: str) -> int:
    """Return one more than the highest number N in keys of the form `prefix.N.name`, or 0 if there is none."""
    found = (re.match(rf"{re.escape(prefix)}\.(\d+)\.", key) for key in shapes)
    return 1 + max((int(match[1]) for match in found if match), default=-1)


def _some(keys: Iterable[str], most: int = 4) -> str:
    keys = sorted(keys)
    return ", ".join(keys[:most]) + (f", and {len(keys) - most} more" if len(keys) > most else "") or "none"


def _safetensors(path: Path) -> Checkpoint:
    try:
        file = safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"got checkpoint {path}, which is truncated or not a safetensors file: {error}") from error
    shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118 (not a dict)
    return Checkpoint(str(path), shapes, file.get_tensor)


def _pickled(path: Path) -> Checkpoint:
    try:
        try:
            state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except RuntimeError as error:
            if "mmap" not in str(error):
                raise
            state = torch.load(path, map_location="cpu", weights_only=True)  # not a zip archive
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"got checkpoint {path}, which is truncated or holds no weights: {error}") from error
    state = state.get("ema", state) if isinstance(state, dict) else state  # a training checkpoint
    if not isinstance(state, dict) or not all(isinstance(tensor, Tensor) for tensor in state.values()):
        raise ValueError(f"got checkpoint {path}, expected a state dict (key -> tensor)")
    return from_state_dict(str(path), state)


def _sharded(index: Path) -> Checkpoint:
    places: Mapping[str, str] = read_json(index).get("weight_map", {})
    files = {name: open_checkpoint(index.parent / name) for name in sorted(set(places.values()))}
    lost = [key for key, name in places.items() if key not in files[name].shapes]
    if lost or not places:
        raise ValueError(f"got index {index} whose files lack {_some(lost)}, expected all keys of weight_map")
    shapes = {key: files[name].shapes[key] for key, name in places.items()}
    return Checkpoint(str(index), shapes, lambda key: files[places[key]].read(key))
