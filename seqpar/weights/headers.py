"""Reads the header of a safetensors file: where each tensor lies, of which shape and type.

The library checks it: the tensors fill the file from end to end, each with as many bytes as its shape and type say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

HEADER_BYTES = 1 << 24  # 120 bytes a tensor are usual


@dataclass(frozen=True)
class Entry:
    """A tensor of a file: its shape and dtype, and the byte of the file at which it begins."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int


def read_header(path: Path) -> tuple[dict[str, Entry], Mapping[str, str], Callable[[str], Tensor]]:
    """Return (key -> tensor, metadata, function that reads a tensor of the mapped file) of a safetensors file.

    Raises ValueError for a header that is too long, and what the library and torch raise for one that is wrong.
    """
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
    if length > HEADER_BYTES:
        raise ValueError(f"it has a header of {length} bytes, expected at most {HEADER_BYTES}")
    opened, start = safe_open(path, framework="pt"), 8 + length
    entries: dict[str, Entry] = {}
    for key in opened.offset_keys():
        piece: Any = opened.get_slice(key)
        shape = tuple(piece.get_shape())
        entries[key] = Entry(shape, (piece[:0] if shape else piece[...]).dtype, start)
        start += prod(shape) * entries[key].dtype.itemsize
    return entries, opened.metadata() or {}, opened.get_tensor
