"""Ends a process soon after Ctrl-C, also while its main thread waits in native code for a GPU or for other ranks.

Python runs its handler of SIGINT in the main thread and between two of its own instructions, so that a thread which
waits for a kernel, which waits for another rank, would come to it after the deadline. When it wins: an interrupted run
on GPUs ends in seconds, whatever it waits for. The C part of Python's handler writes to a pipe at once, and
a thread reads there.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn


class Noted:
    """A handler of SIGINT after which the main thread is to end by itself as soon as it can."""


@contextmanager
def ends_when_interrupted(end: Callable[[], NoReturn], grace_s: float) -> Iterator[None]:
    """Call `end` in a thread when a SIGINT in this context has not ended the process within `grace_s`.

    In this time the main thread may end by itself, and remove unfinished files.
    Where something else handles SIGINT, as torchrun's agent does while it ends its ranks, that is left to it.
    """
    receive, send = os.pipe()
    os.set_blocking(send, False)

    def watch() -> None:
        while number := os.read(receive, 1):
            handler = signal.getsignal(signal.SIGINT)
            if number[0] == signal.SIGINT and (handler is signal.default_int_handler or isinstance(handler, Noted)):
                time.sleep(grace_s)
                end()
        os.close(receive)

    threading.Thread(target=watch, daemon=True, name="seqpar-interrupted").start()
    before = signal.set_wakeup_fd(send, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(send)
