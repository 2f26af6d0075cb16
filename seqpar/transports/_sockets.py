"""Removes socket files of torch's symmetric memory that killed processes have left.

While ranks map each other's memory, each has a socket named symm_mem-PID in the folder of temporary files.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

FOLDERS = ("TMPDIR", "TMP", "TEMP", "TEMPDIR")  # the first one that is set holds torch's sockets, else /tmp


def remove_sockets(processes: Iterable[int]) -> None:
    """Remove the sockets of these processes, which have exited; one that answers belongs to another process by now."""
    folder = next((os.environ[name] for name in FOLDERS if name in os.environ), "/tmp")
    for process in processes:
        path = Path(folder, f"symm_mem-{process}")
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as client:
            if path.is_socket() and client.connect_ex(str(path)) != 0:
                path.unlink()
