"""`SharedError`: an error of one rank, as it is told to the others so that all of them raise the same one.

What the user got wrong is a ValueError on every rank. What went wrong (a time limit, a full disk) keeps its class, so
that a program, and the exit code of the command, can tell both apart.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass

import torch
import torch.distributed as dist

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
