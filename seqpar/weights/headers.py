"""Reads the header of a safetensors file: where each tensor lies, of which shape and type.

The header is bounded before it is parsed, and every entry is checked against the file: the tensors must fill it from
end to end, each with as many bytes as its shape and type say. No two readers can so see different numbers in one file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from seqpar.weights.opcodes import shown, sizes_of

HEADER_BYTES = 1 << 24  # 120 bytes a tensor are usual
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class Entry:
    """A tensor of a file: its shape and dtype, and the byte of the file at which it begins."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int

    @property
    def end(self) -> int:
        """Return the byte behind the last one."""
        return self.start + prod(self.shape) * self.dtype.itemsize


def read_header(path: Path) -> tuple[Mapping[str, Entry], Mapping[str, str]]:
    """Return (key -> tensor, metadata) of a safetensors file; ValueError says what does not fit together."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(HEADER_BYTES, size - 8):
            raise ValueError(f"it has {size} bytes and a header of {length}, expected one of at most {HEADER_BYTES}")
        try:
            header = json.loads(file.read(length), object_pairs_hook=_distinct)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"its header is no JSON: {error}") from error
    if not isinstance(header, dict):
        raise ValueError(f"its header is a {type(header).__name__}, expected an object")
    told = header.pop("__metadata__", {})
    if not isinstance(told, dict) or not all(isinstance(text, str) for text in told.values()):
        raise ValueError("its metadata is no object of texts")
    found = {key: _entry(key, entry, 8 + length) for key, entry in header.items()}
    at = 8 + length
    for key, entry in sorted(found.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start != at:
            raise ValueError(f"{shown(key)} begins at byte {entry.start}, expected {at}, where the one before it ends")
        at = entry.end
    if at != size:
        raise ValueError(f"its tensors end at byte {at}, expected {size}, the end of the file")
    return found, told


def _entry(key: str, entry: Any, base: int) -> Entry:
    """Return the tensor that an entry describes. base: the byte of the file from which offsets count."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{shown(key)} has no entry of dtype, shape and data_offsets alone")
    kind, offsets = entry["dtype"], entry["data_offsets"]
    dtype = DTYPES.get(kind) if isinstance(kind, str) else None
    if dtype is None:
        told = ascii(kind)[:20] if isinstance(kind, str) else type(kind).__name__
        raise ValueError(f"{shown(key)} is of type {told}, expected one of {', '.join(DTYPES)}")
    try:
        shape = sizes_of(entry["shape"])
    except ValueError as error:
        raise ValueError(f"{shown(key)} is {error}") from error
    if not isinstance(offsets, list) or not all(type(offset) is int for offset in offsets) or len(offsets) != 2:
        raise ValueError(f"{shown(key)} has data_offsets that are no two numbers")
    found = Entry(shape, dtype, base + offsets[0])
    if base + offsets[1] != found.end:
        raise ValueError(f"{shown(key)} has another number of bytes than its shape {shape} says")
    return found


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON; ValueError if a key comes twice, because readers differ in which one they take."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key comes twice")
    return found
