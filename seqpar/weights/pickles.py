"""Opens torch's pickled files (.pt, .pth, .bin) without running what is in them.

The reader of `seqpar/weights/opcodes.py` makes tensors, builtin values and the `argparse.Namespace` in which training
scripts save their arguments. Everything else is refused by name. Files are mapped into memory, so that opening one
reads its index alone, and every tensor is known to lie inside the file before one is made.
"""

from __future__ import annotations

import mmap
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from seqpar.weights import opcodes
from seqpar.weights.archives import ARCHIVE, INDEX_BYTES, PICKLE, Span, mapped, records
from seqpar.weights.opcodes import MOST_LETTERS, Name, Reader, sizes_of, word

T = TypeVar("T")
NESTED = ("ema", "model", "state_dict")  # where training checkpoints keep their weights; the first one is taken
WRAPPERS = ("module.", "_orig_mod.")  # what DistributedDataParallel and torch.compile put before each key
MOST_SHARED = 4  # bytes of tensors for each byte of a file: some share a storage, as tied embeddings do
MAGIC = 0x1950A86A20F9469CFC6C  # the first of the pickles of an old file
DTYPES = {f"torch {name}": dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)}
STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
    "UntypedStorage": torch.uint8,
}
TENSORS = ("torch._utils _rebuild_tensor", "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_tensor_v3")
WITH_ATTRIBUTES = "torch._tensor _rebuild_from_type_v2"
PARAMETERS = ("torch._utils _rebuild_parameter", "torch._utils _rebuild_parameter_with_state")
# what torch writes and weights never are: name -> what it makes, for messages
OTHERS = {
    "torch._utils _rebuild_sparse_tensor": "a sparse tensor",
    "torch._utils _rebuild_sparse_csr_tensor": "a sparse tensor",
    "torch._utils _rebuild_qtensor": "a quantised tensor",
    "torch._utils _rebuild_nested_tensor": "a nested tensor",
    "torch._utils _rebuild_meta_tensor_no_storage": "a tensor on a device without numbers (meta)",
    "torch._utils _rebuild_device_tensor_from_numpy": "a tensor on a device other than the CPU",
    "torch._utils _rebuild_device_tensor_from_cpu_tensor": "a tensor on a device other than the CPU",
    "torch._utils _rebuild_wrapper_subclass": "a tensor of a class of its own",
    "torch.serialization _get_layout": "a layout",
    "torch device": "a device",
    "collections Counter": "a counter",
    **{f"{module} {kind}": f"a {kind}" for module in ("builtins", "__builtin__") for kind in ("set", "frozenset")},
    **{f"{module} {kind}": f"a {kind}" for module in ("builtins", "__builtin__") for kind in ("bytearray", "complex")},
    "_codecs encode": "bytes",
}


@dataclass(frozen=True)
class Storage:
    """The numbers that tensors share. key: names where they lie; count: how many numbers of the dtype they are."""

    key: str
    dtype: torch.dtype
    count: int

    @property
    def nbytes(self) -> int:
        """Return the number of bytes."""
        return self.count * self.dtype.itemsize


@dataclass(frozen=True)
class Strided:
    """A tensor: numbers of a storage, all of which are in it. offset and stride count numbers of the dtype."""

    storage: Storage
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Odd:
    """A value that no weights need, and what it is."""

    what: str


@dataclass(eq=False)
class Arguments:
    """An argparse.Namespace: name -> value."""

    values: Mapping[str, Any] = field(default_factory=dict)


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
    if not isinstance(loaded, Arguments):
        raise ValueError(f"got {path} holding {_what(loaded)}, expected the arguments of a training script")
    return plain(loaded)


def plain(args: Any) -> dict[str, Any]:
    """Return the arguments that are numbers, texts or None; {} if there is no Namespace."""
    values = args.values if isinstance(args, Arguments) else {}
    return {
        name: value for name, value in values.items() if value is None or isinstance(value, (bool, int, str, float))
    }


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
    except (*opcodes.FAILURES, zipfile.BadZipFile, NotImplementedError) as error:
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


