"""Merges `consolidated[_ema].XX-of-NN.pth` (or .safetensors) files: one file per model-parallel rank, as LLaMA's.

LLaMA2-Accessory trains with fairscale's tensor-parallel layers and saves each rank's part. A column-parallel layer has
its output rows split (weight and bias), a row-parallel one its input columns (and a whole bias), an embedding table its
columns. The norms of q and k are over the heads of one rank, so each rank has its own weights for them. All other
tensors are equal on every rank.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from seqpar.loading.checkpoint import Checkpoint

FILE = re.compile(r"(consolidated(?:_ema)?)\.(\d\d)-of-(\d\d)(\.pth|\.safetensors)")
ARGUMENTS = "model_args.pth"  # of the training script, next to the parts
# the last parts of keys, and the dim along which ranks hold different parts; None where all hold the same
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


def parts_of(path: Path) -> list[Path]:
    """All parts of the checkpoint in a folder, or of the one that a file is a part of, in order; [] for others.

    Averaged weights (_ema) come before others. Raises ValueError if parts are missing.
    """
    name = FILE.fullmatch(path.name)
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if FILE.fullmatch(file.name))
        averaged = [file for file in files if file.name.startswith("consolidated_ema.")]
        parts = [file for file in averaged or files if file.suffix == (averaged or files)[0].suffix]
    elif name is not None:
        names = [f"{name[1]}.{rank:02d}-of-{name[3]}{name[4]}" for rank in range(int(name[3]))]
        parts = [path.with_name(name) for name in names if path.with_name(name).is_file()]
    else:
        return []
    numbers = [(int(match[2]), int(match[3])) for part in parts if (match := FILE.fullmatch(part.name))]
    count = numbers[0][1] if numbers else 0
    if ((parts or name) and numbers != [(rank, count) for rank in range(count)]) or (name and not numbers):
        found = ", ".join(part.name for part in parts) or path.name
        raise ValueError(f"parts are missing: found {found}; {path} needs all parts 00-of-NN to NN-1 of its checkpoint")
    return parts


def merged(parts: Sequence[Checkpoint]) -> Checkpoint:
    """The whole tensors of all parts; each is put together when it is read.

    Raises ValueError if parts do not fit together, or have a key that is not known to be split or whole.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    for part in parts[1:]:
        if part.shapes.keys() != first.shapes.keys():
            odd = min(part.shapes.keys() ^ first.shapes.keys())
            raise ValueError(f"{part.name} and {first.name} have different keys: only one has {odd}")
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
    return Checkpoint(first.name, shapes, read, first.dtypes, files=files)


def _dim(key: str, name: str) -> int | None:
    for pattern, dim in SPLIT:
        if re.fullmatch(rf"(.*\.)?({pattern})", key):
            return dim
    raise ValueError(f"{name} has {key}, which is no key of Large-DiT: how ranks split it is not known")


def _whole(key: str, parts: Sequence[Checkpoint]) -> tuple[int, ...]:
    dim, first = _dim(key, parts[0].name), parts[0].shapes[key]
    if dim is not None and dim >= len(first):
        raise ValueError(f"{parts[0].name}: {key} has shape {first}, expected more than {dim} dims")
    for part in parts[1:]:
        shape, dtype = part.shapes[key], part.dtypes[key]
        other_dims = [[size for at, size in enumerate(sizes) if at != dim] for sizes in (shape, first)]
        if len(shape) != len(first) or other_dims[0] != other_dims[1] or dtype != parts[0].dtypes[key]:
            raise ValueError(
                f"{part.name}: {key} of shape {shape} and {dtype} does not fit {first} and {parts[0].dtypes[key]} of "
                f"the first part"
            )
    return first if dim is None else (*first[:dim], sum(part.shapes[key][dim] for part in parts), *first[dim + 1 :])
