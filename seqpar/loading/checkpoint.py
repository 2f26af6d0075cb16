"""Checkpoints: what is in a file, how it maps to a model, and whether the two fit.

A model's `KeyMap` states which keys of a file make each of its parameters. The checks run on meta tensors, so that a
wrong file is refused after reading its header, not gigabytes of weights. `seqpar/loading/placing.py` reads the weights.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from seqpar.convert import paddle, pickles
from seqpar.loading.keys import KeyMap
from seqpar.loading.parts import read_index

SUFFIXES = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json")
# of diffusers, then of ppdiffusers
NAMES = (
    *(f"diffusion_pytorch_model{suffix}" for suffix in SUFFIXES),
    *("model_state.pdparams", "model_state.pdparams.index.json"),
    *("diffusion_paddle_model.safetensors", "diffusion_paddle_model.safetensors.index.json"),
)
INDEX = ".index.json"
MOST_LETTERS = 256  # of the name of a tensor
HEADER_BYTES = 1 << 24  # of a safetensors file; 120 bytes a tensor are usual
# by safetensors' names
DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "BOOL": torch.bool},
    **{"F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu},
    **{"I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64, "C64": torch.complex64},
    **{"U8": torch.uint8, "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64},
}
WEIGHTS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)  # other dtypes hold no weights


@dataclass(frozen=True)
class Position:
    """Where a tensor's bytes begin: in which file, after how many bytes. stamp: of the file, when that was read."""

    path: Path
    offset: int
    stamp: tuple[int, ...]


def stamp(file: Path | int) -> tuple[int, ...]:
    """Return what tells whether a file, given by its path or open number, is still the one that was there before."""
    stat = os.stat(file)
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def check_stamp(path: Path, before: tuple[int, ...], file: Path | int) -> None:
    """Raise ValueError if a file no longer has the `stamp` that it had. file: its path or its open number."""
    try:
        same = stamp(file) == before
    except FileNotFoundError:
        same = False
    if not same:
        raise ValueError(f"{path} changed while it was read; load it again when it is complete")


@dataclass(frozen=True)
class Checkpoint:
    """The shapes and dtypes of all tensors by key, and a function that reads one tensor; `name` is used in messages.

    about: what is known beside the tensors of an original file. "args": arguments of the training script (name ->
    number or text). "shards": the number of model-parallel files that were merged. positions: where the bytes of a
    tensor lie in a file, row by row, for the keys of which that is known; reading there makes no page resident. files:
    path -> its `stamp` when its header was read, for every file with weights.
    """

    name: str
    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str], Tensor]
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)
    positions: Mapping[str, Position] = field(default_factory=dict)
    files: Mapping[Path, tuple[int, ...]] = field(default_factory=dict)

    def check_unchanged(self) -> None:
        """Raise ValueError if a file has changed since its header was read; call it after the last read."""
        for path, before in self.files.items():
            check_stamp(path, before, path)

    def nbytes(self, key: str) -> int:
        """Return the bytes of a tensor, in fp32 where its dtype is not known; 0 for one that is not there."""
        return prod(self.shapes.get(key, (0,))) * self.dtypes.get(key, torch.float32).itemsize

    def tensor(self, key: str) -> Tensor:
        """Return one tensor; ValueError if it cannot be read, as from a file that has become shorter."""
        try:
            return self.read(key)
        except (SafetensorError, RuntimeError, IndexError) as error:
            raise ValueError(f"{self.name}: got {key}, which does not load: {error}") from error


