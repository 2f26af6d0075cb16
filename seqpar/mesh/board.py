"""A board: small values of the ranks of one machine, exchanged through memory that all of them have mapped.

A step compares on the host what its ranks compute, while GPUs wait; gloo takes 0.3 ms and more for these bytes, a board
0.01 ms. A rank writes its record and reads those of the others until all belong to this exchange. Records have a
checksum, so that one that is read while it is written counts as missing. Two places of a rank suffice: it comes back
to a place when all others have read what was there.
"""

from __future__ import annotations

import os
import re
import secrets
import select
import time
import zlib
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from struct import Struct
from typing import IO
from weakref import finalize

from seqpar.mesh.errors import WHO
from seqpar.mesh.watch import LostRankError

MEMORY = "seqpar"  # name of shared memory
SIZE = Struct("<q")  # at the start of a value: how many bytes the ranks exchange
ROOM = 48  # bytes of a value after its size
RECORD = Struct(f"<q{SIZE.size + ROOM}sI")  # the number of the exchange, the value, and the checksum of both
PLACE = 128  # bytes from one record to the next: no two are in one line of a cache, or in two that are read together
YIELDS = 2000  # reads in a row, about 1 ms, before a rank pauses between them
PAUSE_S, LONGEST_S = 1e-4, 2e-3
LONGER = 1.02  # from one pause to the next: a rank that waits for seconds would take a tenth of a core


class Board:
    """The board of an axis. memory: of `nbytes_for` the ranks. pids: of the processes of all ranks."""

    def __init__(self, rank: int, memory: memoryview, pids: Sequence[int]) -> None:
        self._rank, self._size, self._memory, self._count = rank, len(pids), memory, 0
        self._exits, ends = select.poll(), ExitStack()
        for pid in pids:
            with suppress(OSError):  # without it, a missing heartbeat shows that a rank has exited
                self._exits.register(descriptor := os.pidfd_open(pid), select.POLLIN)
                ends.callback(os.close, descriptor)
        finalize(self, ends.close)

    def post(self, value: bytes) -> Posting:
        """Write this rank's value: its size (`SIZE`), and at most `ROOM` bytes."""
        self._count += 1
        value = value.ljust(SIZE.size + ROOM, b"\0")
        check = zlib.crc32(value, self._count & 0xFFFFFFFF)
        RECORD.pack_into(self._memory, self._at(self._rank), self._count, value, check)
        return Posting(self)

    def read(self, rank: int) -> bytes | None:
        """Return a rank's value of this exchange, or None if it is not there yet."""
        count, value = self._record(rank)
        return value if count == self._count else None

    def passed(self) -> bool:
        """Return whether a rank gave up earlier exchanges, and has written over the record of this one."""
        return any(self._record(rank)[0] > self._count for rank in self.ranks)

    def _record(self, rank: int) -> tuple[int, bytes]:
        # the number of an exchange and the value; 0 for a record that is being written
        count, value, check = RECORD.unpack_from(self._memory, self._at(rank))
        return (count, value) if zlib.crc32(value, count & 0xFFFFFFFF) == check else (0, value)

    def exited(self) -> bool:
        """Return whether the process of a rank has exited."""
        return bool(self._exits.poll(0))

    @property
    def ranks(self) -> range:
        return range(self._size)

    def _at(self, rank: int) -> int:
        return (self._count % 2 * self._size + rank) * PLACE


class Posting:
    """An exchange that this rank has begun. values: of all ranks, when it is complete. `Watch.host` waits for it."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self.values = list[bytes]()

    def is_completed(self) -> bool:
        """Return whether all values were read, or none will come any more."""
        return self._all_read() or self._board.exited()

    def wait(self, timeout: timedelta | None = None) -> None:
        """Wait for all values; RuntimeError at the end of the timeout, or if another rank has exited."""
        until, reads, pause = time.monotonic() + (timeout or timedelta()).total_seconds(), 0, PAUSE_S
        while not self._all_read():
            reads += 1
            if reads < YIELDS:
                os.sched_yield()
                continue
            if self._board.exited() and not self._all_read():
                raise RuntimeError("connection closed: the process of another rank has exited")
            if self._board.passed():
                raise RuntimeError("another rank gave up this exchange and a later one")
            if time.monotonic() > until:
                raise RuntimeError("timed out")
            time.sleep(pause)
            pause = min(LONGER * pause, LONGEST_S)

    def _all_read(self) -> bool:
        while len(self.values) < len(self._board.ranks):
            if (value := self._board.read(len(self.values))) is None:
                return False
            self.values.append(value)
        return True


def nbytes_for(ranks: int) -> int:
    return 2 * ranks * PLACE


def anonymous() -> IO[bytes]:
    """Return a file in memory without a name in any folder: a rank that is killed leaves nothing behind."""
    return os.fdopen(os.memfd_create(f"{MEMORY}-{secrets.token_hex(8)}"), "w+b")


def name_of(file: IO[bytes]) -> str:
    """Return the name by which other ranks open a file of `anonymous`, with a random part of that file alone."""
    path = f"{os.getpid()}/fd/{file.fileno()}"
    return f"{path}/{os.readlink(f'/proc/{path}').partition('-')[2][:16]}"


def path_of(name: str) -> str:
    """Return the path of a rank's shared memory by the name that it sent; raises LostRankError for any other file.

    This rank writes to the file. Another process in the place of a rank could send any path of this user; and in
    another container the same process number is another rank's, perhaps of another job.
    """
    if (parts := re.fullmatch(r"(\d{1,9})(/fd/\d{1,9})/([0-9a-f]{16})", name)) is not None:
        process, descriptor, token = parts.groups()
        path = f"/proc/{process}{descriptor}"
        with suppress(OSError):
            is_own = os.stat(f"/proc/{process}").st_uid == os.geteuid()
            if is_own and os.readlink(path).startswith(f"/memfd:{MEMORY}-{token} "):
                return path
    raise LostRankError(f"{name[:60]!r} is not shared memory of a rank of this user; {WHO}")
