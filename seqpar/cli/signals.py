"""SIGINT (Ctrl-C), SIGTERM and SIGHUP (a closed terminal) end a command alike: one line, and exit code 128 + n.

The main thread raises `Stopped`, so that unfinished files are removed on the way out. Python runs signal handlers in
the main thread between two Python instructions: too late while that thread waits in native code, as for a kernel
that waits for another rank. The C part of Python's handler writes to a pipe at once, and a thread that reads there ends
the process after a grace period. No torch import: signals arrive during imports, too.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, Literal, NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
REPORTS = "SEQPAR_REPORTS"  # environment of a rank: a pipe to the process that started it, and prints for it
AGAIN_S = 0.01
AGENT = "TORCHELASTIC_RUN_ID"  # environment of a rank that torchrun's agent has started
Leave = Callable[[int], NoReturn]


class Stopped(KeyboardInterrupt):
    """A signal tells this process to end. number: the signal."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Handler:
    """A handler of this module. action: "leave" exits in the handler, "raise" raises `Stopped`, "note" does nothing.

    number: the last signal, None before. Only the first one raises: a second would interrupt the removal of files.
    Where an exception would be lost, the signal comes again a little later.
    """

    def __init__(self, action: Literal["leave", "raise", "note"], leave: Leave) -> None:
        self.action, self._leave = action, leave
        self.number: int | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.action == "leave":
            self._leave(number)
        raises = self.action == "raise" and self.number is None
        if raises and _swallows(frame):
            again = threading.Timer(AGAIN_S, os.kill, (os.getpid(), number))
            again.daemon = True
            again.start()
            return
        self.number = number
        if raises:
            raise Stopped(number)


def _swallows(frame: FrameType | None) -> bool:
    """Return whether Python prints an exception that is raised here and goes on, as in callbacks of weak references."""
    while frame is not None:
        if frame.f_code.co_filename == weakref.__file__ or frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


def leaves() -> Leave:
    """A function that exits with 128 + n after signal n. Rank 0 or the starter of ranks prints "stopped".

    torchrun's agent ends ranks by SIGTERM when another one has failed, and has its own report.
    """
    speaks = REPORTS not in os.environ and os.environ.get("RANK", "0") == "0"
    by_agent = AGENT in os.environ

    def leave(number: int) -> NoReturn:
        try:
            if speaks and not (by_agent and number == signal.SIGTERM):
                os.write(2, b"stopped\n")  # the signal may have interrupted print
        finally:  # also where the output is closed
            os._exit(128 + number)

    return leave


def take(handler: Handler, numbers: Sequence[signal.Signals] = SIGNALS) -> dict[signal.Signals, Any]:
    """Install a handler; return the handlers before.

    An ignored signal stays ignored, as under `nohup`, and another program's handler stays, as that of torchrun's agent.
    """
    before: dict[signal.Signals, Any] = {}
    for number in numbers:
        current = signal.getsignal(number)
        if current in (signal.SIG_DFL, signal.default_int_handler) or isinstance(current, Handler):
            before[number] = signal.signal(number, handler)
    return before


@contextmanager
def handled(handler: Handler, numbers: Sequence[signal.Signals] = SIGNALS) -> Iterator[None]:
    before = take(handler, numbers)
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


@contextmanager
def at_once() -> Iterator[None]:
    """Exit in the handler in this context: modules may swallow `Stopped` while they are imported."""
    handlers = {handler for number in SIGNALS if isinstance(handler := signal.getsignal(number), Handler)}
    actions = {handler: handler.action for handler in handlers}
    for handler in handlers:
        handler.action = "leave"
    try:
        yield
    finally:
        for handler, action in actions.items():
            handler.action = action


@contextmanager
def ends_when_stopped(leave: Leave, grace_s: float) -> Iterator[None]:
    """Raise `Stopped` in the main thread after a signal in this context; a thread calls `leave` after `grace_s`."""
    receive, send = os.pipe()
    os.set_blocking(send, False)

    def watch() -> None:
        while number := os.read(receive, 1):
            if isinstance(signal.getsignal(number[0]), Handler):
                time.sleep(grace_s)
                leave(number[0])
        os.close(receive)

    threading.Thread(target=watch, daemon=True, name="seqpar-signals").start()
    before = signal.set_wakeup_fd(send, warn_on_full_buffer=False)
    try:
        with handled(Handler("raise", leave)):
            yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(send)


def quick_exit(code: int) -> NoReturn:
    """Exit after the functions of atexit, without the seconds that Python takes to free all modules."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # the output is closed
            stream.flush()
    os._exit(code)
