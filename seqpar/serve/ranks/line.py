"""Rank 0's end of the socket to the front: a thread reads orders and cancels, another one writes what was made.

Neither a slow front nor a large picture holds the ranks up. When the front has gone, the line ends as if it had asked
the ranks to finish; a process that is still in a step some time later is ended, and with it the other ranks.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from contextlib import suppress

from seqpar.mesh.boundary import Reason
from seqpar.serve.messages import Cancel, Finish, ImageRequest, ToFront, ToRanks, packed, read

ALONE_S = 60.0  # for ranks to end by themselves when the front has gone


class Line:
    """The connection of rank 0 with the front; see the module."""

    def __init__(self, path: str, alone_s: float = ALONE_S) -> None:
        """Connect to the front's socket. Raises OSError if nothing listens there. alone_s: see `ALONE_S`."""
        self._alone_s = alone_s
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._orders = queue.SimpleQueue[tuple[ImageRequest, float] | Finish]()
        self._written = queue.SimpleQueue[ToFront | None]()
        self._cancelled = set[str]()
        self._end = float("inf")  # when the running order is given up
        self._gone = threading.Event()
        self._writer = threading.Thread(target=self._write, daemon=True, name="seqpar-to-front")
        self._writer.start()
        threading.Thread(target=self._read, daemon=True, name="seqpar-from-front").start()

    def send(self, message: ToFront) -> None:
        """Queue a message for the front."""
        self._written.put(message)

    def next(self, seconds: float) -> ImageRequest | Finish | None:
        """Return the next order, or None after some seconds without one. Its deadline counts from its arrival."""
        try:
            found = self._orders.get(timeout=seconds)
        except queue.Empty:
            return None
        if isinstance(found, Finish):
            return found
        order, came = found
        self._end = float("inf") if order.deadline_s is None else came + order.deadline_s
        return order

    def why_given_up(self, id: str) -> Reason | None:
        """Return why the running order, of this id, is to be given up, or None."""
        if id in self._cancelled or self._gone.is_set():
            return "cancelled"
        return "deadline" if time.monotonic() > self._end else None

    def forget(self, id: str) -> None:
        """Note that an order has ended."""
        self._cancelled.discard(id)

    def close(self) -> None:
        """Write what is queued, and close the connection."""
        self._written.put(None)
        self._writer.join()
        self._socket.close()

    def _read(self) -> None:
        with suppress(OSError, ValueError):  # the front has gone, or talks nonsense: ranks end, and it starts new ones
            while (message := read(self._socket, ToRanks)) is not None:
                if isinstance(message, Cancel):
                    self._cancelled.add(message.id)
                else:
                    self._orders.put((message, time.monotonic()) if isinstance(message, ImageRequest) else message)
        self._gone.set()
        self._orders.put(Finish())
        time.sleep(self._alone_s)  # a process that ends takes this thread with it
        os._exit(1)

    def _write(self) -> None:
        with suppress(OSError):
            while (message := self._written.get()) is not None:
                self._socket.sendall(packed(message))
