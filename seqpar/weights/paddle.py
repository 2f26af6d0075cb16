"""Reads PaddlePaddle's `.pdparams` files without Paddle, mapped into memory.

`paddle.save` pickles a dict of numpy arrays (protocol 2 to 4). The reader of `seqpar/weights/opcodes.py` calls nothing
that the pickle names: names are compared with those that numpy writes, and bytes become views of the file. Two facts of
the format: bfloat16 numbers are stored as uint16, and the weights of linear layers are (in, out), which is transposed
from torch's.
"""

from __future__ import annotations

import mmap
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from seqpar.weights.opcodes import FAILURES, Reader, sizes_of, word

# numpy's codes of element types, without the byte order
DTYPES = {
    "f8": torch.float64,
    "f4": torch.float32,
    "f2": torch.float16,
    "u2": torch.bfloat16,
    "i8": torch.int64,
    "i4": torch.int32,
    "i2": torch.int16,
    "i1": torch.int8,
    "u1": torch.uint8,
    "b1": torch.bool,
}
NAMES = "StructuredToParameterName@@"  # the key of a table of Paddle's own parameter names
SPLIT = "UnpackBigParamInfor@@"  # the key of a table of arrays that were cut in pieces of 1 GiB
RECONSTRUCT = ("numpy.core.multiarray _reconstruct", "numpy._core.multiarray _reconstruct")


@dataclass
class Kind:
    """A numpy dtype that is being read: its code, and its byte order, which comes after it."""

    code: str
    order: str = "<"


@dataclass
class Array:
    """A numpy array that is being read: its tensor comes after it."""

    tensor: Tensor | None = None


def read_state(path: Path) -> dict[str, Tensor]:
    """Return (key -> tensor) in torch's layout, mapped from the file; `ValueError` if it is no such file."""
    try:
        with open(path, "rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # writable, as torch wants it; never written
        found = Arrays(data).read()
    except FAILURES as error:
        reason = "is truncated or " if isinstance(error, (IndexError, struct.error)) else ""
        raise ValueError(f"got checkpoint {path}, which {reason}is no dict of arrays: {error}") from error
    if not isinstance(found, Mapping) or SPLIT in found:
        raise ValueError(f"got checkpoint {path}, expected a dict of whole arrays; save it by a newer Paddle")
    state = {key: _tensor(value) for key, value in found.items() if key != NAMES}
    if odd := [key for key, tensor in state.items() if tensor is None]:
        raise ValueError(f"got checkpoint {path}, expected a state dict (key -> array), found no array at {odd[0]!r}")
    return {key: torch_layout(key, tensor) for key, tensor in state.items() if tensor is not None}


def torch_layout(key: str, tensor: Tensor) -> Tensor:
    """Return a tensor of Paddle as torch has it: matrices are weights of linear layers, except embedding tables."""
    tensor = tensor.view(torch.bfloat16) if tensor.dtype == torch.uint16 else tensor
    linear = tensor.dim() == 2 and key.endswith(".weight") and "embedding" not in key.split(".")[-2]
    return tensor.T if linear else tensor


def _tensor(value: object) -> Tensor | None:
    """Return the tensor of an array, or of a pair (Paddle's name, array)."""
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str):
        value = value[1]
    return value.tensor if isinstance(value, Array) else None


class Arrays(Reader):
    """A pickle of numpy arrays."""

    NEED = "arrays"
    MOST_TEXT = sys.maxsize  # under protocol 2 the bytes of arrays are texts

    def __init__(self, data: mmap.mmap) -> None:
        super().__init__(data)
        self._copied = 0  # bytes

    def key(self, value: object) -> str:
        """Return the key of a dict, which is a text."""
        if not isinstance(value, str):
            raise ValueError(f"a key that is no text at byte {self.at}")
        return value

    def call(self, name: str, args: tuple[Any, ...]) -> Any:
        """Return what a call of a name would make, if numpy, a tuple or an empty dict is asked for."""
        if name in RECONSTRUCT:
            return Array()
        if name == "numpy dtype" and args:
            return Kind(word(args[0]))
        if name == "_codecs encode" and len(args) == 2 and args[1] == "latin1":  # bytes under protocol 2
            return self._encoded(args[0])
        if name in ("builtins tuple", "__builtin__ tuple") and len(args) == 1 and isinstance(args[0], (tuple, list)):
            return tuple(args[0])
        if name == "collections OrderedDict" and not args:
            return {}
        raise ValueError(f"it asks for a call of {name!r}, which is none that arrays need; nothing of it was run")

    def _encoded(self, text: object) -> memoryview:
        """Return the bytes of a text; all of them together are no more than the file."""
        if not isinstance(text, str):
            raise ValueError(f"the bytes of a {type(text).__name__} at byte {self.at}, expected those of a text")
        self._copied += len(text)
        if self._copied > len(self.data):
            raise ValueError(f"the same text again and again at byte {self.at}")
        return memoryview(bytearray(text.encode("latin1")))

    def complete(self, target: Any, state: Any) -> None:
        """Give a dtype or an array its state."""
        if not isinstance(state, tuple):
            raise ValueError(f"a state that is no tuple at byte {self.at}")
        if isinstance(target, Kind) and len(state) > 1:
            target.order = word(state[1])
        elif isinstance(target, Array) and len(state) == 5:
            target.tensor = _array(*state[1:])
        else:
            raise ValueError(f"a state of a {type(target).__name__} at byte {self.at}, expected one of an array")


def _array(shape: object, kind: object, fortran: object, data: object) -> Tensor:
    """Return the tensor of an array's state: a view of the file."""
    if not isinstance(kind, Kind) or not isinstance(data, memoryview):
        raise ValueError(f"an array of a {type(kind).__name__} and a {type(data).__name__}, expected type and bytes")
    dtype, shape = DTYPES.get(kind.code), sizes_of(shape)
    if dtype is None or kind.order not in "<|=":
        raise ValueError(f"an array of type {kind.order}{kind.code}, expected one of {', '.join(DTYPES)}")
    if prod(shape) * dtype.itemsize != len(data):
        raise ValueError(f"an array of shape {shape} and {len(data)} bytes, which do not fit together")
    if not len(data):
        return torch.empty(shape, dtype=dtype)
    flat = torch.frombuffer(data, dtype=dtype)
    return flat.view(shape[::-1]).permute(*range(len(shape))[::-1]) if fortran else flat.view(shape)
