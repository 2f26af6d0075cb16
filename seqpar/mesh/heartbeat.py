"""Signs of life: every rank tells the others twice a second that it lives and how far it has come.

A rank that waits for another cannot see why: the other one may be computing, stopped, or gone. So a thread of every
rank writes a number that grows, and counts of what the rank has begun, where no collective writes: to a file of its own
in the private folder of a job that `seqpar` has started, otherwise to the store of the process group. When it wins: a
message can name the late rank, and a rank that only is busy is not taken for dead.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path

import msgspec
from torch.distributed.distributed_c10d import Store

BEAT_S = 0.5
KEY = "seqpar/pulse/{}"


class SignFiles(Store):
    """A store of one small file a key, in a folder that only this user can reach; OSError if the folder is gone.

    A file is written over in place: a full disk does not silence a rank, whose file has its space already.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def set(self, key: str, value: str) -> None:
        """Write a value of one line, of a key that only this process writes."""
        file = os.open(self._path(key), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.pwrite(file, value.encode() + b"\n", 0)
        finally:
            os.close(file)

    def get(self, key: str) -> bytes:
        """Return a key's value, of which a part may be an older one's while it is written; OSError if it is gone."""
        return self._path(key).read_bytes().partition(b"\n")[0]

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys have values."""
        return all(self._path(key).exists() for key in keys)

    def _path(self, key: str) -> Path:
        return self._folder / f"{key.replace('/', '-')}.sign"


@dataclass(frozen=True)
class Sign:
    """The last sign of a rank. beat: grows while the rank lives; left: whether it has ended by itself.

    begun: the number of calls and exchanges that it has begun, by their names. seen_s: when this rank first read this
    beat, by the clock of `time.monotonic`.
    """

    beat: int
    left: bool
    begun: Mapping[str, int]
    seen_s: float = field(default=0.0, compare=False)

    def silent_s(self, since: float) -> float:
        """Return for how many seconds this rank has shown nothing, counted from `since` on at most."""
        return time.monotonic() - max(self.seen_s, since)


class Pulse:
    """Writes this rank's signs and reads those of others, in a thread that ends with the process.

    store: used by this thread alone. patience_s: returns for how many seconds the store may not answer. every: called
    after each beat; it may call `read`.
    """

    def __init__(self, rank: int, store: Store, patience_s: Callable[[], float], every: Callable[[], None]) -> None:
        self._rank, self._store, self._patience_s, self._every = rank, store, patience_s, every
        self._begun: dict[str, int] = {}
        self._beat, self._left = 0, False
        self._signs: dict[int, Sign] = {}
        self._lock, self._over = threading.Lock(), threading.Event()
        self.silent_since: float | None = None  # since when the store has not answered
        self._thread = threading.Thread(target=self._run, daemon=True, name="seqpar-pulse")
        self._thread.start()

    def begin(self, what: str) -> int:
        """Count that this rank begins something that several ranks do; return how often it has begun it."""
        self._begun[what] = count = self._begun.get(what, 0) + 1
        return count

    def read(self, ranks: Collection[int]) -> dict[int, Sign]:
        """Return the last sign of other ranks, as far as they have given one; RuntimeError or OSError if it is gone."""
        with self._lock:
            for rank in ranks:
                key = KEY.format(rank)
                if rank == self._rank or not self._store.check([key]):  # a missing key would be waited for
                    continue
                try:
                    sign = msgspec.json.decode(self._store.get(key), type=Sign)
                except (ValueError, RecursionError):  # half written, or by a stranger: no sign, the rank may be late
                    continue
                if sign != self._signs.get(rank):
                    self._signs[rank] = replace(sign, seen_s=time.monotonic())
            return {rank: self._signs[rank] for rank in ranks if rank in self._signs}

    def leave(self) -> None:
        """Tell the other ranks that this one ends by itself; no sign comes after this one."""
        if self._over.is_set():
            return
        self._over.set()
        self._thread.join(timeout=2 * BEAT_S)
        self._left = True
        try:
            self._tell()
        except (RuntimeError, OSError):
            return  # the store has ended before this rank, so nobody asks any more

    def _run(self) -> None:
        while not self._over.is_set():
            self._store.set_timeout(timedelta(seconds=self._patience_s()))  # deadlines may have changed
            try:
                self._tell()
                self.silent_since = None
            except (RuntimeError, OSError):  # the process that holds the store has ended or is stopped
                self.silent_since = self.silent_since or time.monotonic()
            if not self._over.wait(BEAT_S):
                self._every()

    def _tell(self) -> None:
        with self._lock:
            self._beat += 1
            sign = Sign(self._beat, self._left, dict(self._begun))
            self._store.set(KEY.format(self._rank), msgspec.json.encode(sign).decode())
