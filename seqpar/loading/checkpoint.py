"""Checkpoints: the tensors in a file, how their keys map to a model, and whether the two fit.

A `KeyMap` states which keys of a file make each parameter. Checks run on meta tensors: a wrong file is rejected after
its header is read, before its weights are.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from seqpar.loading.parts import read_index
from seqpar.loading.pickles import load_pickle, tensors_in
from seqpar.types.keys import KeyMap

SUFFIXES = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json")
STEM = "diffusion_pytorch_model"  # of diffusers' weight files
INDEX = ".index.json"
SHOWN = 256  # characters of a key or reason in a message
# by safetensors' names
DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "BOOL": torch.bool},
    **{"F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu},
    **{"I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64, "C64": torch.complex64},
    **{"U8": torch.uint8, "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64},
}
LAYERS = re.compile(r"layers?$|layers_per_block$|depth$")  # fields of configs that count layers
WEIGHTS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)  # dtypes that hold weights


@dataclass(frozen=True)
class Position:
    """Where a tensor's bytes begin: file and offset. stamp: of the file when its header was read."""

    path: Path
    offset: int
    stamp: tuple[int, ...]


def stamp(file: Path | int) -> tuple[int, ...]:
    """Return inode, size and modification time of a path or open file: they differ once it is replaced or written."""
    stat = os.stat(file)
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def check_stamp(path: Path, before: tuple[int, ...], file: Path | int) -> None:
    """Raise ValueError if a file, given as a path or open number, no longer has the stamp `before`."""
    try:
        same = stamp(file) == before
    except FileNotFoundError:
        same = False
    if not same:
        raise ValueError(f"{path} changed while it was read; load it again when it is complete")


@dataclass(frozen=True)
class Checkpoint:
    """Shapes and dtypes of all tensors by key, and a function that reads one tensor; `name` is used in messages.

    positions: where a tensor's bytes lie, row by row, for keys of which that is known; reading there makes no page
    resident. files: path -> `stamp` when its header was read, for every file with weights. raw: what lies in the files,
    where weights in 8 bits are given as the numbers for which they stand (`seqpar.loading.scaled`).
    """

    name: str
    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str], Tensor]
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    positions: Mapping[str, Position] = field(default_factory=dict)
    files: Mapping[Path, tuple[int, ...]] = field(default_factory=dict)
    raw: Checkpoint | None = None

    def check_unchanged(self) -> None:  # call it after the last read
        for path, before in self.files.items():
            check_stamp(path, before, path)

    def nbytes(self, key: str) -> int:
        """Return the bytes of a tensor, in fp32 where its dtype is not known; 0 for a missing one."""
        return prod(self.shapes.get(key, (0,))) * self.dtypes.get(key, torch.float32).itemsize

    def tensor(self, key: str) -> Tensor:
        """Return one tensor; ValueError if it cannot be read, as from a file that has become shorter."""
        try:
            return self.read(key)
        except (SafetensorError, RuntimeError, IndexError) as error:
            raise ValueError(f"{self.name}: {key} does not load: {error}") from error


@dataclass(frozen=True)
class Fitted:
    """A checkpoint that fits the config of its model.

    path: of the model's folder or file. model: on the meta device; None for an encoder of transformers.
    """

    path: Path
    kind: Any
    config: Mapping[str, Any]
    checkpoint: Checkpoint
    model: Any

    @cached_property
    def state(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.model.state_dict().items()}

    @cached_property
    def parameters(self) -> frozenset[str]:
        return frozenset(name for name, _ in self.model.named_parameters(remove_duplicate=False))


