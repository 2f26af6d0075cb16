"""Reads torch's pickled files (.bin, .pt, .pth) without running anything that is in them.

`torch.load(weights_only=True)` makes tensors and plain values and rejects every other name. It has no bounds, and a
small file could fill the memory, so sizes are checked here first. Archives are mapped: opening one reads only its
index. Files written by torch before 1.6 are read whole.
"""

from __future__ import annotations

import io
import os
import re
import warnings
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ARCHIVE, PICKLE = b"PK\x03\x04", b"\x80"  # first bytes of archives and of older files
INDEX_BYTES = 1 << 21  # of an archive's pickle; about 250 bytes per tensor are usual
TABLE_BYTES = 1 << 20  # of an archive's directory, and of the pickle of an older file
MOST_SHARED = 4  # bytes of tensors per byte of a file: tied embeddings share a storage


class BoundedFile(io.FileIO):
    """A file from which Python reads at most `TABLE_BYTES`; torch reads the numbers of older files below Python."""

    left = TABLE_BYTES

    def read(self, size: int | None = -1, /) -> bytes:
        """Return the next bytes; ValueError beyond the bound."""
        size = os.fstat(self.fileno()).st_size - self.tell() if size is None or size < 0 else size
        self.left -= size
        if self.left < 0:
            raise ValueError(f"has an index of more than {TABLE_BYTES} bytes")
        return super().read(size) or b""


def load_pickle(path: Path, allowed: Sequence[Any] = ()) -> Any:
    """Return the content of a file. Tensors of an archive are mapped from it.

    allowed: classes beyond tensors and plain values. Raises ValueError for a truncated file, one that needs any other
    class, and one that would grow when it is read.
    """
    try:
        with BoundedFile(path) as file, warnings.catch_warnings(), torch.serialization.safe_globals([*allowed]):
            warnings.simplefilter("ignore")  # about other pickle protocols; torch raises for unsupported ones
            start = file.read(len(ARCHIVE))
            file.seek(0)
            if start == ARCHIVE:
                _check_records(file)
                return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            if start.startswith(PICKLE):
                return torch.load(file, map_location="cpu", weights_only=True)  # pyright: ignore[reportArgumentType]
            raise ValueError("is neither an archive nor a pickle")
    except Exception as error:  # a crafted file can make torch raise any class
        raise ValueError(f"{path} {_reason(error)}") from error


def tensors_in(path: Path, content: Any) -> dict[str, Tensor]:
    """Return the content of a file as named tensors; ValueError for anything else."""
    if not isinstance(content, dict) or not content:
        raise ValueError(f"{path} holds a {type(content).__name__}, expected named tensors")
    for key, value in content.items():
        if not isinstance(value, Tensor) or not isinstance(key, str):
            raise ValueError(f"{path} holds a {type(value).__name__} under {key!a:.100}, expected named tensors")
        if value.layout != torch.strided or value.is_quantized or value.is_nested or value.device.type != "cpu":
            raise ValueError(f"{path} holds a sparse, quantized, nested or meta tensor under {key!a:.100}")
    total, size = sum(tensor.numel() * tensor.itemsize for tensor in content.values()), path.stat().st_size
    if total > MOST_SHARED * size:
        raise ValueError(f"{path} of {size} bytes describes tensors of {total} bytes")
    return {key: tensor.detach() for key, tensor in content.items()}


def _check_records(file: BoundedFile) -> None:
    with zipfile.ZipFile(file) as archive:
        for record in archive.infolist():
            if record.compress_type != zipfile.ZIP_STORED or record.flag_bits & 1:
                raise ValueError(f"has the compressed record {record.filename!a:.200}, which torch never writes")
            if record.filename.endswith("data.pkl") and record.file_size > INDEX_BYTES:
                raise ValueError(f"has an index of {record.file_size} bytes, expected at most {INDEX_BYTES}")


def _reason(error: Exception) -> str:
    """Return what is wrong with a file, without torch's advice to load it unsafely."""
    if match := re.search(r"GLOBAL ([\w.]{1,200})", str(error)):
        return f"requires {match[1]}, but only tensors and plain values are loaded; nothing was executed"
    if isinstance(error, ValueError) and str(error).startswith(("has ", "is ")):
        return str(error)
    line = str(error).partition("\n")[0][:200]
    detail = f" ({line})" if line and "weights" not in line.lower() else ""
    return f"is truncated or not a file of torch weights{detail}"
