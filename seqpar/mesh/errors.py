"""Messages of small values between ranks, and `SharedError`: one rank's exception, re-raised on all ranks.

User errors become ValueError on every rank. Timeouts and system errors (a full disk) keep their class, so that programs
and the exit code of the command can distinguish them.
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

HEAD = 8  # bytes of a message's length
SMALL = 16376  # messages up to this many bytes are sent with their length; 16 kB cost the same as one byte
LONGEST = 1 << 26  # bytes; longer messages are rejected before allocation
VALUE, MISTAKE = b"v", b"m"  # the first byte of a message: a value follows, or the reason why there is none
WHO = "another process took the place of a rank (docs/reliability.md), or ranks run different versions"


def encode(value: object, kind: Any) -> bytes:
    """Return the message for a value; the reason instead if the value is not of the kind, which raises on all ranks.

    kind: a type that msgspec supports (https://jcristharif.com/msgspec/supported-types.html), or torch.dtype.
    """
    decoder = _decoder(kind)
    try:
        message = VALUE + msgspec.msgpack.encode(value, enc_hook=_plain)
        decoder.decode(message[1:])
    except (TypeError, ValueError, OverflowError) as error:
        return MISTAKE + f"cannot share a value as {_name(kind)}: {error}".encode()
    if len(message) > LONGEST:
        return MISTAKE + f"cannot share {len(message)} bytes (maximum {LONGEST})".encode()
    return message


def decode(message: bytes, kind: Any, sender: int, what: str) -> Any:
    """Return the value of a message; raises LostRankError if it is malformed, and the ValueError of its sender."""
    try:
        if message[:1] == VALUE:
            return _decoder(kind).decode(message[1:])
        if message[:1] != MISTAKE:
            raise ValueError("unknown first byte")
        mistake = message[1:].decode()
    except (ValueError, RecursionError) as error:  # the latter for deep nesting in a field that the type does not have
        raise _malformed(sender, what, f"not a {_name(kind)} ({error})") from error
    raise ValueError(mistake)


def padded(message: bytes, size: int) -> torch.Tensor:
    """Return the message's length and its first `size` bytes, zero-padded: a tensor of `HEAD` + `size` bytes."""
    text = len(message).to_bytes(HEAD, "little") + message[:size].ljust(size, b"\0")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def length(padded_message: torch.Tensor, sender: int, what: str) -> int:
    """Return the length of the message; raises LostRankError above `LONGEST`, before anything is allocated."""
    stated = int.from_bytes(_bytes(padded_message[:HEAD]), "little")
    if stated > LONGEST:
        raise _malformed(sender, what, f"{stated} bytes, maximum {LONGEST}")
    return stated


def decode_all(padded_messages: Sequence[torch.Tensor] | torch.Tensor, kind: Any, what: str) -> list[Any]:
    texts = [_bytes(x[HEAD : HEAD + length(x, rank, what)]) for rank, x in enumerate(padded_messages)]
    return [decode(text, kind, rank, what) for rank, text in enumerate(texts)]


def _malformed(sender: int, what: str, reason: str) -> LostRankError:
    return LostRankError(f"malformed message from rank {sender} ({what}): {reason}; {WHO}")


def _bytes(x: torch.Tensor) -> bytes:
    return x.cpu().numpy().tobytes()


@cache
def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind, strict=True, dec_hook=_to_dtype)


def _plain(value: object) -> object:
    """Encode values that MessagePack does not know: a dtype by its name, numpy's numbers as Python's."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    raise TypeError(f"{type(value).__name__} is not supported")


def _to_dtype(kind: type, value: object) -> object:
    dtype = getattr(torch, value, None) if isinstance(value, str) else None
    if kind is not torch.dtype or not isinstance(dtype, torch.dtype):
        raise ValueError(f"{value!r} is not a {_name(kind)}")
    return dtype


def _name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind)


# system errors that are not a wrong path: no space, quota, file limit, broken disk, no memory, no free handles
SYSTEM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN)
LOST = (ConnectionError, dist.DistError)  # another process has exited or cannot be reached
NO_HOST_MEMORY = "DefaultCPUAllocator: "  # torch has no error class for it


def is_failure(error: BaseException) -> bool:
    """Return whether an error is neither a user error nor a bug: timeouts, memory, disk, lost ranks, NaN."""
    system = isinstance(error, OSError) and error.errno in SYSTEM
    memory = isinstance(error, RuntimeError) and NO_HOST_MEMORY in str(error)
    kinds = (TimeoutError, torch.OutOfMemoryError, MemoryError, FloatingPointError, *LOST)
    return isinstance(error, kinds) or system or memory


@dataclass(frozen=True)
class SharedError:
    """An exception as ranks share it. number: its `errno` if it is in `SYSTEM`; late: it is a TimeoutError."""

    text: str
    number: int | None = None
    late: bool = False

    @staticmethod
    def of(error: ValueError | OSError) -> SharedError:
        number = error.errno if isinstance(error, OSError) and error.errno in SYSTEM else None
        text = str(error).encode(errors="backslashreplace").decode()  # file names may be invalid UTF-8
        return SharedError(text, number, isinstance(error, TimeoutError))

    def error(self, text: str | None = None) -> ValueError | OSError:
        text = self.text if text is None else text
        if self.late:
            return TimeoutError(text)
        if self.number is None:
            return ValueError(text)
        error = OSError(text)
        error.errno = self.number  # as an argument it would be printed before the text
        return error
