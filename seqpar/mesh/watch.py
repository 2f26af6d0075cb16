"""The watch of a process over the ranks that it waits for: waits in vain end with an error that names the late rank.

The host waits in three places. In a host exchange of all ranks it waits by slices, and looks between them whether the
others live and have come. In an exchange by gloo it waits until the deadline. In a call that was queued on a GPU it
waits for the device, whose kernels may wait for other ranks for ever (NCCL's own timer does not see what a CUDA graph
replays). There a thread looks whether the call ends. If it does not, and a rank shows no sign of life or has not begun
the call, the thread aborts the communicators, so that the kernels end, and the main thread raises the error.
When it wins: always on several ranks; it costs an event a call.
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

BEAT_S = 0.5
KEY = "seqpar/heartbeat/{}"


class HeartbeatFiles(Store):
    """A store of one small file a key, in a folder that only this user can reach; OSError if the folder is gone.

    A file is written over in place: a full disk does not silence a rank, whose file has its space already.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def set(self, key: str, value: str) -> None:
        """Write a value of one line, of a key that only this process writes."""
        file = os.open(self._path(key), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.pwrite(file, value.encode() + b"\n", 0)
        finally:
            os.close(file)

    def get(self, key: str) -> bytes:
        """Return a key's value, of which a part may be an older one's while it is written; OSError if it is gone."""
        return self._path(key).read_bytes().partition(b"\n")[0]

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys have values."""
        return all(self._path(key).exists() for key in keys)

    def _path(self, key: str) -> Path:
        return self._folder / f"{key.replace('/', '-')}.json"


@dataclass(frozen=True)
class Heartbeat:
    """The last sign of a rank. beat: grows while the rank lives; left: whether it has ended by itself.

    begun: the number of calls and exchanges that it has begun, by their names. seen_s: when this rank first read this
    beat, by the clock of `time.monotonic`.
    """

    beat: int
    left: bool
    begun: Mapping[str, int]
    seen_s: float = field(default=0.0, compare=False)

    def silent_s(self, since: float) -> float:
        """Return for how many seconds this rank has shown nothing, counted from `since` on at most."""
        return time.monotonic() - max(self.seen_s, since)


class Heartbeats:
    """Writes this rank's signs and reads those of others, in a thread that ends with the process.

    store: used by this thread alone. patience_s: returns for how many seconds the store may not answer. every: called
    after each beat; it may call `read`.
    """

    def __init__(self, rank: int, store: Store, patience_s: Callable[[], float], every: Callable[[], None]) -> None:
        self._rank, self._store, self._patience_s, self._every = rank, store, patience_s, every
        self._begun: dict[str, int] = {}
        self._beat, self._left = 0, False
        self._signs: dict[int, Heartbeat] = {}
        self._lock, self._over = threading.Lock(), threading.Event()
        self.silent_since: float | None = None  # since when the store has not answered
        self._thread = threading.Thread(target=self._run, daemon=True, name="seqpar-heartbeat")
        self._thread.start()

    def begin(self, what: str) -> int:
        """Count that this rank begins something that several ranks do; return how often it has begun it."""
        self._begun[what] = count = self._begun.get(what, 0) + 1
        return count

    def read(self, ranks: Collection[int]) -> dict[int, Heartbeat]:
        """Return the last sign of other ranks, as far as they have given one; RuntimeError or OSError if it is gone."""
        with self._lock:
            for rank in ranks:
                key = KEY.format(rank)
                if rank == self._rank or not self._store.check([key]):  # a missing key would be waited for
                    continue
                try:
                    sign = msgspec.json.decode(self._store.get(key), type=Heartbeat)
                except (ValueError, RecursionError):  # half written, or by a stranger: no sign, the rank may be late
                    continue
                if sign != self._signs.get(rank):
                    self._signs[rank] = replace(sign, seen_s=time.monotonic())
            return {rank: self._signs[rank] for rank in ranks if rank in self._signs}

    def leave(self) -> None:
        """Tell the other ranks that this one ends by itself; no sign comes after this one."""
        if self._over.is_set():
            return
        self._over.set()
        self._thread.join(timeout=2 * BEAT_S)
        self._left = True
        try:
            self._tell()
        except (RuntimeError, OSError):
            return  # the store has ended before this rank, so nobody asks any more

    def _run(self) -> None:
        while not self._over.is_set():
            self._store.set_timeout(timedelta(seconds=self._patience_s()))  # deadlines may have changed
            try:
                self._tell()
                self.silent_since = None
            except (RuntimeError, OSError):  # the process that holds the store has ended or is stopped
                self.silent_since = self.silent_since or time.monotonic()
            if not self._over.wait(BEAT_S):
                self._every()

    def _tell(self) -> None:
        with self._lock:
            self._beat += 1
            sign = Heartbeat(self._beat, self._left, dict(self._begun))
            self._store.set(KEY.format(self._rank), msgspec.json.encode(sign).decode())


LONGEST_S = 10**6  # of any deadline: 11 days; timers of process groups count in 64-bit nanoseconds
# calls with the longer deadline: a rank can end its second call only when every other rank has ended its first one
FIRST_CALLS = 2
KINDS = 256  # kinds of calls that are remembered; a forgotten kind has the longer deadline again


@dataclass(frozen=True)
class Deadlines:
    """Seconds that a rank waits for another one before all ends with an error that names the late rank.

    first_s: in exchanges, until all ranks have finished the first call of a shape or CUDA graph. later_s: in exchanges
    after that. host_s: for a rank that lives but works on its host, as while it loads weights, encodes prompts or
    writes pictures. A rank that has ended is noticed at once; one that was stopped, after first_s or later_s.
    Raises ValueError if a deadline is not a number from above 0 to 10^6 seconds.
    """

    first_s: float = 120.0
    later_s: float = 30.0
    host_s: float = 1800.0

    def __post_init__(self) -> None:
        for name in ("first_s", "later_s", "host_s"):
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number or not math.isfinite(value) or not 0 < value <= LONGEST_S:
                raise ValueError(
                    f"got a deadline {name}={value!r}, expected seconds, more than 0 and at most {LONGEST_S}"
                )


class Calls:
    """Counts calls of each kind, as to tell those that have the longer deadline; the number of kinds is bounded."""

    def __init__(self) -> None:
        self._counts: OrderedDict[Hashable, int] = OrderedDict()

    def is_first(self, kind: Hashable) -> bool:
        """Count a call, and return whether not all ranks are known to have finished the first call of its kind."""
        return self.before(kind) < FIRST_CALLS

    def before(self, kind: Hashable) -> int:
        """Count a call, and return how many of its kind came before."""
        before = self._counts.pop(kind, 0)
        self._counts[kind] = before + 1
        if len(self._counts) > KINDS:
            self._counts.popitem(last=False)
        return before

    def knows(self, kind: Hashable) -> bool:
        """Return whether a call of this kind was counted, without counting one."""
        return kind in self._counts

    def forget(self, kind: Hashable) -> None:
        """Count calls of a kind anew, as after its capture as a CUDA graph."""
        self._counts.pop(kind, None)


SLICE_S = 0.5  # of a wait, between two looks
GRACE_S = 3.0  # for the main thread to raise the error of a failed watch
# what a process group says when other ranks did not come or closed their connections
LOST = ("timed out", "timeout", "connection closed", "connection reset", "broken pipe", "connection refused")


class LostRankError(TimeoutError):
    """This rank waited for another one in vain."""


class Follows(Protocol):
    """A transport whose waits are on the device."""

    def limit(self, deadline_s: float) -> None:
        """Set the deadline of what is queued from now on."""
        ...


@dataclass(frozen=True)
class Wait:
    """What a rank waits for. rank: this one. ranks: those that have to come. key, count: what each has begun then.

    limit_s: how long a rank may show no sign of life, or not begin it; with `busy` it may begin it later.
    """

    rank: int
    what: str
    ranks: tuple[int, ...]
    key: str
    count: int
    limit_s: float
    busy: bool = False

    def error(self, waited: float, reasons: Mapping[int, str], more: str = "it is not known which") -> str:
        """Return the error after `waited` seconds in vain. reasons: late rank -> why it is late.

        more: what is known where no rank is known to be late.
        """
        start, what = f"rank {self.rank} waited {round(waited, 1):g} s in vain for", f"({self.what})"
        if reasons:
            late, why = ", ".join(map(str, reasons)), "; ".join(dict.fromkeys(reasons.values()))
            return f"{start} rank {late} {what}; {why}; see its output"
        return (
            f"{start} another rank of {list(self.ranks)} {what}; {more}; it died, is stuck, or did not make this call: "
            f"see the output of the other ranks"
        )


class Watch:
    """Watches the other ranks of a process group; see the module. rank: this one.

    store: where ranks show signs of life, which nothing else uses; None watches by deadlines alone and names ranks
    only where an exchange knows them. on_fatal: ends a process whose main thread cannot be woken; it gets the error.
    """

    def __init__(self, rank: int, deadlines: Deadlines, store: Store | None) -> None:
        self.rank, self.deadlines = rank, deadlines
        self.failed: str | None = None
        self._groups: tuple[ref[dist.ProcessGroup], ...] = ()  # weak: a destroyed group must not keep its sockets
        self.dropped: dict[str, dist.ProcessGroup] = {}  # by name: groups that wait until all their ranks drop them
        self.on_fatal: Callable[[str], NoReturn] = _end
        self._raised = threading.Event()
        self._is_first, self._inside = True, False
        self._followers: WeakSet[Follows] = WeakSet()
        self._queueing: tuple[Wait, None] | None = None  # the call that the host queues on the device
        self._queued: deque[tuple[Wait, torch.cuda.Event]] = deque()  # calls that it has queued, until they end
        self._oldest: tuple[object, float] = None, 0.0  # of these calls, and since when it is the oldest
        self._heartbeats = None
        if store is not None:
            self._heartbeats = Heartbeats(rank, store, lambda: max(1.0, self.deadlines.later_s), self._look)

    @property
    def limit_s(self) -> float:
        """Return the deadline of exchanges in the call that runs now; between calls the longer one."""
        return self.deadlines.first_s if self._is_first else self.deadlines.later_s

    @contextmanager
    def call(self, what: str, ranks: tuple[int, ...], is_first: bool, device: torch.device) -> Iterator[None]:
        """Queue a call in which these ranks exchange data; raises TimeoutError if a wait is known to be in vain.

        is_first: whether the longer deadline holds (`seqpar.mesh.watch.Calls`). Calls within a call belong to it.
        """
        if self._inside or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            yield
            return
        self.raise_if_failed()
        self._inside, self._is_first = True, is_first
        for follower in self._followers:
            follower.limit(self.limit_s)
        wait, on_device = self._begun(what, ranks, "calls"), device.type == "cuda" and self._heartbeats is not None
        # watched from now on, because NCCL's first exchange holds the host up until all ranks have come
        self._queueing = (wait, None) if on_device else None
        try:
            yield
            if on_device:
                event = torch.cuda.Event()
                event.record()
                self._queued.append((wait, event))
        except RuntimeError:
            self.raise_if_failed()  # in the place of what an aborted exchange says
            raise
        finally:
            self._inside, self._is_first, self._queueing = False, True, None

    def raise_if_failed(self) -> None:
        """Raise TimeoutError if a wait of this rank is known to be in vain; this does not wait for the device."""
        if self.failed is not None:
            self._raised.set()
            raise LostRankError(self.failed)

    def follow(self, transport: Follows) -> None:
        """Tell a transport the deadline of each call from now on, as long as it lives."""
        self._followers.add(transport)

    def add(self, group: dist.ProcessGroup) -> None:
        """Abort this group, as long as it exists, if a wait is in vain."""
        self._groups = (*(one for one in self._groups if one() is not None), ref(group))

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
            except RuntimeError:  # the end of the slice, or of the exchange, which may have gone well since
                if work.is_completed():
                    with self._explained(wait, start):
                        work.wait()
                    return
            self.raise_if_failed()
            if (error := self._vain(wait, start, longest, "all show signs of life")) is not None:
                raise LostRankError(error)

    @contextmanager
    def context(self, what: str, ranks: tuple[int, ...]) -> Iterator[None]:
        """Raise TimeoutError, which names the late ranks, where an exchange times out or loses its connections."""
        with self._explained(self._begun(what, ranks, "exchanges"), time.monotonic()):
            yield

    def close(self) -> None:
        """Tell the other ranks that this process leaves the group, and watch no more."""
        if self._heartbeats is not None:
            self._heartbeats.leave()
        self._queued.clear()
        self._groups = ()
        self.dropped.clear()

    def _begun(self, what: str, ranks: tuple[int, ...], kind: str) -> Wait:
        """Count that this rank begins something, so that others can see that it has come."""
        key = f"{kind} of {ranks}"
        count = 0 if self._heartbeats is None else self._heartbeats.begin(key)
        return Wait(self.rank, what, ranks, key, count, self.limit_s)

    @contextmanager
    def _explained(self, wait: Wait, start: float) -> Iterator[None]:
        """Raise LostRankError for an exchange that times out or loses its connections, by the signs of its ranks."""
        try:
            yield
        except RuntimeError as error:
            if self.failed is None and not is_lost(error):
                raise
            self._raised.set()
            raise LostRankError(self.failed or self._lost(wait, time.monotonic() - start)) from error

    def _lost(self, wait: Wait, waited: float) -> str:
        """Return the error of an exchange that has failed; ranks that give no more signs are named before late ones."""
        start = time.monotonic()
        _, behind = self._missing(wait, start, 0.0)
        if self._signs(wait):
            time.sleep(4 * BEAT_S)
        gone, _ = self._missing(wait, start, 3 * BEAT_S)
        return wait.error(waited, gone or behind)

    def _look(self) -> None:
        """Look whether the oldest call on the device waits in vain; called after each beat."""
        while self._queued and _is_over(self._queued[0][1]):
            self._queued.popleft()
        oldest = self._queued[0] if self._queued else self._queueing
        if self._oldest[0] is not oldest:
            self._oldest = oldest, time.monotonic()
        if oldest is None or self.failed is not None:
            return
        wait, longest = oldest[0], max(self.deadlines.host_s, oldest[0].limit_s)
        error = self._vain(wait, self._oldest[1], longest, "all show signs of life, so a device may hang")
        if error is not None:
            self._fail(error)

    def _fail(self, error: str) -> None:
        """Wake the main thread; where that is impossible, end the process."""
        self.failed = error
        for group in (one() for one in self._groups):
            if group is None:
                continue
            # one thread each, because an abort waits until the graphs that hold the communicator are gone
            threading.Thread(target=_abort, args=(group,), daemon=True, name="seqpar-abort").start()

        def end() -> None:
            if not self._raised.wait(GRACE_S):
                self.on_fatal(error)

        threading.Thread(target=end, daemon=True).start()

    def _vain(self, wait: Wait, start: float, longest: float, more: str) -> str | None:
        """Return the error if a wait is in vain, else None. longest: seconds after which it is; more: see `Wait`."""
        waited = time.monotonic() - start
        gone, behind = self._missing(wait, start, wait.limit_s)
        if late := gone or (behind if waited > wait.limit_s and not wait.busy else {}):
            return wait.error(waited, late)
        silent = None if self._heartbeats is None else self._heartbeats.silent_since
        if silent is not None and time.monotonic() - max(silent, start) > wait.limit_s:
            return wait.error(waited, {}, "the store of the process group does not answer, either")
        return wait.error(waited, behind, more) if waited > longest else None

    def _missing(self, wait: Wait, start: float, patience_s: float) -> tuple[dict[int, str], dict[int, str]]:
        """Return the ranks that have ended or show no sign of life, and those that live but have not come, with why.

        patience_s: for how long after `start` a rank may show no sign of life.
        """
        gone: dict[int, str] = {}
        behind: dict[int, str] = {}
        for rank, sign in self._signs(wait).items():
            has_come = sign.begun.get(wait.key, 0) >= wait.count
            is_silent = (silent := sign.silent_s(start)) > patience_s
            if sign.left and (is_silent or not has_come):
                gone[rank] = "its process has ended by itself"
            elif is_silent:
                gone[rank] = f"it has shown no sign of life for {round(silent, 1):g} s: it died or is stopped"
            if not has_come:
                behind[rank] = "it lives, but has not begun this call"
        return gone, behind

    def _signs(self, wait: Wait) -> dict[int, Heartbeat]:
        """Return the last signs of the other ranks of a wait, as far as they have given one."""
        if self._heartbeats is None:
            return {}
        try:
            return self._heartbeats.read([rank for rank in wait.ranks if rank != self.rank])
        except (RuntimeError, OSError):
            return {}  # the store is gone, which `silent_since` tells


def is_lost(error: RuntimeError) -> bool:
    """Return whether an error says that other ranks did not come or closed their connections.

    A process group tells of both with plain RuntimeErrors that differ only in their texts.
    """
    return any(word in str(error).lower() for word in LOST)


def drain(watch: Watch | None, device: torch.device, also: Callable[[], object] = lambda: None) -> None:
    """Wait for the device until it is done, or until `also` or the watch tells an error."""
    if device.type != "cuda":
        return
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    over(event, watch, also)


def over(event: torch.cuda.Event, watch: Watch | None, also: Callable[[], object] = lambda: None) -> None:
    """Wait until the device has come to an event, or until `also` or the watch tells an error."""
    pause = 0.0
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


def _end(error: str) -> NoReturn:
    print(f"error: {error}", file=sys.stderr, flush=True)
    os._exit(1)