class Weights(Reader):
    """A pickle of tensors and plain values, with the storages that it names."""

    MORE = opcodes.OBJECTS
    MOST_TEXT = INDEX_BYTES

    def __init__(self, data: mmap.mmap | bytes) -> None:
        super().__init__(data)
        self.storages: dict[str, Storage] = {}

    def key(self, value: object) -> object:
        """Return a short text or number, or a stand-in for anything else."""
        short = type(value) is str or (type(value) is int and abs(value) < 1 << 31)  # larger ones can all collide
        return value if short else Odd(_what(value))

    def stored(self, found: Any) -> Storage:
        """Return the storage of a persistent id: ("storage", type, key, device, number of elements)."""
        shape = isinstance(found, tuple) and len(found) in (5, 6) and found[0] == "storage" and found[5:] in ((), (None,))
        if not shape or not isinstance(found[1], Name) or type(found[4]) is not int or found[4] < 0:
            raise ValueError(f"a storage that torch does not write at byte {self.at}")
        dtype = STORAGES.get(found[1].text.split(" ")[-1])
        if dtype is None:
            raise ValueError(f"asks for {found[1].dotted}, expected numbers of a known type")
        (count,) = sizes_of((found[4],))
        storage = Storage(word(found[2]), dtype, count)
        if self.storages.setdefault(storage.key, storage) != storage:
            raise ValueError(f"storage {storage.key!a} has two types or sizes")
        return storage

    def call(self, name: str, args: tuple[Any, ...]) -> Any:
        """Return a tensor, an empty dict or an empty Namespace; ValueError for a name that weights do not need."""
        if name in TENSORS:
            return self._tensor(name, args)
        if name in PARAMETERS and args:
            return args[0]
        if name == WITH_ATTRIBUTES and len(args) == 4 and isinstance(args[0], Name) and args[0].text in TENSORS:
            return self._tensor(args[0].text, args[2])
        if name == "argparse Namespace" and not args:
            return Arguments()
        if name == "collections OrderedDict" and not args:
            return {}
        if name == "torch Size" and len(args) == 1:
            return args[0]
        if name in OTHERS:
            return Odd(OTHERS[name])
        dotted = name.replace(" ", ".")
        raise ValueError(f"asks for {dotted}, expected tensors and plain values only; nothing of it was run")

    def complete(self, target: Any, state: Any) -> None:
        """Keep the state of a Namespace; attributes of dicts and tensors are not read."""
        if isinstance(target, Arguments) and isinstance(state, dict):
            target.values = state
        elif not isinstance(target, (dict, Strided, Odd)):
            raise ValueError(f"a state of a {type(target).__name__} at byte {self.at}")

    def _tensor(self, name: str, args: Any) -> Strided | Odd:
        """Return the tensor that a function of torch makes of (storage, offset, size, stride, ...)."""
        new = name.endswith("v3")  # types without a storage of their own: the type follows
        storage, offset, size, stride = args[:4] if isinstance(args, tuple) and len(args) > 3 + 3 * new else [None] * 4
        if not isinstance(storage, Storage) or not isinstance(stride, tuple):
            raise ValueError(f"a tensor that torch does not write at byte {self.at}")
        dtype = DTYPES.get(args[6].text) if new and isinstance(args[6], Name) else storage.dtype
        if dtype is None or any(args[7 if new else 6 :]):
            return Odd("a tensor of an unknown type, or one that is negated or conjugated")
        ((offset,), size, stride) = sizes_of((offset,)), sizes_of(size), tuple(map(_whole, stride))
        last = offset + sum((count - 1) * step for count, step in zip(size, stride, strict=True))
        if prod(size) and max(last + 1, prod(size)) * dtype.itemsize > storage.nbytes:
            return Odd("a tensor that is larger than its bytes in the file")
        return Strided(storage, dtype, offset, size, stride)


def _whole(value: object) -> int:
    """Return a stride; those of dims of one or no element can have any size."""
    return sizes_of((value,))[0]


def _is_weight(key: object, value: object) -> bool:
    """Return whether this is a named tensor whose numbers are all in the file."""
    return isinstance(key, str) and isinstance(value, Strided)


def _odd(loaded: object) -> str:
    """Return the first thing that is no weight, as the end of a message."""
    if not isinstance(loaded, Mapping) or not loaded:
        return f", found {_what(loaded)}"
    key, value = next((key, value) for key, value in loaded.items() if not _is_weight(key, value))
    return f", found {_what(value)} under {_what(key) if isinstance(key, Odd) else ascii(key)[:100]}"


def _what(value: object) -> str:
    """Return what a value is, in words."""
    if isinstance(value, Odd):
        return value.what
    if isinstance(value, Strided):
        return "a tensor"
    return "an empty dict" if value == {} else f"a {type(value).__name__}"
