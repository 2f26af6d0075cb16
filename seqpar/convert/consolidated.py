"""Merges `consolidated[_ema].XX-of-NN.pth` (or .safetensors) files: one file a model-parallel rank, as LLaMA's.

LLaMA2-Accessory trains with fairscale's tensor-parallel layers and saves each rank's part. A column-parallel layer has
its output rows split (weight and bias), a row-parallel one its input columns (and a whole bias), an embedding table its
columns. The norms of q and k are over the heads of one rank, so each rank has its own weights for them; the merged
model must normalise in as many groups (`Checkpoint.about["shards"]`). All other tensors are whole on every rank.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from seqpar.convert.pickles import read_arguments
from seqpar.loading.checkpoint import Checkpoint, open_checkpoint

FILE = re.compile(r"(consolidated(?:_ema)?)\.(\d\d)-of-(\d\d)(\.pth|\.safetensors)")
ARGUMENTS = "model_args.pth"
# the last parts of keys, and the dim in which ranks have different parts; None where all have the same
COLUMNS, ROWS = 0, 1
SPLIT: tuple[tuple[str, int | None], ...] = (
    (r"attention\.w[qkv]\.weight", COLUMNS),
    (r"attention\.[qk]_norm\.(weight|bias)", COLUMNS),
    (r"attention\.wo\.weight", ROWS),
    (r"feed_forward\.w[13]\.weight", COLUMNS),
    (r"feed_forward\.w2\.weight", ROWS),
    (r"adaLN_modulation\.1\.(weight|bias)", COLUMNS),
    (r"final_layer\.linear\.(weight|bias)", COLUMNS),
    (r"x_embedder\.(weight|bias)", COLUMNS),
    (r"t_embedder\.mlp\.0\.(weight|bias)", COLUMNS),
    (r"t_embedder\.mlp\.2\.weight", ROWS),
    (r"y_embedder\.embedding_table\.weight", ROWS),
    (r"t_embedder\.mlp\.2\.bias|attention_norm\.weight|ffn_norm\.weight", None),
)


def is_part(path: Path) -> bool:
    """Return whether a file has the name of such a part."""
    return FILE.fullmatch(path.name) is not None


def parts_in(folder: Path) -> list[Path]:
    """Return the parts of the checkpoint in a folder, in order, or []; averaged weights (_ema) come before others."""
    parts = sorted(path for path in folder.iterdir() if is_part(path))
    averaged = [path for path in parts if path.name.startswith("consolidated_ema.")]
    return [path for path in averaged or parts if path.suffix == (averaged or parts)[0].suffix]


def open_consolidated(path: Path) -> Checkpoint:
    """Open the checkpoint in a folder, or the one that a file is a part of, and merge its parts.

    Raises ValueError if parts are missing, do not fit together, or have a key that is not known to be split or whole.
    """
    parts = parts_in(path) if path.is_dir() else _siblings(path)
    _check_numbers(parts, path)
    opened = [open_checkpoint(part) for part in parts]
    arguments = parts[0].parent / ARGUMENTS
    about = {"args": read_arguments(arguments)} if arguments.is_file() else {}
    _check_arguments(about.get("args", {}), len(parts), parts[0].parent)
    if len(opened) == 1:
        first = opened[0]
        return Checkpoint(
            first.name, first.shapes, first.read, first.dtypes, {**first.about, **about}, files=first.files
        )
    return merged(opened, about)


def merged(parts: Sequence[Checkpoint], about: Mapping[str, object]) -> Checkpoint:
    """Return the whole tensors of all parts; each is put together when it is read."""
    first = parts[0]
    for part in parts[1:]:
        if part.shapes.keys() != first.shapes.keys():
            odd = min(part.shapes.keys() ^ first.shapes.keys())
            raise ValueError(f"got {part.name} and {first.name}, expected the same keys in both: one lacks {odd}")
    shapes = {key: _whole(key, parts) for key in first.shapes}

    def read(key: str) -> Tensor:
        tensors, dim = [part.read(key) for part in parts], _dim(key, first.name)
        if dim is not None:
            return torch.cat(tensors, dim)
        for part, tensor in zip(parts[1:], tensors[1:], strict=True):
            if not torch.equal(tensor, tensors[0]):
                raise ValueError(f"{part.name}: {key} differs from that in {first.name}, expected equal tensors")
        return tensors[0]

    files = {path: now for part in parts for path, now in part.files.items()}
    return Checkpoint(first.name, shapes, read, first.dtypes, {**about, "shards": len(parts)}, files=files)


def _dim(key: str, name: str) -> int | None:
    """Return the dim in which a tensor is split, or None for one that is whole; `ValueError` for an unknown key."""
    for pattern, dim in SPLIT:
        if re.fullmatch(rf"(.*\.)?({pattern})", key):
            return dim
    raise ValueError(f"got {name} with {key}, expected a key of Large-DiT: how this one is split is not known")


def _whole(key: str, parts: Sequence[Checkpoint]) -> tuple[int, ...]:
    """Return the shape of a merged tensor; `ValueError` if the parts differ in another dim or in their dtype."""
    dim, first = _dim(key, parts[0].name), parts[0].shapes[key]
    if dim is not None and dim >= len(first):
        raise ValueError(f"got {parts[0].name} with {key} of shape {first}, expected more than {dim} dims")
    for part in parts[1:]:
        same = [size for at, size in enumerate(part.shapes[key]) if at != dim]
        whole = [size for at, size in enumerate(first) if at != dim]
        if same != whole or len(part.shapes[key]) != len(first) or part.dtypes[key] != parts[0].dtypes[key]:
            got = f"{part.name} with {key} of shape {part.shapes[key]} and {part.dtypes[key]}"
            raise ValueError(f"got {got}, expected one that fits {first} and {parts[0].dtypes[key]} of the first file")
    if dim is None:
        return first
    return *first[:dim], sum(part.shapes[key][dim] for part in parts), *first[dim + 1 :]


def _siblings(path: Path) -> list[Path]:
    """Return all parts of the checkpoint that a file belongs to."""
    match = FILE.fullmatch(path.name)
    assert match is not None
    kind, _, count, suffix = match.groups()
    names = [f"{kind}.{rank:02d}-of-{count}{suffix}" for rank in range(int(count))]
    return [path.with_name(name) for name in names if path.with_name(name).is_file()]


def _check_numbers(parts: Sequence[Path], path: Path) -> None:
    """Raise ValueError unless these are the parts 0 to N-1 of N, from one on."""
    matches = [FILE.fullmatch(part.name) for part in parts]
    numbers = [(int(match[2]), int(match[3])) for match in matches if match]
    if not numbers:
        raise ValueError(f"got {path}, whose name is of no part: parts of N files are numbered from 00 to N-1")
    count = numbers[0][1]
    if numbers != [(rank, count) for rank in range(count)]:
        names = ", ".join(part.name for part in parts)
        raise ValueError(f"got the parts {names}, expected all of 00 to {count - 1:02d} of {count}; add the missing")


def _check_arguments(args: Mapping[str, object], parts: int, folder: Path) -> None:
    """Raise ValueError if the arguments of training name another number of parts."""
    if (size := args.get("model_parallel_size", parts)) != parts:
        raise ValueError(
            f"got {parts} part(s) in {folder}, expected {size}: {ARGUMENTS} says model_parallel_size={size}"
        )
