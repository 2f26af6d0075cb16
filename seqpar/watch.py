"""The watch of a process over the ranks that it waits for: waits in vain end with an error that names the late rank.

The host waits in three places. In a host exchange of all ranks it waits by slices, and looks between them whether the
others live and have come. In an exchange by gloo it waits until the deadline. In a call that was queued on a GPU it
waits for the device, whose kernels may wait for other ranks for ever (NCCL's own timer does not see what a CUDA graph
replays). There a thread looks whether the call ends. If it does not, and a rank shows no sign of life or has not begun
the call, the thread aborts the communicators, so that the kernels end, and the main thread raises the error.
When it wins: always on several ranks; it costs an event a call.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import NoReturn, Protocol
from weakref import WeakSet

import torch
import torch.distributed as dist

from seqpar.deadlines import Deadlines
from seqpar.pulse import BEAT_S, Board, Pulse, Sign
from seqpar.waits import Wait, is_lost, text_of_late, text_of_unknown, why_late

SLICE_S = 0.5  # of a wait, between two looks
GRACE_S = 3.0  # for the main thread to raise the error of a failed watch


class LostRankError(TimeoutError):
    """This rank waited for another one in vain."""


class Follows(Protocol):
    """A transport whose waits are on the device."""

    def limit(self, deadline_s: float) -> None:
        """Set the deadline of what is queued from now on."""
        ...


class Watch:
    """Watches the other ranks of a process group; see the module. rank, world: this rank and the number of all.

    store: where ranks show signs of life, which nothing else uses; None watches by deadlines alone and names ranks
    only where an exchange knows them. last_words: ends a process whose main thread cannot be woken; it gets the error.
    """

    def __init__(self, rank: int, world: int, deadlines: Deadlines, store: Board | None) -> None:
        self.rank, self.world, self.deadlines = rank, world, deadlines
        self.failed: str | None = None
        self.groups: list[dist.ProcessGroup] = []
        self.last_words: Callable[[str], NoReturn] = _end
        self._raised = threading.Event()
        self._is_first, self._inside = True, False
        self._followers: WeakSet[Follows] = WeakSet()
        self._calls: deque[Wait] = deque()
        self._lock = threading.Lock()
        self._oldest: tuple[Wait | None, float] = None, 0.0
        self._pulse = None
        if store is not None:
            self._pulse = Pulse(rank, store, lambda: max(1.0, self.deadlines.later_s), self._look)

    @property
    def limit_s(self) -> float:
        """Return the deadline of exchanges in the call that runs now; between calls the longer one."""
        return self.deadlines.first_s if self._is_first else self.deadlines.later_s

    @contextmanager
    def call(self, what: str, ranks: tuple[int, ...], is_first: bool, device: torch.device) -> Iterator[None]:
        """Queue a call in which these ranks exchange data; raises TimeoutError if a wait is known to be in vain.

        is_first: whether the longer deadline holds (`seqpar.deadlines.Calls`). Calls within a call belong to it.
        """
        if self._inside or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            yield
            return
        self.raise_if_failed()
        self._inside, self._is_first = True, is_first
        for follower in self._followers:
            follower.limit(self.limit_s)
        wait, on_device = self._begun(what, ranks, "calls"), device.type == "cuda" and self._pulse is not None
        if on_device:  # watched from now on, because NCCL's first exchange holds the host up until all ranks have come
            self._unfinished(wait)
        try:
            yield
            if on_device:
                event = torch.cuda.Event()
                event.record()
                self._unfinished(replace(wait, event=event), wait)
        except RuntimeError as error:
            if self.failed is None:
                raise
            self._raised.set()
            raise LostRankError(self.failed) from error  # what an aborted exchange says
        finally:
            self._inside, self._is_first = False, True
            self._forget(wait)

    def raise_if_failed(self) -> None:
        """Raise TimeoutError if a wait of this rank is known to be in vain; this does not wait for the device."""
        if self.failed is not None:
            self._raised.set()
            raise LostRankError(self.failed)

    def follow(self, transport: Follows) -> None:
        """Tell a transport the deadline of each call from now on, as long as it lives."""
        self._followers.add(transport)

    def host(self, work: dist.Work, what: str, ranks: tuple[int, ...]) -> None:
        """Wait for a host exchange, to which ranks may come late because they work on their hosts.

        Raises TimeoutError if a rank has ended or is stopped, or does not come within the deadline of the host.
        """
        wait = replace(self._begun(what, ranks, "host exchanges"), limit_s=self.deadlines.first_s, busy=True)
        start, longest = time.monotonic(), max(self.deadlines.host_s, self.deadlines.first_s)
        while True:
            try:
                work.wait(timedelta(seconds=min(SLICE_S, wait.limit_s)))
                return
            except RuntimeError:  # the end of the slice, or of the exchange
                if work.is_completed() and self._succeeded(work, wait, start):
                    return
            self.raise_if_failed()
            told = self._late(wait, start)
            if told is not None or time.monotonic() - start > longest:
                raise LostRankError(told or text_of_unknown(self.rank, wait, longest, "all show signs of life"))

    def _succeeded(self, work: dist.Work, wait: Wait, start: float) -> bool:
        """Return True for a completed exchange, which may have ended between a slice's end and this; else raise why."""
        try:
            return work.wait()
        except RuntimeError as error:
            if not is_lost(error):
                raise
            raise self._lost(wait, start) from error

    def exchange(self, work: dist.Work, what: str, ranks: tuple[int, ...]) -> None:
        """Wait for an exchange by gloo until the deadline; raises TimeoutError, which names the late ranks."""
        with self.named(what, ranks):
            work.wait(timedelta(seconds=self.limit_s))

    @contextmanager
    def named(self, what: str, ranks: tuple[int, ...]) -> Iterator[None]:
        """Raise TimeoutError, which names the late ranks, where an exchange times out or loses its connections."""
        wait, start = self._begun(what, ranks, "exchanges"), time.monotonic()
        try:
            yield
        except RuntimeError as error:
            if self.failed is None and not is_lost(error):
                raise
            raise self._lost(wait, start) from error

    def close(self) -> None:
        """Tell the other ranks that this process leaves the group, and watch no more."""
        self._calls.clear()
        self.groups.clear()
        if self._pulse is not None:
            self._pulse.leave()

    def _begun(self, what: str, ranks: tuple[int, ...], kind: str) -> Wait:
        """Count that this rank begins something, so that others can see that it has come."""
        key = f"{kind} of {ranks}"
        return Wait(what, ranks, key, 0 if self._pulse is None else self._pulse.begin(key), self.limit_s)

    def _lost(self, wait: Wait, start: float) -> LostRankError:
        """Return the error of an exchange that timed out, or whose connections broke, by the signs of its ranks."""
        waited = time.monotonic() - start
        self._raised.set()
        if self.failed is not None:
            return LostRankError(self.failed)
        if reasons := self._reasons(wait):
            return LostRankError(text_of_late(self.rank, wait, waited, reasons))
        return LostRankError(text_of_unknown(self.rank, wait, waited, "it is not known which"))

    def _unfinished(self, new: Wait | None = None, before: Wait | None = None) -> Wait | None:
        """Add a call on the device, in the place of `before` if that is given; return the oldest one that is not over.

        A call without an event is still being queued.
        """
        with self._lock:
            if new is not None and before is not None and before in self._calls:
                self._calls[self._calls.index(before)] = new
            elif new is not None:
                self._calls.append(new)
            while self._calls and (event := self._calls[0].event) is not None and _is_over(event):
                self._calls.popleft()
            return self._calls[0] if self._calls else None

    def _forget(self, wait: Wait) -> None:
        """Watch a call no more that an error ended while it was queued."""
        with self._lock:
            if wait in self._calls:
                self._calls.remove(wait)

    # The thread --------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Look whether the oldest call on the device waits in vain; called after each beat."""
        wait = self._unfinished()
        if self._oldest[0] is not wait:
            self._oldest = wait, time.monotonic()
        if wait is None or self.failed is not None:
            return
        told = self._late(wait, self._oldest[1])
        waited = time.monotonic() - self._oldest[1]
        if told is None and waited > max(self.deadlines.host_s, wait.limit_s):
            told = text_of_unknown(self.rank, wait, waited, "all show signs of life, so a device may hang")
        if told is not None:
            self._fail(told)

    def _fail(self, told: str) -> None:
        """Wake the main thread; where that is impossible, end the process."""
        self.failed = told
        for group in self.groups:
            # one thread each, because an abort waits until the graphs that hold the communicator are gone
            threading.Thread(target=_abort, args=(group,), daemon=True, name="seqpar-abort").start()

        def end() -> None:
            if not self._raised.wait(GRACE_S):
                self.last_words(told)

        threading.Thread(target=end, daemon=True).start()

    # What is known of other ranks --------------------------------------------------------------------------------

    def _late(self, wait: Wait, start: float) -> str | None:
        """Return the error if a rank has ended, shows no sign of life, or has not begun what this one waits for."""
        waited = time.monotonic() - start
        found = {
            rank: reason
            for rank, sign in self._signs(wait.ranks).items()
            if (reason := why_late(wait, sign, start, waited)) is not None
        }
        silent = None if self._pulse is None else self._pulse.silent_since
        if not found and silent is not None and time.monotonic() - max(silent, start) > wait.limit_s:
            return text_of_unknown(self.rank, wait, waited, "the store of the process group does not answer, either")
        return text_of_late(self.rank, wait, waited, found) if found else None

    def _reasons(self, wait: Wait) -> dict[int, str]:
        """Return why ranks are late in an exchange that has failed already: those that show no sign any more."""
        before = self._signs(wait.ranks)
        if not before:
            return {}
        time.sleep(4 * BEAT_S)
        found = {}
        for rank, sign in self._signs(wait.ranks).items():
            if sign.left:
                found[rank] = "its process has ended by itself"
            elif rank in before and before[rank].beat == sign.beat:
                found[rank] = "it shows no sign of life: it died or is stopped"
        behind = {rank: sign.begun.get(wait.key, 0) < wait.count for rank, sign in before.items()}
        return found or {rank: "it runs, but did not come" for rank, late in behind.items() if late}

    def _signs(self, ranks: Collection[int]) -> dict[int, Sign]:
        if self._pulse is None:
            return {}
        try:
            return self._pulse.read([rank for rank in ranks if rank != self.rank])
        except (RuntimeError, OSError):
            return {}  # the store is gone, which `silent_since` tells


def drain(watch: Watch | None, device: torch.device, also: Callable[[], object] = lambda: None) -> None:
    """Wait for the device until it is done, or until `also` or the watch tells an error."""
    if device.type != "cuda":
        return
    event, pause = torch.cuda.Event(), 0.0
    event.record(torch.cuda.current_stream(device))
    while not event.query() and also() is None and (watch is None or watch.failed is None):
        time.sleep(pause)
        pause = min(pause + 1e-6, 1e-3)


def _is_over(event: torch.cuda.Event) -> bool:
    """Return whether a call has ended; so it has where the device has failed, which the main thread is told."""
    try:
        return event.query()
    except RuntimeError:
        return True


def _abort(group: dist.ProcessGroup) -> None:
    """End all exchanges of a group on GPUs; kernels that wait for other ranks then end with wrong data."""
    group._get_backend(torch.device("cuda")).abort()


def _end(told: str) -> NoReturn:
    print(f"error: {told}", file=sys.stderr, flush=True)
    os._exit(1)
