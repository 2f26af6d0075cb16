"""Removes the socket files of torch's symmetric memory whose processes were killed.

While ranks map each other's memory, torch keeps a socket named symm_mem-PID in the folder of temporary files, which a
killed process leaves behind. A socket that refuses connections belongs to no process any more, in no container either.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

FOLDERS = ("TMPDIR", "TMP", "TEMP", "TEMPDIR")  # the first one that is set holds torch's sockets, else /tmp


def remove_dead_sockets() -> None:
    """Remove those that belong to this user and to no process."""
    folder = next((os.environ[name] for name in FOLDERS if name in os.environ), "/tmp")
    for path in filter(Path.is_socket, Path(folder).glob("symm_mem-*")):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as one, suppress(OSError):
            try:
                one.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()
