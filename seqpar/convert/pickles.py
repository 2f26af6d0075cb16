"""Opens torch's pickled files (.pt, .pth, .bin) without running what is in them.

torch's own restricted reader (`weights_only`) makes tensors and plain values, and refuses every other name. Here are
the bounds before it, which keep a small file from filling the memory, and one sentence after it. Archives are mapped
into memory, so that opening one reads its index alone; files of torch before 1.6 are read whole.
"""

from __future__ import annotations

import io
import os
import re
import warnings
import zipfile
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
NESTED = ("ema", "model", "state_dict")  # where training checkpoints keep their weights; the first one is taken
WRAPPERS = ("module.", "_orig_mod.")  # what DistributedDataParallel and torch.compile put before each key
ARCHIVE, PICKLE = b"PK\x03\x04", b"\x80"  # how archives and older files begin
INDEX_BYTES = 1 << 21  # of the pickled part of an archive: 250 bytes a tensor are usual
TABLE_BYTES = 1 << 20  # of an archive's table of records, and of the pickled part of an older file
MOST_SHARED = 4  # bytes of tensors for each byte of a file: some share a storage, as tied embeddings do
PATHS = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
# what training scripts save among their arguments; paths are read as names of files, which nothing opens
ALLOWED: list[Any] = [
    Namespace,
    *((PurePath, f"{module}.{name}") for module in ("pathlib", "pathlib._local") for name in PATHS),
]


class BoundedFile(io.FileIO):
    """A file of which at most `TABLE_BYTES` are read into Python.

    The numbers of an older file's tensors are read by torch from the descriptor, and not counted.
    """

    left = TABLE_BYTES

    def read(self, size: int | None = -1, /) -> bytes:
        """Return the next bytes; ValueError once they are too many."""
        size = os.fstat(self.fileno()).st_size - self.tell() if size is None or size < 0 else size
        self.left -= size
        if self.left < 0:
            raise ValueError(f"has an index of more than {TABLE_BYTES} bytes")
        return super().read(size) or b""


def read_state(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return (key -> tensor, arguments of the training script) of a plain state dict or of a training checkpoint.

    The tensors of an archive are mapped from the file. Raises `ValueError` if the file is truncated, asks for other
    types than tensors and plain values, or holds no state dict.
    """
    content = _loaded(path)
    args = content.get("args") if isinstance(content, dict) else None
    if isinstance(content, dict):
        content = next((content[name] for name in NESTED if isinstance(content.get(name), dict)), content)
    if not isinstance(content, dict) or not content:
        raise ValueError(f"got checkpoint {path} holding a {type(content).__name__}, expected named tensors")
    for key, value in content.items():
        if (reason := _why_no_weight(key, value)) is not None:
            raise ValueError(f"got checkpoint {path}, expected named tensors, found {reason} under {key!a:.100}")
    nbytes, total = path.stat().st_size, sum(tensor.numel() * tensor.itemsize for tensor in content.values())
    if total > MOST_SHARED * nbytes:
        raise ValueError(f"got checkpoint {path} of {nbytes} bytes with tensors of {total}, expected no more")
    return {key: tensor.detach() for key, tensor in unwrapped(content).items()}, plain(args)


def read_arguments(path: Path) -> dict[str, Any]:
    """Return the arguments of a training script that were saved alone, such as model_args.pth."""
    content = _loaded(path)
    if not isinstance(content, (Namespace, dict)):
        raise ValueError(f"got {path} holding a {type(content).__name__}, expected the arguments of a training script")
    return plain(content)


def plain(args: Any) -> dict[str, Any]:
    """Return the arguments that are numbers, texts or None; {} if there is no Namespace and no dict of them."""
    values = vars(args) if isinstance(args, Namespace) else args if isinstance(args, dict) else {}
    kinds = (str, int, float, type(None))
    return {name: value for name, value in values.items() if isinstance(name, str) and isinstance(value, kinds)}


def unwrapped(state: Mapping[str, T]) -> dict[str, T]:
    """Return the state dict without the prefixes of wrappers, if all of its keys have them."""
    for prefix in WRAPPERS:
        if all(key.startswith(prefix) for key in state):
            return unwrapped({key.removeprefix(prefix): tensor for key, tensor in state.items()})
    return dict(state)


def _loaded(path: Path) -> Any:
    """Return what a file holds; `ValueError` says why it is refused."""
    try:
        with BoundedFile(path) as file, warnings.catch_warnings(), torch.serialization.safe_globals(ALLOWED):
            warnings.simplefilter("ignore")  # of other protocols; what torch cannot read is an error all the same
            start = file.read(len(ARCHIVE))
            file.seek(0)
            if start == ARCHIVE:
                _check_records(file)
                return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            if start.startswith(PICKLE):
                return torch.load(file, map_location="cpu", weights_only=True)  # pyright: ignore[reportArgumentType]
            raise ValueError("is neither an archive nor a pickle")
    except Exception as error:  # a crafted file can make torch raise any
        raise ValueError(f"got checkpoint {path}, which {_reason(error)}") from error


def _check_records(file: BoundedFile) -> None:
    """Raise ValueError for an archive that grows when it is read; torch compresses none."""
    with zipfile.ZipFile(file) as archive:
        for record in archive.infolist():
            if record.compress_type != zipfile.ZIP_STORED or record.flag_bits & 1:
                raise ValueError(f"has the compressed record {record.filename!a:.200}, which torch never writes")
            if record.filename.endswith("data.pkl") and record.file_size > INDEX_BYTES:
                raise ValueError(f"has an index of {record.file_size} bytes, expected at most {INDEX_BYTES}")


def _reason(error: Exception) -> str:
    """Return what is wrong with a file, without torch's advice to run what it asks for."""
    if match := re.search(r"GLOBAL ([\w.]{1,200})", str(error)):
        return f"asks for {match[1]}, expected tensors and plain values only; nothing of it was run"
    if isinstance(error, ValueError) and str(error).startswith(("has ", "is ")):
        return str(error)
    line = str(error).partition("\n")[0][:200]
    detail = f" ({line})" if line and "weights" not in line.lower() else ""
    return f"is truncated, or holds no weights that torch reads as such{detail}; save its state dict by torch.save"


def _why_no_weight(key: object, value: object) -> str | None:
    """Return what a value is that is no weight, or None for a tensor with numbers and a name."""
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    if value.layout != torch.strided or value.is_quantized or value.is_nested or value.device.type != "cpu":
        return "a sparse, quantised, nested or meta tensor"
    return None if isinstance(key, str) else "a tensor"
