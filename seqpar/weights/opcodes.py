"""Reads pickles without running them: a stack machine for the few opcodes that files of weights need.

A pickle is a program. Python's own unpickler runs what it names, and a restricted one can still be made to hang: tuples
of tuples take exponential time to hash, numbers can be chosen so that all of them collide in a dict. This reader calls
nothing, never hashes or prints what is nested, and has bounds on opcodes, items and texts. So it ends after a few
seconds and about a hundred megabytes, whatever a file says. When it wins: for every file that others wrote.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

MOST_OPCODES = 1 << 20  # of a file: a tensor takes about 35
MOST_ITEMS = 1 << 19  # of the stack and the memo: far more than any state dict has
MOST_DIMS = 64  # of a tensor; numpy has no more
MOST_LETTERS = 256  # of a name in a module
# what reading an altered file raises; errors of this reader itself are ValueError
FAILURES = (ValueError, TypeError, IndexError, OverflowError, MemoryError, OSError, struct.error)


@dataclass(frozen=True)
class Name:
    """The name of something in a module, which is never imported."""

    text: str

    @property
    def dotted(self) -> str:
        """Return the name as Python writes it."""
        return self.text.replace(" ", ".")


class Mark:
    """The opcode MARK on the stack."""


MARK = Mark()


class Reader:
    """One pickle on its way to Python values: a stack, a memo and a position in the data.

    A format is a subclass, which says what a call of a name makes, how values are completed, and which keys dicts have.
    Errors are those of `FAILURES`.
    """

    NEED = "weights"  # what the format holds, for messages
    MOST_TEXT = 1 << 24  # letters of all texts
    MORE: ClassVar[Mapping[int, Callable[[Any], object]]] = {}  # opcodes of the format alone

    def __init__(self, data: mmap.mmap | bytes) -> None:
        self.data, self.at = data, 0
        self._opcodes, self._letters = OPCODES | {**self.MORE}, 0
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._left = MOST_OPCODES

    def call(self, name: str, args: tuple[Any, ...]) -> Any:
        """Return what a call of a name ("module name") makes; ValueError if it is not allowed."""
        raise NotImplementedError

    def complete(self, target: Any, state: Any) -> None:
        """Give a value that a call has made its state."""
        raise NotImplementedError

    def key(self, value: object) -> Any:
        """Return the key of a dict for a value, which must not be hashed if it is a tuple."""
        raise NotImplementedError

    def read(self) -> Any:
        """Return the next pickled value."""
        self._stack, self._memo = [], {}
        while (code := self.take(1)[0]) != ord("."):
            act, self._left = self._opcodes.get(code), self._left - 1
            if act is None:
                raise ValueError(f"opcode {code} at byte {self.at - 1} is none that {self.NEED} need")
            act(self)
            if self._left < 0 or len(self._stack) + len(self._memo) > MOST_ITEMS:
                most = f"{MOST_ITEMS} items or {MOST_OPCODES} opcodes"
                raise ValueError(f"more than {most} at byte {self.at}")
        return self.pop()[0]

    def number(self, form: str) -> int:
        """Return the little-endian number that follows."""
        return struct.unpack("<" + form, self.take(struct.calcsize("<" + form)))[0]

    def text(self, form: str, encoding: str = "utf-8") -> None:
        """Push a text whose length follows in this form."""
        length = self.number(form)
        self._letters += length
        if self._letters > self.MOST_TEXT:
            raise ValueError(f"more than {self.MOST_TEXT} letters of text at byte {self.at}")
        self.push(self.take(length).decode(encoding))

    def span(self, form: str) -> None:
        """Push bytes whose length follows in this form, as a view of the data."""
        length = self.number(form)
        start = self.at
        self.skip(length)
        self.push(memoryview(self.data)[start : self.at])

    def lines(self) -> None:
        """Push a name that follows as two lines."""
        found = []
        for _ in range(2):
            end = self.data.find(b"\n", self.at, self.at + MOST_LETTERS + 1)
            if end < 0:
                raise ValueError(f"no name of at most {MOST_LETTERS} letters at byte {self.at}")
            found.append(self.take(end - self.at).decode("utf-8"))
            self.skip(1)
        self.push(Name(" ".join(found)))

    def push(self, value: Any) -> None:
        """Put a value on the stack."""
        self._stack.append(value)

    def pop(self, count: int = 1) -> list[Any]:
        """Take the last values off the stack, in their order."""
        if len(self._stack) < count:
            raise ValueError(f"a value is missing at byte {self.at}")
        taken = self._stack[len(self._stack) - count :]
        del self._stack[len(self._stack) - count :]
        return taken

    def top(self) -> Any:
        """Return the last value of the stack."""
        if not self._stack:
            raise ValueError(f"a value is missing at byte {self.at}")
        return self._stack[-1]

    def since_mark(self) -> list[Any]:
        """Take the values since the last mark off the stack, and the mark."""
        for index in range(len(self._stack) - 1, -1, -1):
            if self._stack[index] is MARK:
                taken = self._stack[index + 1 :]
                del self._stack[index:]
                return taken
        raise ValueError(f"a mark is missing at byte {self.at}")

    def items(self, values: list[Any]) -> None:
        """Put keys and values, in turn, into the dict on top of the stack."""
        target = self.top()
        if not isinstance(target, dict) or len(values) % 2:
            raise ValueError(f"items without a dict at byte {self.at}")
        target.update(zip(map(self.key, values[::2]), values[1::2], strict=True))

    def append(self, values: list[Any]) -> None:
        """Put values at the end of the list on top of the stack."""
        target = self.top()
        if not isinstance(target, list):
            raise ValueError(f"items without a list at byte {self.at}")
        target.extend(values)

    def put(self, slot: int) -> None:
        """Remember the value on top of the stack."""
        self._memo[slot] = self.top()

    def get(self, slot: int) -> None:
        """Push a remembered value."""
        if slot not in self._memo:
            raise ValueError(f"a value that was never remembered at byte {self.at}")
        self.push(self._memo[slot])

    def memoize(self) -> None:
        """Remember the value on top of the stack under the next number."""
        self.put(len(self._memo))

    def reduce(self) -> None:
        """Push what a call of a name makes."""
        name, args = self.pop(2)
        if not isinstance(args, tuple):
            raise ValueError(f"arguments that are no tuple at byte {self.at}")
        self.push(self.call(name.text if isinstance(name, Name) else type(name).__name__, args))

    def build(self) -> None:
        """Complete the value on top of the stack by its state."""
        (state,) = self.pop()
        self.complete(self.top(), state)

    def take(self, count: int) -> bytes:
        """Return the next bytes."""
        start = self.at
        self.skip(count)
        return self.data[start : self.at]

    def skip(self, count: int) -> None:
        """Pass over bytes."""
        if count < 0 or self.at + count > len(self.data):
            raise IndexError(f"it ends at byte {len(self.data)} inside a value")
        self.at += count


def word(value: object) -> str:
    """Return a short text; the text of anything else could be far larger than the file."""
    if not isinstance(value, str) or len(value) > MOST_LETTERS:
        raise ValueError(f"a {type(value).__name__} where a name of at most {MOST_LETTERS} letters is expected")
    return value


def shown(key: object) -> str:
    """Return the name of a tensor for a message, as it is if it is a short printable text."""
    return key if isinstance(key, str) and key.isprintable() and 0 < len(key) <= 100 else ascii(key)[:100]


def sizes_of(shape: object) -> tuple[int, ...]:
    """Return a shape of which torch can make an empty tensor; ValueError for anything else."""
    whole = isinstance(shape, (tuple, list)) and all(type(size) is int and 0 <= size < 1 << 48 for size in shape)
    if not isinstance(shape, (tuple, list)) or not whole or len(shape) > MOST_DIMS:
        raise ValueError(f"an array whose shape is no tuple of at most {MOST_DIMS} numbers")
    if prod(max(size, 1) for size in shape) >= 1 << 48:
        raise ValueError(f"an array of shape {tuple(shape)}, which is larger than any file")
    return tuple(shape)


Act = Callable[[Any], object]


def _acts(acts: Mapping[str, Act]) -> dict[int, Act]:
    return {ord(code): act for code, act in acts.items()}


# pickle's opcodes; the others make objects, and none of them is needed
OPCODES: dict[int, Act] = _acts(
    {
        "\x80": lambda r: r.number("B"),  # the protocol
        "\x95": lambda r: r.number("Q"),  # a frame: its bytes follow all the same
        "(": lambda r: r.push(MARK),
        "}": lambda r: r.push({}),
        ")": lambda r: r.push(()),
        "]": lambda r: r.push([]),
        "N": lambda r: r.push(None),
        "\x88": lambda r: r.push(True),
        "\x89": lambda r: r.push(False),
        "K": lambda r: r.push(r.number("B")),
        "M": lambda r: r.push(r.number("H")),
        "J": lambda r: r.push(r.number("i")),
        "\x8a": lambda r: r.push(int.from_bytes(r.take(r.number("B")), "little", signed=True)),
        "G": lambda r: r.push(struct.unpack(">d", r.take(8))[0]),
        "\x8c": lambda r: r.text("B"),
        "X": lambda r: r.text("I"),
        "\x8d": lambda r: r.text("Q"),
        "C": lambda r: r.span("B"),
        "B": lambda r: r.span("I"),
        "\x8e": lambda r: r.span("Q"),
        "c": lambda r: r.lines(),
        "\x93": lambda r: r.push(Name(" ".join(map(word, r.pop(2))))),
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
    }
)
# of lists and objects, for the formats that have them
OBJECTS: dict[int, Act] = _acts(
    {
        "a": lambda r: r.append(r.pop()),
        "e": lambda r: r.append(r.since_mark()),
        "\x8f": lambda r: r.push([]),  # a set, read as a list
        "\x90": lambda r: r.append(r.since_mark()),
        "\x81": lambda r: r.reduce(),  # an object of a class, without its __init__: read like a call
        "U": lambda r: r.text("B", "latin1"),  # a text of Python 2
        "Q": lambda r: r.push(r.stored(r.pop()[0])),
    }
)
