"""Reads PaddlePaddle's `.pdparams` files without Paddle, mapped into memory.

`paddle.save` pickles a dict of numpy arrays (protocol 2 to 4). Python's disassembler lists the opcodes of the file,
and the few that arrays need are followed here: what the file asks to be called is written down and compared with what
an array is, and bytes of arrays are views of the file. Two facts of the format: bfloat16 numbers are stored as uint16,
and the weights of linear layers are (in, out), which is transposed from torch's.
"""

from __future__ import annotations

import mmap
import pickletools
import re
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

TYPES = r"[fiu][1248]|b1"  # numpy's codes of the element types of weights, without the byte order
NAMES = "StructuredToParameterName@@"  # the key of a table of Paddle's own parameter names
SPLIT = "UnpackBigParamInfor@@"  # the key of a table of arrays that were cut in pieces of 1 GiB
RECONSTRUCT = ("numpy.core.multiarray _reconstruct", "numpy._core.multiarray _reconstruct")
# opcodes that push a value: that of their argument, or this one
PUSHED = ("BININT", "BININT1", "BININT2", "LONG1", "GLOBAL", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8")
PUSHED += ("BINBYTES", "SHORT_BINBYTES", "BINBYTES8")
CONSTANTS = dict.fromkeys((*PUSHED, "NONE")) | {"EMPTY_TUPLE": (), "NEWTRUE": True, "NEWFALSE": False}
# opcode -> how many values it takes off the stack; others take those since the last mark
TAKEN = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3, "SETITEM": 2, "STACK_GLOBAL": 2, "REDUCE": 2, "BUILD": 1}
MOST_OPCODES = 1 << 20  # of a file: an array takes about 35
LARGE = 1 << 10  # bytes; longer pieces of the file are views


@dataclass
class Pickled:
    """A call that a file asks for, which nothing makes: name ("module name"), arguments, and the result's state."""

    name: object
    arguments: Any
    state: Any = None


class Views:
    """The bytes of a mapped file, as the disassembler reads them; large pieces are not copied."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self.readline, self.tell = data, data.readline, data.tell

    def read(self, count: int) -> bytes | memoryview:
        """Return the next bytes; fewer at the end of the file."""
        if count < LARGE:
            return self._data.read(count)
        start = self._data.tell()
        self._data.seek(min(start + count, len(self._data)))
        return memoryview(self._data)[start : start + count]


def _value(data: mmap.mmap) -> Any:
    """Return the value of a pickle whose names are texts, "module name", which are compared with those of arrays."""
    stack, marks, memo = list[Any](), list[int](), dict[Any, Any]()
    for opcode, argument, _ in islice(pickletools.genops(Views(data)), MOST_OPCODES):  # pyright: ignore
        name = opcode.name
        if name == "STOP":
            return stack.pop()
        if name == "MARK":
            marks.append(len(stack))
        elif name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            memo[len(memo) if argument is None else argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name in CONSTANTS:
            stack.append(CONSTANTS[name] if argument is None else argument)
        elif name == "EMPTY_DICT":
            stack.append({})
        elif name not in ("PROTO", "FRAME"):
            start = len(stack) - TAKEN[name] if name in TAKEN else marks.pop()
            values = stack[start:]
            del stack[start:]
            _join(name, stack, values)
    raise ValueError(f"it has more than {MOST_OPCODES} opcodes")


def _join(name: str, stack: list[Any], values: list[Any]) -> None:
    """Follow an opcode that makes one value of the last ones of the stack, or puts them into the value below."""
    if name.startswith("TUPLE"):
        stack.append(tuple(values))
    elif name.startswith("SETITEM"):
        stack[-1].update(zip(map(_text, values[::2]), values[1::2], strict=True))
    elif name == "STACK_GLOBAL":
        stack.append(" ".join(map(_text, values)))
    elif name == "REDUCE":
        stack.append(_called(*values))
    elif name == "BUILD":
        stack[-1].state = values[0]
    else:
        raise ValueError(f"its opcode {name} is none that arrays need")


def _called(name: object, arguments: Any) -> Any:
    """Return the tuple, the bytes or the empty dict that a call makes, and any other call as it is."""
    match name, arguments:
        case "builtins tuple" | "__builtin__ tuple", (tuple(values),):
            return values
        case "_codecs encode", (str(text), "latin1"):  # bytes under protocol 2
            return text.encode("latin1")
        case "collections OrderedDict", ():
            return {}
    return Pickled(name, arguments)


def read_state(path: Path) -> dict[str, Tensor]:
    """Return (key -> tensor) in torch's layout, mapped from the file; `ValueError` if it is no such file."""
    try:
        with open(path, "rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # writable, as torch wants it; never written
        state = _value(data)
        if not isinstance(state, dict) or SPLIT in state:
            raise ValueError("it holds no dict of whole arrays; save it by a newer Paddle")
        arrays = {key: _array(key, value) for key, value in state.items() if key != NAMES}
        if sum(array.nbytes for array in arrays.values()) > len(data):
            raise ValueError("its arrays have more bytes than it")
        own = {key: array if array.flags.writeable else array.copy() for key, array in arrays.items()}
        return {key: torch_layout(key, torch.from_numpy(array)) for key, array in own.items()}
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError, OSError) as error:
        raise ValueError(f"got checkpoint {path}, which is truncated or no dict of arrays: {error}") from error


def torch_layout(key: str, tensor: Tensor) -> Tensor:
    """Return a tensor of Paddle as torch has it: matrices are weights of linear layers, except embedding tables."""
    tensor = tensor.view(torch.bfloat16) if tensor.dtype == torch.uint16 else tensor
    linear = tensor.dim() == 2 and key.endswith(".weight") and "embedding" not in key.split(".")[-2]
    return tensor.T if linear else tensor


def _array(key: str, value: object) -> np.ndarray:
    """Return an array, or that of a pair (Paddle's name, array), as a view of its bytes (read-only if short)."""
    match value[1] if isinstance(value, tuple) and len(value) == 2 else value:
        case Pickled(name=str(name)) if name not in RECONSTRUCT:
            raise ValueError(f"it asks for {name!a:.200}, which arrays do not need; nothing of it was run")
        case Pickled(
            state=(_, tuple(shape), Pickled("numpy dtype", (str(code), *_), (_, str(order), *_)), fortran, data)
        ):
            pass
        case _:
            raise ValueError(f"it holds no array at {key!a:.100}")
    if not re.fullmatch(TYPES, code) or order not in ("<", "|", "="):
        raise ValueError(f"it has an array of type {order}{code:.20}, expected one of {TYPES}")
    return np.frombuffer(data, code).reshape(shape, order="F" if fortran else "C")


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"it has a {type(value).__name__} where a text is expected")
    return value
