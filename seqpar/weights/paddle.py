"""Reads PaddlePaddle's `.pdparams` files without Paddle, mapped into memory.

`paddle.save` pickles a dict of numpy arrays (protocol 2 to 4). This file reads the few opcodes of such a pickle by
itself and calls nothing that the pickle names: names are compared with those that numpy writes, and bytes become views
of the file. Two facts of the format: bfloat16 numbers are stored as uint16, and the weights of linear layers are
(in, out), which is transposed from torch's.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from seqpar.weights.pickles import FAILURES

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
MOST_ITEMS = 1 << 20  # of the stack and the memo: far more than any state dict has
MOST_LETTERS = 256  # of a name in a module
MOST_DIMS = 64  # of an array; numpy has no more


@dataclass
class Kind:
    """A numpy dtype that is being read: its code, and its byte order, which comes after it."""

    code: str
    order: str = "<"


@dataclass
class Array:
    """A numpy array that is being read: its tensor comes after it."""

    tensor: Tensor | None = None


@dataclass(frozen=True)
class Name:
    """The name of something in a module, which is never imported."""

    text: str


class Mark:
    """The opcode MARK on the stack."""


def read_state(path: Path) -> dict[str, Tensor]:
    """Return (key -> tensor) in torch's layout, mapped from the file; `ValueError` if it is no such file."""
    try:
        with open(path, "rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # writable, as torch wants it; never written
        found = Reader(data).read()
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


class Reader:
    """One pickle on its way to Python values: a stack, a memo and a position in the file."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._at = data, 0
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._copied = 0  # bytes

    def read(self) -> Any:
        """Return the pickled value."""
        while (code := self._take(1)[0]) != ord("."):
            if code not in OPCODES:
                raise ValueError(f"opcode {code} at byte {self._at - 1} is none that arrays need")
            OPCODES[code](self)
            if len(self._stack) + len(self._memo) > MOST_ITEMS:
                raise ValueError(f"more than {MOST_ITEMS} items at byte {self._at}")
        return self._stack.pop()

    def number(self, form: str) -> int:
        """Return the little-endian number that follows."""
        return struct.unpack("<" + form, self._take(struct.calcsize("<" + form)))[0]

    def text(self, form: str) -> None:
        """Push a text whose length follows in this form."""
        self.push(self._take(self.number(form)).decode("utf-8"))

    def span(self, form: str) -> None:
        """Push bytes whose length follows in this form, as a view of the file."""
        length = self.number(form)
        self.push(memoryview(self._data)[self._at : self._at + length])
        self._skip(length)

    def lines(self) -> None:
        """Push a name that follows as two lines."""
        found = []
        for _ in range(2):
            end = self._data.find(b"\n", self._at)
            found.append(self._take(end - self._at).decode("utf-8"))
            self._skip(1)
        self.push(Name(" ".join(found)))

    def push(self, value: Any) -> None:
        """Put a value on the stack."""
        self._stack.append(value)

    def pop(self, count: int = 1) -> list[Any]:
        """Take the last values off the stack, in their order."""
        if len(self._stack) < count:
            raise ValueError(f"a value is missing at byte {self._at}")
        taken = self._stack[len(self._stack) - count :]
        del self._stack[len(self._stack) - count :]
        return taken

    def since_mark(self) -> list[Any]:
        """Take the values since the last mark off the stack, and the mark."""
        for index in range(len(self._stack) - 1, -1, -1):
            if isinstance(self._stack[index], Mark):
                taken = self._stack[index + 1 :]
                del self._stack[index:]
                return taken
        raise ValueError(f"a mark is missing at byte {self._at}")

    def items(self, values: list[Any]) -> None:
        """Put keys and values, in turn, into the dict on top of the stack."""
        target = self._stack[-1]
        if not isinstance(target, dict) or len(values) % 2:
            raise ValueError(f"items without a dict at byte {self._at}")
        if not all(isinstance(key, str) for key in values[::2]):  # hashing nested tuples could take forever
            raise ValueError(f"a key that is no text at byte {self._at}")
        target.update(zip(values[::2], values[1::2], strict=True))

    def put(self, slot: int) -> None:
        """Remember the value on top of the stack."""
        self._memo[slot] = self._stack[-1]

    def get(self, slot: int) -> None:
        """Push a remembered value."""
        self.push(self._memo[slot])

    def memoize(self) -> None:
        """Remember the value on top of the stack under the next number."""
        self.put(len(self._memo))

    def reduce(self) -> None:
        """Push what a call of a name would make, if numpy, a tuple or an empty dict is asked for."""
        name, args = self.pop(2)
        if not isinstance(args, tuple):
            raise ValueError(f"arguments that are no tuple at byte {self._at}")
        text = name.text if isinstance(name, Name) else type(name).__name__
        if text in RECONSTRUCT:
            return self.push(Array())
        if text == "numpy dtype":
            return self.push(Kind(_word(args[0])))
        if text == "_codecs encode" and args[1] == "latin1":  # bytes under protocol 2
            return self.push(self._encoded(args[0]))
        if text in ("builtins tuple", "__builtin__ tuple") and isinstance(args[0], (tuple, list)):
            return self.push(tuple(args[0]))
        if text == "collections OrderedDict" and not args:
            return self.push({})
        raise ValueError(f"it asks for a call of {text!r}, which is none that arrays need; nothing of it was run")

    def _encoded(self, text: object) -> memoryview:
        """Return the bytes of a text; all of them together are no more than the file."""
        if not isinstance(text, str):
            raise ValueError(f"the bytes of a {type(text).__name__} at byte {self._at}, expected those of a text")
        self._copied += len(text)
        if self._copied > len(self._data):
            raise ValueError(f"the same text again and again at byte {self._at}")
        return memoryview(bytearray(text.encode("latin1")))

    def build(self) -> None:
        """Complete the dtype or array on top of the stack by its state."""
        (state,) = self.pop()
        target = self._stack[-1]
        if not isinstance(state, tuple):
            raise ValueError(f"a state that is no tuple at byte {self._at}")
        if isinstance(target, Kind):
            target.order = _word(state[1])
        elif isinstance(target, Array):
            target.tensor = _array(*state[1:])
        else:
            raise ValueError(f"a state of a {type(target).__name__} at byte {self._at}, expected one of an array")

    def _take(self, count: int) -> bytes:
        start = self._at
        self._skip(count)
        return self._data[start : self._at]

    def _skip(self, count: int) -> None:
        if count < 0 or self._at + count > len(self._data):
            raise IndexError(f"it ends at byte {len(self._data)} inside a value")
        self._at += count


def _word(value: object) -> str:
    """Return a short text; the text of anything else could be far larger than the file."""
    if not isinstance(value, str) or len(value) > MOST_LETTERS:
        raise ValueError(f"a {type(value).__name__} where a name of at most {MOST_LETTERS} letters is expected")
    return value


def _array(shape: tuple[int, ...], kind: Kind, fortran: bool, data: memoryview) -> Tensor:
    """Return the tensor of an array's state: a view of the file."""
    dtype = DTYPES.get(kind.code)
    if dtype is None or kind.order not in "<|=":
        raise ValueError(f"an array of type {kind.order}{kind.code}, expected one of {', '.join(DTYPES)}")
    if len(shape) > MOST_DIMS or not all(isinstance(size, int) and 0 <= size < 1 << 63 for size in shape):
        raise ValueError(f"an array whose shape is no tuple of at most {MOST_DIMS} numbers")
    if prod(shape) * dtype.itemsize != len(data):
        raise ValueError(f"an array of shape {shape} and {len(data)} bytes, which do not fit together")
    if not len(data):
        return torch.empty(shape, dtype=dtype)
    flat = torch.frombuffer(data, dtype=dtype)
    return flat.view(shape[::-1]).permute(*range(len(shape))[::-1]) if fortran else flat.view(shape)


Act = Callable[[Reader], object]
# pickle's opcodes; the others make objects, and none of them is needed
OPCODES: dict[int, Act] = {
    ord(code): act
    for code, act in {
        "\x80": lambda r: r.number("B"),  # the protocol
        "\x95": lambda r: r.number("Q"),  # a frame: its bytes follow all the same
        "(": lambda r: r.push(Mark()),
        "}": lambda r: r.push({}),
        ")": lambda r: r.push(()),
        "]": lambda r: r.push([]),
        "N": lambda r: r.push(None),
        "\x88": lambda r: r.push(True),
        "\x89": lambda r: r.push(False),
        "K": lambda r: r.push(r.number("B")),
        "M": lambda r: r.push(r.number("H")),
        "J": lambda r: r.push(r.number("i")),
        "\x8a": lambda r: r.push(int.from_bytes(r._take(r.number("B")), "little", signed=True)),
        "G": lambda r: r.push(struct.unpack(">d", r._take(8))[0]),
        "\x8c": lambda r: r.text("B"),
        "X": lambda r: r.text("I"),
        "\x8d": lambda r: r.text("Q"),
        "C": lambda r: r.span("B"),
        "B": lambda r: r.span("I"),
        "\x8e": lambda r: r.span("Q"),
        "c": lambda r: r.lines(),
        "\x93": lambda r: r.push(Name(" ".join(map(_word, r.pop(2))))),
        "t": lambda r: r.push(tuple(r.since_mark())),
        "\x85": lambda r: r.push(tuple(r.pop(1))),
        "\x86": lambda r: r.push(tuple(r.pop(2))),
        "\x87": lambda r: r.push(tuple(r.pop(3))),
        "s": lambda r: r.items(r.pop(2)),
        "u": lambda r: r.items(r.since_mark()),
        "q": lambda r: r.put(r.number("B")),
        "r": lambda r: r.put(r.number("I")),
        "\x94": lambda r: r.memoize(),
        "h": lambda r: r.get(r.number("B")),
        "j": lambda r: r.get(r.number("I")),
        "R": lambda r: r.reduce(),
        "b": lambda r: r.build(),
    }.items()
}
