"""The private folder of a server: its socket to the ranks, their files, and decoded pixels.

A server removes its folder when it exits, and at its start the folders of servers that were killed. A lock tells which
those are, because a process id may belong to another process by now.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PREFIX, LOCK = "seqpar-serve-", ".seqpar-serve.lock"


@contextmanager
def private_folder() -> Iterator[tuple[Path, int]]:
    """Make a folder of mode 0700; yield it and its locked file, by which a child can keep it as long as it lives."""
    for lock in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{LOCK}"):
        _remove_if_left(lock)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    try:
        new = folder / f"{LOCK}.new"
        file = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            new.rename(folder / LOCK)  # so that no lock is ever seen that is not held yet
            yield folder, file
        finally:
            os.close(file)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_if_left(lock: Path) -> None:
    """Remove the folder of a lock, if it is this user's and no living process holds the lock."""
    try:
        about = lock.parent.lstat()
        if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid():
            return
        file = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # it was just removed
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    else:
        shutil.rmtree(lock.parent, ignore_errors=True)
    finally:
        os.close(file)