def from_state_dict(
    name: str, state: Mapping[str, Tensor], files: Mapping[Path, tuple[int, ...]] | None = None
) -> Checkpoint:
    """Return a checkpoint for a state dict in memory. files: the files that it is mapped from."""
    shapes, dtypes = ({key: tuple(x.shape) for key, x in state.items()}, {key: x.dtype for key, x in state.items()})
    return Checkpoint(name, shapes, state.__getitem__, dtypes, files=files or {})


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a .safetensors or .bin file, or the index of a sharded checkpoint. Reads headers, no weights.

    Raises ValueError if the file is missing or truncated, or if it holds anything other than named tensors.
    """
    if not path.is_file():
        raise ValueError(f"checkpoint {path} not found")
    if path.name.endswith(INDEX):
        return _sharded(path)
    if path.suffix == ".safetensors":
        return _safetensors(path)
    files = {path: stamp(path)}
    return from_state_dict(str(path), tensors_in(path, load_pickle(path)), files)


def find_checkpoint(folder: Path, stem: str = STEM) -> Path:
    """Return the checkpoint file of a model folder of diffusers, or the one with another stem.

    ValueError if there is none, or a file next to an index of its kind: loaders differ in which they read.
    """
    names = [stem + suffix for suffix in SUFFIXES]
    files = [folder / name for name in names if (folder / name).is_file()]
    if not files:
        paddle = any(folder.glob("*.pdparams")) or any(folder.glob("diffusion_paddle_model*"))
        other = "; ppdiffusers' weights are not supported: use the diffusers folder of this model" if paddle else ""
        raise ValueError(
            f"{folder} has no weights; expected {stem}.safetensors or {stem}.bin, or the index of one{other}"
        )
    if files[0].with_name(files[0].name + INDEX) in files:
        raise ValueError(f"{folder} has both {files[0].name} and its index; remove one of them")
    return files[0]


def check(model: nn.Module, checkpoint: Checkpoint, keys: KeyMap) -> None:
    """Raise ValueError if keys are missing or unknown, or if they make a parameter of another shape."""
    used = {key for source in keys.sources.values() for key in source.keys} | set(keys.repeats)
    check_keys(checkpoint.name, used - set(checkpoint.shapes), set(checkpoint.shapes) - used - keys.ignored)
    check_types(checkpoint, sorted(used))
    for name, parameter in model.named_parameters():
        source = keys.sources[name]
        shapes = [checkpoint.shapes[key] for key in source.keys]
        got = f"{', '.join(source.keys)} of shape {', '.join(map(str, shapes))}"
        try:
            shape = tuple(source.combine(*(torch.empty(shape, device="meta") for shape in shapes)).shape)
        except (RuntimeError, IndexError, ValueError, TypeError) as error:
            raise ValueError(f"{checkpoint.name}: got {got}, which cannot make {name}: {error}") from error
        if shape != tuple(parameter.shape):
            raise ValueError(f"{checkpoint.name}: got {got}, expected {tuple(parameter.shape)} for {name}")


def check_keys(name: str, missing: Collection[str], unknown: Collection[str]) -> None:
    if missing or unknown:
        raise ValueError(
            f"{name}: wrong keys. Missing {len(missing)}: {_some(missing)}. Unknown {len(unknown)}: {_some(unknown)}"
        )


def check_types(
    checkpoint: Checkpoint, keys: Iterable[str], fits: Callable[[torch.dtype], bool] = WEIGHTS.__contains__
) -> None:
    for key in keys:
        if not fits(dtype := checkpoint.dtypes.get(key, torch.float32)):
            kind = str(dtype).removeprefix("torch.")
            raise ValueError(f"{checkpoint.name}: got {key} of type {kind}, expected floating-point weights")


def check_layers(config: Mapping[str, Any], checkpoint: Checkpoint, where: object) -> None:
    """Raise ValueError if a config names more layers than there are tensors, before a model of them is built."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            check_layers(value, checkpoint, where)
        elif type(value) is int and LAYERS.search(key) and value > max(1, len(checkpoint.shapes)):
            raise ValueError(f"{where} has {key}={value}, but its file has only {len(checkpoint.shapes)} tensors")


@contextmanager
def checkpoint_context(checkpoint: Checkpoint) -> Iterator[None]:
    """Add the name of a checkpoint to errors about its content that lack it."""
    try:
        yield
    except ValueError as error:
        if checkpoint.name in str(error):
            raise
        raise ValueError(f"{checkpoint.name}: {error}") from error


def _some(keys: Iterable[str], most: int = 4) -> str:
    keys = sorted(keys)
    names = ", ".join(f"{key:.{SHOWN}}" for key in keys[:most])
    return names + (f", and {len(keys) - most} more" if len(keys) > most else "") or "none"


def _safetensors(path: Path) -> Checkpoint:
    # the library checks the header: the tensors fill the file, each with as many bytes as its shape and type say
    shapes, dtypes, positions = dict[str, tuple[int, ...]](), dict[str, torch.dtype](), dict[str, Position]()
    try:
        with open(path, "rb") as file:
            length, now = int.from_bytes(file.read(8), "little"), stamp(file.fileno())
        opened, start = safe_open(path, framework="pt"), 8 + length
        for key in opened.offset_keys():
            piece: Any = opened.get_slice(key)
            if (kind := piece.get_dtype()) not in DTYPES:
                raise ValueError(f"{key:.{SHOWN}} has type {kind}, expected one of {', '.join(DTYPES)}")
            meta = torch.empty(piece.get_shape(), dtype=DTYPES[kind], device="meta")  # raises for impossible sizes
            shapes[key], dtypes[key], positions[key] = tuple(meta.shape), meta.dtype, Position(path, start, now)
            start += meta.nbytes
    except (SafetensorError, OSError, RuntimeError, ValueError, TypeError, OverflowError) as error:
        reason = str(error).partition("\n")[0][:SHOWN]
        raise ValueError(f"{path} is truncated or not a safetensors file: {reason}") from error
    return Checkpoint(str(path), shapes, opened.get_tensor, dtypes, positions, {path: now})


def _sharded(index: Path) -> Checkpoint:
    names = read_index(index)
    files = {name: open_checkpoint(index.parent / name) for name in sorted(set(names.values()))}
    if lost := [key for key, name in names.items() if key not in files[name].shapes]:
        raise ValueError(f"the files of index {index} lack {_some(lost)}; download them again")
    return Checkpoint(
        str(index),
        {key: files[name].shapes[key] for key, name in names.items()},
        lambda key: files[names[key]].read(key),
        {key: files[name].dtypes[key] for key, name in names.items()},
        {key: files[name].positions[key] for key, name in names.items() if key in files[name].positions},
        {path: now for shard in files.values() for path, now in shard.files.items()},
    )
