"""Reads torch's pickles: tensors as ranges of numbers in a file, builtin values, and training arguments.

It makes no tensor. Each one that a pickle describes is known to lie inside its storage; other kinds of tensors (sparse,
quantised, on the meta device) become stand-ins, so that they matter only where weights are expected. A call of any
other name is refused by its name.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

from seqpar.weights import opcodes
from seqpar.weights.archives import INDEX_BYTES
from seqpar.weights.opcodes import Name, Reader, sizes_of, word

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
    **{"QInt8Storage": torch.int8, "QUInt8Storage": torch.uint8, "QInt32Storage": torch.int32},
}
TENSORS = ("torch._utils _rebuild_tensor", "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_tensor_v3")
WITH_ATTRIBUTES = "torch._tensor _rebuild_from_type_v2"
PARAMETERS = ("torch._utils _rebuild_parameter", "torch._utils _rebuild_parameter_with_state")
PATHS = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
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
    **{f"{module} {kind}": "a path" for module in ("pathlib", "pathlib._local") for kind in PATHS},
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
        return value if short else Odd(what_is(value))

    def stored(self, found: Any) -> Storage:
        """Return the storage of a persistent id: ("storage", type, key, device, number of elements)."""
        found = found if isinstance(found, tuple) and len(found) in (5, 6) else (None,) * 5
        if found[0] != "storage" or not isinstance(found[1], Name) or any(part is not None for part in found[5:]):
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


def what_is(value: object) -> str:
    """Return what a value is, in words."""
    if isinstance(value, Odd):
        return value.what
    if isinstance(value, Strided):
        return "a tensor"
    return "an empty dict" if value == {} else f"a {type(value).__name__}"
