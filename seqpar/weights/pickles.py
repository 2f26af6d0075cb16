"""Opens torch's pickled files (.pt, .pth, .bin) without running what is in them.

The reader of `seqpar/weights/torch_reader.py` makes tensors, builtin values and the `argparse.Namespace` in which
training scripts save their arguments. Everything else is refused by name. Files are mapped into memory, so that opening
one reads its index alone, and every tensor is known to lie inside the file before one is made.
"""

from __future__ import annotations

import mmap
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from seqpar.weights.archives import ARCHIVE, PICKLE, Span, mapped, records
from seqpar.weights.opcodes import FAILURES, MOST_LETTERS, word
from seqpar.weights.torch_reader import Arguments, Odd, Strided, Weights, what_is

T = TypeVar("T")
NESTED = ("ema", "model", "state_dict")  # where training checkpoints keep their weights; the first one is taken
WRAPPERS = ("module.", "_orig_mod.")  # what DistributedDataParallel and torch.compile put before each key
MOST_SHARED = 4  # bytes of tensors for each byte of a file: some share a storage, as tied embeddings do
MAGIC = 0x1950A86A20F9469CFC6C  # the first of the pickles of an old file


@dataclass(frozen=True)
class Pickled:
    """What a file holds: a value, the bytes of the file, and where the numbers of each storage lie."""

    value: Any
    data: mmap.mmap
    spans: Mapping[str, Span]

    def tensor(self, found: Strided) -> Tensor:
        """Return a tensor that is mapped from the file, or copied where its numbers begin at an odd byte."""
        width, span = found.dtype.itemsize, self.spans[found.storage.key]
        if not prod(found.size):
            return torch.empty(found.size, dtype=found.dtype)
        data = memoryview(self.data)[span.start : span.start + found.storage.nbytes // width * width]
        flat, stride = torch.frombuffer(data, dtype=torch.uint8), [step * width for step in found.stride]
        if span.start % width == 0:
            return flat.view(found.dtype).as_strided(found.size, found.stride, found.offset)
        numbers = flat.as_strided((*found.size, width), (*stride, 1), found.offset * width).contiguous()
        return numbers.view(found.dtype)[..., 0]


def read_state(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return (key -> tensor, arguments of the training script) of a plain state dict or of a training checkpoint.

    The tensors are mapped from the file. Raises `ValueError` if the file is truncated, asks for other types than
    tensors and plain values, or holds no state dict.
    """
    opened = unpickled(path)
    loaded = opened.value
    args = loaded.get("args") if isinstance(loaded, Mapping) else None
    if isinstance(loaded, Mapping):
        loaded = next((loaded[name] for name in NESTED if isinstance(loaded.get(name), Mapping)), loaded)
    if not isinstance(loaded, Mapping) or not loaded or not all(_is_weight(*item) for item in loaded.items()):
        raise ValueError(f"got checkpoint {path}, expected a state dict (key -> tensor){_odd(loaded)}")
    total = sum(prod(found.size) * found.dtype.itemsize for found in loaded.values())
    if total > MOST_SHARED * len(opened.data):
        raise ValueError(f"got checkpoint {path} of {len(opened.data)} bytes with tensors of {total}, expected no more")
    return {key: opened.tensor(found) for key, found in unwrapped(loaded).items()}, plain(args)


def read_arguments(path: Path) -> dict[str, Any]:
    """Return the arguments of a training script that were saved alone, such as model_args.pth."""
    loaded = unpickled(path).value
    if not isinstance(loaded, (Arguments, Mapping)):
        raise ValueError(f"got {path} holding {what_is(loaded)}, expected the arguments of a training script")
    return plain(loaded)


def plain(args: Any) -> dict[str, Any]:
    """Return the arguments that are numbers, texts or None; {} if there is no Namespace and no dict of them."""
    values = args.values if isinstance(args, Arguments) else args if isinstance(args, Mapping) else {}
    return {name: value for name, value in values.items() if isinstance(name, str) and _is_plain(value)}


def _is_plain(value: object) -> bool:
    """Return whether this is None, a number or a short text."""
    if isinstance(value, str):
        return len(value) <= MOST_LETTERS
    return value is None or isinstance(value, float) or (isinstance(value, int) and abs(value) < 1 << 63)


def unwrapped(state: Mapping[str, T]) -> dict[str, T]:
    """Return the state dict without the prefixes of wrappers, if all of its keys have them."""
    for prefix in WRAPPERS:
        if all(key.startswith(prefix) for key in state):
            return unwrapped({key.removeprefix(prefix): tensor for key, tensor in state.items()})
    return dict(state)


def unpickled(path: Path) -> Pickled:
    """Return what a file holds; `ValueError` says why it is refused."""
    try:
        data = mapped(path)
        if data[: len(ARCHIVE)] == ARCHIVE:
            return _archive(path, data)
        if data[: len(PICKLE)] == PICKLE:
            return _old(data)
        raise ValueError("it is neither an archive nor a pickle")
    except (*FAILURES, zipfile.BadZipFile, NotImplementedError) as error:
        text = str(error) or type(error).__name__
        text = text if text.startswith(("has ", "asks ")) else f"is truncated or holds no weights: {text}"
        raise ValueError(f"got checkpoint {path}, which {text}") from error


def _archive(path: Path, data: mmap.mmap) -> Pickled:
    """Return what a zip archive holds."""
    index, spans = records(path, data)
    reader = Weights(data[index.start : index.start + index.length])
    value = reader.read()
    for key, storage in reader.storages.items():
        if storage.nbytes > (spans[key].length if key in spans else 0):
            raise ValueError(f"the numbers of storage {key!a} are not in the file")
    return Pickled(value, data, spans)


def _old(data: mmap.mmap) -> Pickled:
    """Return what a file of torch before 1.6 holds: a number, a version, the sizes of types, a value and its keys."""
    reader = Weights(data)
    magic, version, system = reader.read(), reader.read(), reader.read()
    if magic != MAGIC or version != 1001 or not isinstance(system, Mapping) or not system.get("little_endian"):
        raise ValueError("it does not begin as torch's files do")
    value, keys = reader.read(), reader.read()
    if not isinstance(keys, list) or {word(key) for key in keys} != reader.storages.keys():
        raise ValueError("its list of storages is not that of its tensors")
    spans = dict[str, Span]()
    for key in keys:
        storage = reader.storages[key]
        if reader.number("q") != storage.count:
            raise ValueError(f"storage {key!a} has another size than its tensors say")
        spans[key] = Span(reader.at, storage.nbytes)
        reader.skip(storage.nbytes)
    return Pickled(value, data, spans)


def _is_weight(key: object, value: object) -> bool:
    """Return whether this is a named tensor whose numbers are all in the file."""
    return isinstance(key, str) and isinstance(value, Strided)


def _odd(loaded: object) -> str:
    """Return the first thing that is no weight, as the end of a message."""
    if not isinstance(loaded, Mapping) or not loaded:
        return f", found {what_is(loaded)}"
    key, value = next((key, value) for key, value in loaded.items() if not _is_weight(key, value))
    return f", found {what_is(value)} under {what_is(key) if isinstance(key, Odd) else ascii(key)[:100]}"
