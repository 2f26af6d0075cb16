"""Watchdog: turns a hang into an error that names the late rank.

A rank waits for others in three places:
- In a host exchange of all ranks it waits in slices, and checks the heartbeats of the others between them.
- In an exchange by gloo it waits until the deadline.
- In a call that is queued on a GPU, kernels may wait without end (NCCL's timer does not see what a CUDA graph replays).
  A thread polls the end of each call. If a call does not end, and a rank sends no heartbeat or has not entered the
  call, the thread aborts the communicators. The kernels then end, and the main thread raises the error.
Cost: one CUDA event per call.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import NoReturn, Protocol
from weakref import WeakSet, ref

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

BEAT_S = 0.5  # between two heartbeats
KEY = "seqpar/heartbeat/{}"
SLICE_S = 0.5  # of a wait on the host, between two checks
GRACE_S = 3.0  # for the main thread to raise before the process is ended
# texts of a process group's errors if other ranks are late or have closed their connections
LOST = ("timed out", "timeout", "connection closed", "connection reset", "broken pipe", "connection refused")


LONGEST_S = 10**6  # of any deadline: 11 days; timers of process groups count in 64-bit nanoseconds
# calls with the longer deadline: a rank can end its second call only when every other rank has ended its first one
FIRST_CALLS = 2
KINDS = 256  # kinds of calls that are remembered; a forgotten kind has the longer deadline again


class LostRankError(TimeoutError):
    """This rank timed out waiting for another one."""


@dataclass(frozen=True)
class Deadlines:
    """Seconds that a rank waits for another one before all ranks raise an error that names the late rank.

    first_s: in exchanges, until all ranks have finished the first call of a shape or CUDA graph. later_s: in exchanges
    after that. host_s: for a rank that is alive but busy on its host, as while it loads weights, encodes prompts or
    writes images. A rank that has exited is noticed at once; a stopped one after first_s or later_s.
    Raises ValueError if a deadline is not a number above 0 and at most 10^6 seconds.
    """

    first_s: float = 120.0
    later_s: float = 30.0
    host_s: float = 1800.0

    def __post_init__(self) -> None:
        for name in ("first_s", "later_s", "host_s"):
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number or not math.isfinite(value) or not 0 < value <= LONGEST_S:
                raise ValueError(f"got deadline {name}={value!r}, expected seconds above 0 and at most {LONGEST_S}")


class Calls:
    """Counts calls by kind, to find those with the longer deadline."""

    def __init__(self) -> None:
        self._counts: OrderedDict[Hashable, int] = OrderedDict()

    def is_first(self, kind: Hashable) -> bool:
        """Count a call; return whether some rank may not have finished the first call of its kind."""
        return self.before(kind) < FIRST_CALLS

    def before(self, kind: Hashable) -> int:
        before = self._counts.pop(kind, 0)
        self._counts[kind] = before + 1
        if len(self._counts) > KINDS:
            self._counts.popitem(last=False)
        return before

    def knows(self, kind: Hashable) -> bool:
        return kind in self._counts

    def forget(self, kind: Hashable) -> None:
        """Restart the count of a kind, as after its capture as a CUDA graph."""
        self._counts.pop(kind, None)


class HeartbeatFiles(Store):
    """A store with one small file per key, overwritten in place, in a private folder; OSError if that was removed."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def set(self, key: str, value: str) -> None:
        file = os.open(self._path(key), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.pwrite(file, value.encode() + b"\n", 0)
        finally:
            os.close(file)

    def get(self, key: str) -> bytes:
        # the value may be torn while it is written
        return self._path(key).read_bytes().partition(b"\n")[0]

    def check(self, keys: list[str]) -> bool:
        return all(self._path(key).exists() for key in keys)

    def _path(self, key: str) -> Path:
        return self._folder / f"{key.replace('/', '-')}.json"


@dataclass(frozen=True)
class Heartbeat:
    """A rank's last heartbeat. beat: increases while the rank is alive. left: the rank has exited on its own.

    entered: exchange or call -> how many the rank has entered. seen_s: when this rank first read this beat.
    """

    beat: int
    left: bool
    entered: Mapping[str, int]
    seen_s: float = field(default=0.0, compare=False)


class Heartbeats:
    """Writes this rank's heartbeat every `BEAT_S` and reads those of other ranks, in a daemon thread.

    store: used by this thread alone. timeout_s: returns the store's timeout. check: called after each heartbeat.
    """

    def __init__(self, rank: int, store: Store, timeout_s: Callable[[], float], check: Callable[[], None]) -> None:
        self._rank, self._store, self._timeout_s, self._check = rank, store, timeout_s, check
        self._entered: dict[str, int] = {}
        self._beat, self._left = 0, False
        self._seen: dict[int, Heartbeat] = {}
        self._lock, self._stopped = threading.Lock(), threading.Event()
        self.silent_since: float | None = None  # when the store stopped answering
        self._thread = threading.Thread(target=self._run, daemon=True, name="seqpar-heartbeat")
        self._thread.start()

    def enter(self, key: str) -> int:
        """Count that this rank enters an exchange or a call; return the count."""
        self._entered[key] = count = self._entered.get(key, 0) + 1
        return count

    def read(self, ranks: Collection[int]) -> dict[int, Heartbeat]:
        """Return the last heartbeats of other ranks, where there is one; {} if the store does not answer."""
        with self._lock:
            try:
                for rank in ranks:
                    key = KEY.format(rank)
                    if rank != self._rank and self._store.check([key]):  # `get` would wait for a missing key
                        self._update(rank, self._store.get(key))
            except (RuntimeError, OSError):
                return {}  # `silent_since` reports it
            return {rank: self._seen[rank] for rank in ranks if rank in self._seen}

    def _update(self, rank: int, text: bytes) -> None:
        try:
            heartbeat = msgspec.json.decode(text, type=Heartbeat)
        except (ValueError, RecursionError):  # torn, or written by another process: counts as no heartbeat
            return
        if heartbeat != self._seen.get(rank):
            self._seen[rank] = replace(heartbeat, seen_s=time.monotonic())

    def leave(self) -> None:
        """Tell the other ranks that this one exits on its own, and stop."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        self._thread.join(timeout=2 * BEAT_S)
        self._left = True
        self._write()

    def _run(self) -> None:
        while not self._stopped.is_set():
            self._store.set_timeout(timedelta(seconds=self._timeout_s()))  # deadlines may have changed
            self._write()
            if not self._stopped.wait(BEAT_S):
                self._check()

    def _write(self) -> None:
        with self._lock:
            self._beat += 1
            heartbeat = Heartbeat(self._beat, self._left, dict(self._entered))
            try:
                self._store.set(KEY.format(self._rank), msgspec.json.encode(heartbeat).decode())
                self.silent_since = None
            except (RuntimeError, OSError):  # the process that holds the store has exited or is stopped
                self.silent_since = self.silent_since or time.monotonic()


class HostWork(Protocol):
    """An exchange on the host, as torch's `Work`: `wait` raises RuntimeError if it does not end in time, or fails."""

    def wait(self, timeout: timedelta = ..., /) -> object: ...

    def is_completed(self) -> bool: ...


class Follows(Protocol):
    """A transport whose waits are on the device."""

    def limit(self, deadline_s: float) -> None: ...


@dataclass(frozen=True)
class Wait:
    """key, count: the counter that `ranks` must reach.

    limit_s: longest silence between heartbeats, and longest delay in entering; `busy` waives the delay.
    """

    rank: int
    what: str
    ranks: tuple[int, ...]
    key: str
    count: int
    limit_s: float
    busy: bool = False

    def error(self, waited: float, reasons: Mapping[int, str], otherwise: str = "unknown which one") -> str:
        """Return the error after `waited` seconds. reasons: late rank -> why; otherwise: the reason if none is late."""
        start = f"rank {self.rank}: timed out after {round(waited, 1):g} s waiting for"
        if reasons:
            late, why = ", ".join(map(str, reasons)), "; ".join(dict.fromkeys(reasons.values()))
            return f"{start} rank {late} ({self.what}): {why}. See the output of rank {late}."
        return (
            f"{start} one of ranks {list(self.ranks)} ({self.what}): {otherwise}. A rank crashed, hangs or did not "
            f"make this call: see the output of the other ranks."
        )


@dataclass(eq=False)
class _Call:
    """A call on the device. event: its end, once all of it is queued. since: when it became the oldest call."""

    wait: Wait
    event: torch.cuda.Event | None = None
    since: float | None = None
    dropped: bool = False  # it failed on the host while it was queued

    def is_over(self) -> bool:
        try:
            return self.dropped or (self.event is not None and self.event.query())
        except RuntimeError:
            return True  # the device has failed, which the main thread raises


class Watch:
    """Watchdog of this rank over the other ranks of a process group.

    store: for heartbeats alone. Without one only deadlines hold, and ranks are named where an exchange knows them.
    on_fatal: ends a process whose main thread cannot be woken; gets the error.
    """

    def __init__(self, rank: int, deadlines: Deadlines, store: Store | None) -> None:
        self.rank, self.deadlines = rank, deadlines
        self.failed: str | None = None
        # weak: a destroyed group must not keep its sockets; replaced whole, as the thread of heartbeats reads it
        self._groups: tuple[ref[dist.ProcessGroup], ...] = ()
        self.dropped: dict[str, dist.ProcessGroup] = {}  # by name: groups that wait until all their ranks drop them
        self.on_fatal: Callable[[str], NoReturn] = _end
        self._raised = threading.Event()
        self._is_first, self._inside = True, False
        self._followers: WeakSet[Follows] = WeakSet()
        self._queued: deque[_Call] = deque()  # calls on the device that have not ended
        self._heartbeats = None
        if store is not None:
            self._heartbeats = Heartbeats(rank, store, lambda: max(1.0, self.deadlines.later_s), self._check_device)

    @property
    def limit_s(self) -> float:
        """Deadline of exchanges in the current call; between calls the longer one."""
        return self.deadlines.first_s if self._is_first else self.deadlines.later_s

    @contextmanager
    def call(self, what: str, ranks: tuple[int, ...], is_first: bool, device: torch.device) -> Iterator[None]:
        """Context in which a call is queued that exchanges data between `ranks`. Nested calls belong to the outer one.

        is_first: whether the longer deadline holds (`Calls`). Raises TimeoutError if a wait has timed out.
        """
        if self._inside or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            yield
            return
        self.raise_if_failed()
        self._inside, self._is_first = True, is_first
        for follower in self._followers:
            follower.limit(self.limit_s)
        call = _Call(self._enter(what, ranks, "calls"))
        if on_device := device.type == "cuda" and self._heartbeats is not None:
            # watched from now on: NCCL's first exchange blocks the host until all ranks enter
            self._queued.append(call)
        try:
            yield
            if on_device:
                event = torch.cuda.Event()
                event.record()
                call.event, call.since = event, None
        except RuntimeError:
            self.raise_if_failed()  # instead of the text of an aborted exchange
            raise
        finally:
            self._inside, self._is_first = False, True
            call.dropped = call.event is None

    def raise_if_failed(self) -> None:
        """Raise TimeoutError if a wait of this rank has timed out; does not wait for the device."""
        if self.failed is not None:
            self._raised.set()
            raise LostRankError(self.failed)

    def follow(self, transport: Follows) -> None:
        """Pass the deadline of each later call to a transport; a weak reference."""
        self._followers.add(transport)

    def add(self, group: dist.ProcessGroup) -> None:
        """Abort this group if a wait times out; a weak reference."""
        self._groups = (*(known for known in self._groups if known() is not None), ref(group))

    def host(self, work: HostWork, what: str, ranks: tuple[int, ...]) -> None:
        """Wait for a host exchange, which other ranks may enter late, up to the deadline of the host."""
        wait = replace(self._enter(what, ranks, "host exchanges"), limit_s=self.deadlines.first_s, busy=True)
        start, longest = time.monotonic(), max(self.deadlines.host_s, self.deadlines.first_s)
        while True:
            try:
                work.wait(timedelta(seconds=min(SLICE_S, wait.limit_s)))
                return
            except RuntimeError:  # the end of the slice, or of the exchange, which may have succeeded since
                if work.is_completed():
                    with self._explain(wait, start):
                        work.wait()
                    return
            self.raise_if_failed()
            if (error := self._timed_out(wait, start, longest, "all send heartbeats")) is not None:
                raise LostRankError(error)

    @contextmanager
    def context(self, what: str, ranks: tuple[int, ...]) -> Iterator[None]:
        """Raise TimeoutError with the late ranks where an exchange times out or loses its connections."""
        with self._explain(self._enter(what, ranks, "exchanges"), time.monotonic()):
            yield

    def close(self) -> None:
        """Tell the other ranks that this process leaves the group, and stop watching."""
        if self._heartbeats is not None:
            self._heartbeats.leave()
        self._queued.clear()
        self._groups = ()
        self.dropped.clear()

    def _enter(self, what: str, ranks: tuple[int, ...], kind: str) -> Wait:
        key = f"{kind} of {ranks}"
        count = 0 if self._heartbeats is None else self._heartbeats.enter(key)
        return Wait(self.rank, what, ranks, key, count, self.limit_s)

    @contextmanager
    def _explain(self, wait: Wait, start: float) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if self.failed is None and not is_lost(error):
                raise
            self._raised.set()
            raise LostRankError(self.failed or self._lost(wait, time.monotonic() - start)) from error

    def _lost(self, wait: Wait, waited: float) -> str:
        """Return the error of an exchange that failed after `waited` seconds, with dead ranks rather than late ones."""
        start = time.monotonic()
        _, late = self._missing(wait, start, 0.0)
        if self._read(wait):
            time.sleep(4 * BEAT_S)  # a rank that has just died is found by its next missing heartbeats
        dead, _ = self._missing(wait, start, 3 * BEAT_S)
        return wait.error(waited, dead or late)

    def _check_device(self) -> None:
        """Check whether the oldest call on the device has timed out; called after each heartbeat."""
        while self._queued and self._queued[0].is_over():
            self._queued.popleft()
        if not self._queued or self.failed is not None:
            return
        oldest = self._queued[0]
        oldest.since = oldest.since or time.monotonic()
        longest = max(self.deadlines.host_s, oldest.wait.limit_s)
        error = self._timed_out(oldest.wait, oldest.since, longest, "all send heartbeats, so a device may hang")
        if error is not None:
            self._fail(error)

    def _fail(self, error: str) -> None:
        """Wake the main thread; end the process if it does not raise within `GRACE_S`."""
        self.failed = error
        for group in (known() for known in self._groups):
            if group is None:
                continue
            # a thread for each: an abort waits until the graphs that hold the communicator are gone
            threading.Thread(target=_abort, args=(group,), daemon=True, name="seqpar-abort").start()

        def end() -> None:
            if not self._raised.wait(GRACE_S):
                self.on_fatal(error)

        threading.Thread(target=end, daemon=True).start()

    def _timed_out(self, wait: Wait, start: float, longest: float, otherwise: str) -> str | None:
        """Return the error if a wait has timed out. longest: seconds after which it has regardless of heartbeats."""
        waited = time.monotonic() - start
        dead, late = self._missing(wait, start, wait.limit_s)
        if reasons := dead or (late if waited > wait.limit_s and not wait.busy else {}):
            return wait.error(waited, reasons)
        silent = None if self._heartbeats is None else self._heartbeats.silent_since
        if silent is not None and time.monotonic() - max(silent, start) > wait.limit_s:
            return wait.error(waited, {}, "the store of the process group does not answer either")
        return wait.error(waited, late, otherwise) if waited > longest else None

    def _missing(self, wait: Wait, start: float, patience_s: float) -> tuple[dict[int, str], dict[int, str]]:
        """Return (ranks that exited or are silent for `patience_s`, ranks that have not entered), with reasons."""
        dead: dict[int, str] = {}
        late: dict[int, str] = {}
        for rank, heartbeat in self._read(wait).items():
            has_entered = heartbeat.entered.get(wait.key, 0) >= wait.count
            silent = time.monotonic() - max(heartbeat.seen_s, start)
            if heartbeat.left and (silent > patience_s or not has_entered):
                dead[rank] = "its process has exited"
            elif silent > patience_s:
                dead[rank] = f"no heartbeat for {round(silent, 1):g} s, so it crashed or is stopped"
            if not has_entered:
                late[rank] = "it is alive but has not entered this call"
        return dead, late

    def _read(self, wait: Wait) -> dict[int, Heartbeat]:
        others = [rank for rank in wait.ranks if rank != self.rank]
        return {} if self._heartbeats is None else self._heartbeats.read(others)


def is_lost(error: RuntimeError) -> bool:
    """Return whether other ranks are late or closed their connections; only the text of the error says so."""
    return any(text in str(error).lower() for text in LOST)


def drain(watch: Watch | None, device: torch.device, also: Callable[[], object] = lambda: None) -> None:
    """Wait until the device is idle, or until `also` or the watchdog reports an error."""
    if device.type != "cuda":
        return
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    over(event, watch, also)


def over(event: torch.cuda.Event, watch: Watch | None, also: Callable[[], object] = lambda: None) -> None:
    """Wait until the device reaches an event, or until `also` or the watchdog reports an error."""
    pause = 0.0
    while not event.query() and also() is None and (watch is None or watch.failed is None):
        time.sleep(pause)
        pause = min(pause + 1e-6, 1e-3)


def _abort(group: dist.ProcessGroup) -> None:
    """End all exchanges of a group on GPUs; kernels that wait for other ranks then end with wrong data."""
    group._get_backend(torch.device("cuda")).abort()


def _end(error: str) -> NoReturn:
    print(f"error: {error}", file=sys.stderr, flush=True)
    os._exit(1)
