"""SIGINT (Ctrl-C), SIGTERM and SIGHUP (a closed terminal) end a command alike: one line, and exit code 128 + n.

The main thread raises `Stopped`, so that unfinished files are removed on the way out. Python runs handlers of signals
in the main thread and between two of its own instructions, so that a thread which waits for a kernel, which waits for
another rank, would come to it after the deadline. The C part of Python's handler writes to a pipe at once, and a thread
that reads there ends the process after a grace. This file does not import torch: signals come during imports, too.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
REPORTS = "SEQPAR_REPORTS"  # environment of a rank: a pipe to the process that started it, and prints for it
AGENT = "TORCHELASTIC_RUN_ID"  # environment of a rank that torchrun's agent has started
Leave = Callable[[int], NoReturn]


class Stopped(KeyboardInterrupt):
    """A signal tells this process to end. number: the signal."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Noted:
    """A handler of signals after which the main thread ends by itself as soon as it can."""

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Note the signal, or raise `Stopped`."""
        raise NotImplementedError


class Ends(Noted):
    """A handler that raises `Stopped`, or leaves at once where nothing has to be removed (`at_once`).

    Only the first signal raises, because a second one would interrupt the removal of files.
    """

    def __init__(self, leave: Leave, at_once: bool = False) -> None:
        self.at_once, self._leave, self._raised = at_once, leave, False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Raise `Stopped`, or leave."""
        if self.at_once:
            self._leave(number)
        if not self._raised:
            self._raised = True
            raise Stopped(number)


def leaves() -> Leave:
    """Return what exits with 128 + n after signal n; one process of a job says "stopped": rank 0, or the starter.

    torchrun's agent ends ranks by SIGTERM when another one has failed, and has a report of its own.
    """
    speaks = REPORTS not in os.environ and os.environ.get("RANK", "0") == "0"
    by_agent = AGENT in os.environ

    def leave(number: int) -> NoReturn:
        try:
            if speaks and not (by_agent and number == signal.SIGTERM):
                os.write(2, b"stopped\n")  # print may be what the signal has interrupted
        finally:  # also where nobody reads the output any more
            os._exit(128 + number)

    return leave


@contextmanager
def handled(handler: Noted, numbers: Sequence[signal.Signals] = SIGNALS) -> Iterator[None]:
    """Let a handler take signals in this context; see `take`."""
    before = take(handler, numbers)
    try:
        yield
    finally:
        for number, each in before.items():
            signal.signal(number, each)


def take(handler: Noted, numbers: Sequence[signal.Signals] = SIGNALS) -> dict[signal.Signals, Any]:
    """Let a handler take signals; return their handlers before.

    An ignored signal stays ignored, as by `nohup`; one that others handle is left to them, as to torchrun's agent while
    it ends its ranks.
    """
    before: dict[signal.Signals, Any] = {}
    for number in numbers:
        each = signal.getsignal(number)
        if each in (signal.SIG_DFL, signal.default_int_handler) or isinstance(each, Noted):
            before[number] = signal.signal(number, handler)
    return before


@contextmanager
def at_once() -> Iterator[None]:
    """Leave at once after a signal in this context: what is imported may take `Stopped` for an error of its own."""
    ends = {each for number in SIGNALS if isinstance(each := signal.getsignal(number), Ends)}
    for each in ends:
        each.at_once = True
    try:
        yield
    finally:
        for each in ends:
            each.at_once = False


@contextmanager
def ends_when_stopped(leave: Leave, grace_s: float) -> Iterator[None]:
    """Raise `Stopped` in the main thread after a signal in this context; call `leave` in a thread after `grace_s`.

    In this time the main thread may end by itself, and remove unfinished files.
    """
    receive, send = os.pipe()
    os.set_blocking(send, False)

    def watch() -> None:
        while number := os.read(receive, 1):
            if isinstance(signal.getsignal(number[0]), Noted):
                time.sleep(grace_s)
                leave(number[0])
        os.close(receive)

    threading.Thread(target=watch, daemon=True, name="seqpar-interrupted").start()
    before = signal.set_wakeup_fd(send, warn_on_full_buffer=False)
    try:
        with handled(Ends(leave)):
            yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(send)
