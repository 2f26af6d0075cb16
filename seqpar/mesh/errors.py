"""`SharedError`: an error of one rank, as it is told to the others so that all of them raise the same one.

What the user got wrong is a ValueError on every rank. What went wrong (a time limit, a full disk) keeps its class, so
that a program, and the exit code of the command, can tell both apart.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from numbers import Integral, Real
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from seqpar.mesh.watch import LostRankError

HEAD = 8  # bytes that hold a letter's length
SMALL = 16376  # bytes of a letter that travels in the same exchange as its length
LONGEST = 1 << 26  # bytes; no rank makes room for a longer letter, whatever its head says
VALUE, MISTAKE = b"v", b"m"  # the first byte of a letter: what follows is the value, or why there is none
WHO = "another process took the place of a rank (docs/reliability.md), or ranks run different versions"


def written(value: object, kind: Any) -> bytes:
    """Return a letter with a value; one with the reason if the value is not of the kind, which ends all ranks alike.

    kind: a type that msgspec knows (https://jcristharif.com/msgspec/supported-types.html), or torch.dtype.
    """
    decoder = _decoder(kind)
    try:
        letter = VALUE + msgspec.msgpack.encode(value, enc_hook=_plain)
        decoder.decode(letter[1:])
    except (TypeError, ValueError, OverflowError) as error:
        return MISTAKE + f"got a value to share that is no {_name(kind)}: {error}".encode()
    if len(letter) > LONGEST:
        return MISTAKE + f"got {len(letter)} bytes to share, expected at most {LONGEST}; give fewer or shorter".encode()
    return letter


def read(letter: bytes, kind: Any, sender: int, what: str) -> Any:
    """Return the value of a letter. Raises LostRankError if it is none, and the ValueError that its sender wrote.

    sender: a rank. what: is being exchanged, for the message.
    """
    try:
        if letter[:1] == VALUE:
            return _decoder(kind).decode(letter[1:])
        if letter[:1] != MISTAKE:
            raise ValueError("unknown first byte")
        mistake = letter[1:].decode()
    except (ValueError, RecursionError) as error:  # the latter by deep nesting in a field that the type has not
        raise _strange(sender, what, f"no {_name(kind)} ({error})") from error
    raise ValueError(mistake)


def sealed(letter: bytes, room: int) -> torch.Tensor:
    """Return a letter's length and as much of it as there is room for, with zeros behind it, as a tensor of bytes.

    Tensors of one size travel in one exchange, which costs the same for one byte as for 16 kB.
    """
    text = len(letter).to_bytes(HEAD, "little") + letter[:room].ljust(room, b"\0")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def length(sealed_letter: torch.Tensor, sender: int, what: str) -> int:
    """Return the length that a sealed letter states; LostRankError if it is longer than any letter."""
    stated = int.from_bytes(_bytes(sealed_letter[:HEAD]), "little")
    if stated > LONGEST:
        raise _strange(sender, what, f"{stated} bytes, more than {LONGEST}")
    return stated


def opened(sealed_letters: Sequence[torch.Tensor] | torch.Tensor, kind: Any, what: str) -> list[Any]:
    """Return the values of the sealed letters of all ranks, from rank 0 on; see `read`."""
    texts = [_bytes(each[HEAD : HEAD + length(each, rank, what)]) for rank, each in enumerate(sealed_letters)]
    return [read(text, kind, rank, what) for rank, text in enumerate(texts)]


def _strange(sender: int, what: str, got: str) -> LostRankError:
    return LostRankError(f"got a letter of rank {sender} ({what}) that is {got}, expected one of its own; {WHO}")


def _bytes(x: torch.Tensor) -> bytes:
    return x.cpu().numpy().tobytes()


@cache
def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind, strict=True, dec_hook=_special)


def _plain(value: object) -> object:
    """Return what stands for a value that MessagePack does not know: a dtype by its name, numbers of numpy."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    raise TypeError(f"{type(value).__name__} is no kind of value that ranks share")


def _special(kind: type, value: object) -> object:
    """Return the value of a kind that MessagePack does not know."""
    dtype = getattr(torch, value, None) if isinstance(value, str) else None
    if kind is not torch.dtype or not isinstance(dtype, torch.dtype):
        raise ValueError(f"{value!r} is no {_name(kind)}")
    return dtype


def _name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind)


# errors of the system that are no mistake in a path: no space, no quota, a file limit, a broken disk, no memory, no
# free handles
SYSTEM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN)
LOST = (ConnectionError, dist.DistError)  # another process has left, or cannot be reached
NO_HOST_MEMORY = "DefaultCPUAllocator: "  # torch has no error class for it


def is_failure(error: BaseException) -> bool:
    """Return whether an error is neither the user's mistake nor a bug: time, memory, disk, lost ranks, NaN."""
    system = isinstance(error, OSError) and error.errno in SYSTEM
    memory = isinstance(error, RuntimeError) and NO_HOST_MEMORY in str(error)
    kinds = (TimeoutError, torch.OutOfMemoryError, MemoryError, FloatingPointError, *LOST)
    return isinstance(error, kinds) or system or memory


@dataclass(frozen=True)
class SharedError:
    """An error's text; number: its `errno` if it is one of `SYSTEM`; late: whether it is a TimeoutError."""

    text: str
    number: int | None = None
    late: bool = False

    @staticmethod
    def of(error: ValueError | OSError) -> SharedError:
        """Return what the other ranks must know of an error."""
        number = error.errno if isinstance(error, OSError) and error.errno in SYSTEM else None
        text = str(error).encode(errors="backslashreplace").decode()  # names of files may be no text
        return SharedError(text, number, isinstance(error, TimeoutError))

    def error(self, text: str | None = None) -> ValueError | OSError:
        """Return the error to raise, with another text if one is given."""
        text = self.text if text is None else text
        if self.late:
            return TimeoutError(text)
        if self.number is None:
            return ValueError(text)
        error = OSError(text)
        error.errno = self.number  # not as an argument, which would come before the text once more
        return error
