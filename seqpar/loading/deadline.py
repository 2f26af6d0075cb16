"""A deadline for code of other packages that is plain Python and may never end."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

T = TypeVar("T")


def within(seconds: float, call: Callable[[], T]) -> T:
    """Return what a call returns; ValueError if it takes longer. No thread stays, unless a C function never returns.

    It runs in its own thread, so that this works on any thread; torch's settings there are the defaults.
    """
    thread = list[int]()

    def run() -> T:
        thread.append(threading.get_ident())
        return call()

    pool = ThreadPoolExecutor(1)
    future = pool.submit(run)
    pool.shutdown(wait=False)
    try:
        if not wait([future], seconds).done:
            raise ValueError(f"its conversion did not end within {seconds:g} s")
        return future.result()
    finally:
        if not (future.done() or future.cancel()):  # late, or Ctrl-C: the call ends at its next line of Python
            for ident in thread:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(SystemExit))