def from_state_dict(
    name: str,
    state: Mapping[str, Tensor],
    about: Mapping[str, Any] | None = None,
    files: Mapping[Path, tuple[int, ...]] | None = None,
) -> Checkpoint:
    """Return a checkpoint for a state dict in memory. files: those it is mapped from."""
    shapes, dtypes = ({key: tuple(x.shape) for key, x in state.items()}, {key: x.dtype for key, x in state.items()})
    return Checkpoint(name, shapes, state.__getitem__, dtypes, about or {}, files=files or {})


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a .safetensors, .bin, .pt, .pth or .pdparams file, or the index of a sharded checkpoint.

    Raises ValueError if the file is missing or truncated, or if it holds anything other than named tensors.
    """
    if not path.is_file():
        there = "it is a folder, a pipe or a device" if path.exists() else "there is none"
        raise ValueError(f"got checkpoint {path}, expected a file; {there}")
    opened = _opened(path)
    if not opened.shapes:
        raise ValueError(f"got checkpoint {path} without a tensor, expected the weights of a model")
    if odd := [key for key in opened.shapes if not key.isprintable() or not 0 < len(key) <= MOST_LETTERS]:
        expected = f"names of at most {MOST_LETTERS} printable letters"
        raise ValueError(f"got checkpoint {path} with a tensor named {odd[0]!a:.100}, expected {expected}")
    return opened


def _opened(path: Path) -> Checkpoint:
    if path.name.endswith(INDEX):
        return _sharded(path)
    if path.suffix == ".safetensors":
        return _safetensors(path)
    files = {path: stamp(path)}
    if path.suffix == ".pdparams":
        return from_state_dict(str(path), paddle.read_state(path), files=files)
    state, args = pickles.read_state(path)
    return from_state_dict(str(path), state, {"args": args} if args else None, files)


def find_checkpoint(folder: Path, stem: str | None = None) -> Path:
    """Return the checkpoint file of a model folder of diffusers or ppdiffusers, or the one with another stem.

    Raises ValueError, with the names that were tried, if there is none, and if a file and an index of the same kind
    stand side by side, because loaders differ in which of the two they take.
    """
    names = NAMES if stem is None else tuple(stem + suffix for suffix in SUFFIXES)
    files = [folder / name for name in names if (folder / name).is_file()]
    if not files:
        raise ValueError(f"got {folder} without weights, expected one of {', '.join(names)}")
    if files[0].with_name(files[0].name + INDEX) in files:
        raise ValueError(f"got both {files[0].name} and its index in {folder}, expected one of them; remove the other")
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
    """Raise ValueError if a checkpoint lacks keys, or has keys that its model does not know."""
    if missing or unknown:
        raise ValueError(
            f"{name}: wrong keys. Missing {len(missing)}: {_some(missing)}. Unknown {len(unknown)}: {_some(unknown)}"
        )


def check_types(
    checkpoint: Checkpoint, keys: Iterable[str], fits: Callable[[torch.dtype], bool] = WEIGHTS.__contains__
) -> None:
    """Raise ValueError for the first key whose dtype does not fit."""
    for key in keys:
        if not fits(dtype := checkpoint.dtypes.get(key, torch.float32)):
            kind = str(dtype).removeprefix("torch.")
            raise ValueError(f"{checkpoint.name}: got {key} of type {kind}, expected floating-point weights")


@contextmanager
def checkpoint_context(checkpoint: Checkpoint) -> Iterator[None]:
    """Give errors about what is in a checkpoint its name, where they do not say it."""
    try:
        yield
    except ValueError as error:
        if checkpoint.name in str(error):
            raise
        raise ValueError(f"{checkpoint.name}: {error}") from error


def _some(keys: Iterable[str], most: int = 4) -> str:
    keys = sorted(keys)
    names = ", ".join(f"{key:.{MOST_LETTERS}}" for key in keys[:most])
    return names + (f", and {len(keys) - most} more" if len(keys) > most else "") or "none"


def _safetensors(path: Path) -> Checkpoint:
    """Open a safetensors file.

    The library checks its header: the tensors fill the file, each with as many bytes as its shape and type say.
    """
    shapes, dtypes, positions = dict[str, tuple[int, ...]](), dict[str, torch.dtype](), dict[str, Position]()
    try:
        with open(path, "rb") as file:
            length, now = int.from_bytes(file.read(8), "little"), stamp(file.fileno())
        if length > HEADER_BYTES:
            raise ValueError(f"it has a header of {length} bytes, expected at most {HEADER_BYTES}")
        opened, start = safe_open(path, framework="pt"), 8 + length
        for key in opened.offset_keys():
            piece: Any = opened.get_slice(key)
            if (kind := piece.get_dtype()) not in DTYPES:
                raise ValueError(f"it has {key:.{MOST_LETTERS}} of type {kind}, expected one of {', '.join(DTYPES)}")
            meta = torch.empty(piece.get_shape(), dtype=DTYPES[kind], device="meta")  # fails for sizes that none has
            shapes[key], dtypes[key], positions[key] = tuple(meta.shape), meta.dtype, Position(path, start, now)
            start += meta.nbytes
        by_paddle = path.name.startswith("diffusion_paddle_model") and (opened.metadata() or {}).get("format") != "pt"
    except (SafetensorError, OSError, RuntimeError, ValueError, TypeError, OverflowError) as error:
        reason = str(error).partition("\n")[0][:MOST_LETTERS]
        raise ValueError(f"got checkpoint {path}, which is truncated or not a safetensors file: {reason}") from error
    checkpoint = Checkpoint(str(path), shapes, opened.get_tensor, dtypes, positions=positions, files={path: now})
    return _from_paddle(checkpoint) if by_paddle else checkpoint


def _from_paddle(opened: Checkpoint) -> Checkpoint:
    """Return a checkpoint that Paddle wrote with all tensors in torch's layout."""

    def meta(key: str) -> Tensor:
        return paddle.torch_layout(key, torch.empty(opened.shapes[key], dtype=opened.dtypes[key], device="meta"))

    shapes = {key: tuple(meta(key).shape) for key in opened.shapes}
    dtypes = {key: meta(key).dtype for key in opened.shapes}
    read = opened.read
    return Checkpoint(opened.name, shapes, lambda key: paddle.torch_layout(key, read(key)), dtypes, files=opened.files)


def _sharded(index: Path) -> Checkpoint:
    names = read_index(index)
    files = {name: open_checkpoint(index.parent / name) for name in sorted(set(names.values()))}
    lost = [key for key, name in names.items() if key not in files[name].shapes]
    if lost:
        raise ValueError(f"got index {index} whose files lack {_some(lost)}, expected all keys of weight_map")
    shapes = {key: files[name].shapes[key] for key, name in names.items()}
    dtypes = {key: files[name].dtypes[key] for key, name in names.items()}
    positions = {key: files[name].positions[key] for key, name in names.items() if key in files[name].positions}
    stamps = {path: now for shard in files.values() for path, now in shard.files.items()}
    return Checkpoint(
        str(index), shapes, lambda key: files[names[key]].read(key), dtypes, positions=positions, files=stamps
    )
