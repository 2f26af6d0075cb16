"""Opens torch's pickled files (.pt, .pth, .bin) without running what is in them.

Beyond tensors and builtin types the unpickler makes only `ALLOWED` types, which hold plain values: training scripts
save their arguments as an `argparse.Namespace`. Everything else is refused by name. Files are mapped into memory, so
that opening one reads its index alone.
"""

from __future__ import annotations

import pickle
import re
import struct
import warnings
import zipfile
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ALLOWED = (Namespace,)
NESTED = ("ema", "model", "state_dict")  # where training checkpoints keep their weights; the first one is taken
WRAPPERS = ("module.", "_orig_mod.")  # what DistributedDataParallel and torch.compile put before each key
INDEX_BYTES = 1 << 28  # the pickled index of an archive is far smaller; a larger one would fill the memory
# what torch's unpickler raises for files that were cut, altered or never were checkpoints
FAILURES = (
    *(RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError, AssertionError, OSError),
    *(EOFError, MemoryError, OverflowError, pickle.UnpicklingError, struct.error, zipfile.BadZipFile),
)


def read_state(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return (key -> tensor, arguments of the training script) of a plain state dict or of a training checkpoint.

    The tensors are mapped from the file. Raises `ValueError` if the file is truncated, asks for other types than
    tensors and plain values, or holds no state dict.
    """
    loaded = unpickled(path)
    args = loaded.get("args") if isinstance(loaded, Mapping) else None
    if isinstance(loaded, Mapping):
        loaded = next((loaded[name] for name in NESTED if isinstance(loaded.get(name), Mapping)), loaded)
    if not isinstance(loaded, Mapping) or not loaded or not all(_is_weight(*item) for item in loaded.items()):
        raise ValueError(f"got checkpoint {path}, expected a state dict (key -> tensor){_odd(loaded)}")
    return unwrapped({key: tensor.detach() for key, tensor in loaded.items()}), plain(args)


def read_arguments(path: Path) -> dict[str, Any]:
    """Return the arguments of a training script that were saved alone, such as model_args.pth."""
    loaded = unpickled(path)
    if not isinstance(loaded, Namespace):
        raise ValueError(f"got {path} holding a {type(loaded).__name__}, expected the arguments of a training script")
    return plain(loaded)


def plain(args: Any) -> dict[str, Any]:
    """Return the arguments that are numbers, texts or None; {} if there is no Namespace."""
    values = vars(args) if isinstance(args, Namespace) else {}
    return {
        name: value for name, value in values.items() if value is None or isinstance(value, (bool, int, str, float))
    }


def unwrapped(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the state dict without the prefixes of wrappers, if all of its keys have them."""
    for prefix in WRAPPERS:
        if all(key.startswith(prefix) for key in state):
            return unwrapped({key.removeprefix(prefix): tensor for key, tensor in state.items()})
    return dict(state)


def unpickled(path: Path) -> Any:
    """Return what a file holds, mapped into memory if it is an archive; `ValueError` says why it is refused."""
    try:
        archive = zipfile.is_zipfile(path)
        if archive:
            _check_archive(path)
        with torch.serialization.safe_globals([*ALLOWED]), warnings.catch_warnings(action="ignore"):
            return torch.load(path, map_location="cpu", mmap=archive, weights_only=True)
    except FAILURES as error:
        raise ValueError(f"got checkpoint {path}, which {_reason(error)}") from error


def _check_archive(path: Path) -> None:
    """Refuse an archive that would grow when it is read: torch stores its records as they are."""
    with zipfile.ZipFile(path) as archive:
        for record in archive.infolist():
            if record.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"has the compressed record {record.filename}, which torch never writes")
            if record.filename.endswith("data.pkl") and record.file_size > INDEX_BYTES:
                raise ValueError(f"has an index of {record.file_size} bytes, expected at most {INDEX_BYTES}")


def _reason(error: BaseException) -> str:
    text = str(error)
    if asked := re.search(r"GLOBAL ([\w.]+)|(?:global|call|type|class)\W+(\w+(?:\.\w+)+)", text):
        name = asked[1] or asked[2]
        return f"asks for {name}, expected tensors and plain values only; nothing of it was run"
    if isinstance(error, pickle.UnpicklingError):  # torch's text goes on with the advice to run the file
        text = text.rpartition("WeightsUnpickler error:")[2].strip()
    kept = f"{text.splitlines()[0]}" if text else type(error).__name__
    return kept if kept.startswith("has ") else f"is truncated or holds no weights: {kept}"


def _is_weight(key: object, value: object) -> bool:
    """Return whether this is a named tensor whose numbers are all in the file."""
    if not isinstance(key, str) or type(value) not in (Tensor, nn.Parameter):
        return False
    tensor: Any = value
    plainly = tensor.layout == torch.strided and not tensor.is_quantized and tensor.device.type == "cpu"
    return plainly and tensor.numel() * tensor.element_size() <= tensor.untyped_storage().nbytes()


def _odd(loaded: object) -> str:
    """Return the first thing that is no weight, as the end of a message."""
    if not isinstance(loaded, Mapping) or not loaded:
        return f", found {'an empty dict' if loaded == {} else type(loaded).__name__}"
    key, value = next((key, value) for key, value in loaded.items() if not _is_weight(key, value))
    if not isinstance(value, Tensor) or not isinstance(key, str):
        return f", found a {type(value).__name__} under {key!r}"
    return (
        f", found a tensor under {key!r} that is sparse, quantised, on a device, or larger than its bytes in the file"
    )
