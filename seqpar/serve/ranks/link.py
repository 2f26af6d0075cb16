"""Rank 0's end of the socket to the API server: one thread reads requests and cancellations, one writes results.

Neither a slow server nor a large image holds the ranks up. When the server disconnects, the ranks get `Finish`; a
process that is still in a step some time later exits, and with it the other ranks.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from contextlib import suppress

from seqpar.mesh.boundary import Reason
from seqpar.serve.messages import Cancel, Change, Finish, ImageRequest, ToRanks, ToServer, packed, read

ALONE_S = 60.0  # for ranks to exit on their own after the server has disconnected


class ServerLink:
    """The connection of rank 0 with the API server at the Unix socket `path`. OSError if nothing listens there."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._requests = queue.SimpleQueue[tuple[ImageRequest, float] | Change | Finish]()
        self._outgoing = queue.SimpleQueue[ToServer | None]()
        self._cancelled = set[str]()
        self._deadline = float("inf")  # of the running request
        self._disconnected = threading.Event()
        self._writer = threading.Thread(target=self._write, daemon=True, name="seqpar-to-server")
        self._writer.start()
        threading.Thread(target=self._read, daemon=True, name="seqpar-from-server").start()

    def send(self, message: ToServer) -> None:
        self._outgoing.put(message)

    def next(self, timeout_s: float) -> ImageRequest | Change | Finish | None:
        """The next message but cancellations, or None after a timeout. Its deadline counts from its arrival."""
        try:
            message = self._requests.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(message, Change | Finish):
            return message
        request, arrived = message
        self._deadline = float("inf") if request.deadline_s is None else arrived + request.deadline_s
        return request

    def why_stop(self, id: str) -> Reason | None:
        """Why the running request, of this id, must stop; None if it may go on."""
        if id in self._cancelled or self._disconnected.is_set():
            return "cancelled"
        return "deadline" if time.monotonic() > self._deadline else None

    def forget(self, id: str) -> None:
        """Drop the cancellation of a request that has ended."""
        self._cancelled.discard(id)

    def close(self) -> None:
        """Write what is queued, and disconnect."""
        self._outgoing.put(None)
        self._writer.join()
        self._socket.close()

    def _read(self) -> None:
        # the server has exited or sends malformed messages: ranks exit, and the server starts new ones
        with suppress(OSError, ValueError):
            while (message := read(self._socket, ToRanks)) is not None:
                if isinstance(message, Cancel):
                    self._cancelled.add(message.id)
                else:
                    self._requests.put((message, time.monotonic()) if isinstance(message, ImageRequest) else message)
        self._disconnected.set()
        self._requests.put(Finish())
        time.sleep(ALONE_S)  # a process that exits takes this thread with it
        os._exit(1)

    def _write(self) -> None:
        with suppress(OSError):
            while (message := self._outgoing.get()) is not None:
                self._socket.sendall(packed(message))
