"""Tests of deadlines and the watch: ranks that are gone, stopped, busy or late, in each place where a rank waits."""

from __future__ import annotations

import math
import queue
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist

from seqpar import DistributedDiT, Guidance
from seqpar.kernels.flags import Late
from seqpar.loop.request import Request
from seqpar.loop.run import begin
from seqpar.mesh.mesh import Axis, Mesh
from seqpar.mesh.processes import _wait_for_all
from seqpar.mesh.watch import (
    BEAT_S,
    KINDS,
    SLICE_S,
    Calls,
    Deadlines,
    Heartbeat,
    HeartbeatFiles,
    Heartbeats,
    Watch,
    is_lost,
)
from seqpar.transports import _contract
from tests.graphs.test_distributed import local
from tests.loop.test_sampling import scheduler
from tests.support.meshes import mesh_for
from tests.support.pool import Pool
from tests.support.tiny import diffusers_dit

SHORT = Deadlines(first_s=1.5, later_s=1.0, host_s=4.0)
CPU = torch.device("cpu")


@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf, 10**7, True, "30", None])
def test_a_deadline_that_is_no_number_of_seconds_is_refused(value: Any) -> None:
    for name in ("first_s", "later_s", "host_s"):
        with pytest.raises(ValueError, match=f"got deadline {name}="):
            Deadlines(**{name: value})


def test_the_first_two_calls_of_a_kind_have_the_longer_deadline() -> None:
    calls = Calls()
    assert [calls.is_first("a") for _ in range(4)] == [True, True, False, False]
    assert calls.is_first("b")
    calls.forget("a")  # as after a capture
    assert calls.is_first("a")
    for kind in range(2 * KINDS):
        calls.is_first(kind)
    assert len(calls._counts) == KINDS


class Ranks:
    """The watches of two ranks in this process, whose heartbeats and checks come at times that a test sets.

    Time stands still but for `sleep`, which stands for `time.sleep` in the watches. alive: ranks that send heartbeats.
    """

    def __init__(self, folder: Path) -> None:
        self.now, self.alive = 100.0, {0, 1}
        self.mine, self.other = self.watches = [Watch(rank, SHORT, HeartbeatFiles(folder)) for rank in range(2)]

    def sleep(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + BEAT_S)
            for rank in sorted(self.alive):
                heartbeats_of(self.watches[rank])._write()
            for rank in sorted(self.alive):
                heartbeats_of(self.watches[rank])._check()

    def leave(self) -> None:
        """End the other rank by itself."""
        self.other.close()
        self.alive.discard(1)


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Ranks]]:
    """Return a function that makes two ranks; time is theirs, and their threads do nothing."""
    pairs: list[Ranks] = []
    monkeypatch.setattr(Heartbeats, "_run", lambda self: None)
    clock = SimpleNamespace(monotonic=lambda: pairs[-1].now, sleep=lambda seconds: pairs[-1].sleep(seconds))
    monkeypatch.setattr("seqpar.mesh.watch.time", clock)

    def make() -> Ranks:
        (folder := tmp_path / str(len(pairs))).mkdir()
        pairs.append(Ranks(folder))
        pairs[-1].sleep(2 * BEAT_S)  # both have been seen
        return pairs[-1]

    yield make
    for ranks in pairs:
        for each in ranks.watches:
            each.close()


class Exchange:
    """An exchange on the host. error: how it ends just after a slice of the wait for it; None: it never does."""

    def __init__(self, ranks: Ranks, error: str | None = None) -> None:
        self.ranks, self.error = ranks, error

    def wait(self, timeout: timedelta | None = None) -> bool:
        if timeout is not None:
            self.ranks.sleep(timeout.total_seconds())
            raise RuntimeError("Operation timed out!")
        if self.error:
            raise RuntimeError(self.error)
        return True

    def is_completed(self) -> bool:
        return self.error is not None


class Event:
    """The end of a call on a device."""

    def __init__(self) -> None:
        self.over, self.error = False, ""

    def record(self) -> None: ...

    def query(self) -> bool:
        if self.error:
            raise RuntimeError(self.error)
        return self.over


def heartbeats_of(watch: Watch) -> Heartbeats:
    assert watch._heartbeats is not None
    return watch._heartbeats


def timed_out(work: Callable[[], object]) -> str:
    with pytest.raises(TimeoutError) as caught:
        work()
    return str(caught.value)


def hosted(ranks: Ranks, error: str | None = None) -> Callable[[], None]:
    """Return a wait of rank 0 for a host exchange."""
    return lambda: ranks.mine.host(Exchange(ranks, error), "an exchange", (0, 1))  # pyright: ignore[reportArgumentType]


LATE = "it is alive but has not entered this call. See the output of rank 1."
STOPPED = "no heartbeat for 2 s, so it crashed or is stopped. See the output of rank 1."
CLOSED = "Connection closed by peer"


def unreachable(*_: object) -> NoReturn:
    raise OSError("connection reset")


def without_store(ranks: Ranks) -> None:
    heartbeats_of(ranks.mine)._store = SimpleNamespace(set=unreachable, check=unreachable)  # pyright: ignore


@pytest.mark.parametrize(
    ("change", "error", "reason", "most_s"),
    [
        (None, None, LATE, SHORT.host_s),
        (None, CLOSED, LATE, 0),
        (lambda ranks: ranks.alive.discard(1), None, STOPPED, SHORT.first_s),
        (lambda ranks: ranks.alive.discard(1), CLOSED, STOPPED, 4 * BEAT_S),
        (Ranks.leave, None, "its process has exited. See the output of rank 1.", 0),
        (without_store, None, "the store of the process group does not answer either. A rank crashed, hangs or", 9),
    ],
    ids=["late", "late, closed", "stopped", "stopped, closed", "exited", "no store"],
)
def test_a_host_exchange_waits_for_a_rank_that_lives_and_not_for_others(
    two: Callable[..., Ranks], change: Callable[[Ranks], None] | None, error: str | None, reason: str, most_s: float
) -> None:
    ranks = two()
    if change is not None:
        change(ranks)
    start = ranks.now
    text = timed_out(hosted(ranks, error))
    assert text.startswith("rank 0: timed out after ")
    assert f"(an exchange): {reason}" in text
    least_s = most_s if most_s in (SHORT.first_s, SHORT.host_s) else 0
    assert least_s <= ranks.now - start <= most_s + 2 * SLICE_S + 4 * BEAT_S * (error is not None)


def test_a_host_exchange_that_ends_between_two_looks_is_not_lost(two: Callable[..., Ranks]) -> None:
    ranks = two()
    hosted(ranks, "")()
    with pytest.raises(RuntimeError, match="shape"):
        hosted(ranks, "shape '[3]' is invalid")()
    assert is_lost(RuntimeError("[...] Connection closed by peer [127.0.0.1]:4748"))
    assert not is_lost(RuntimeError("shape '[3]' is invalid"))


def test_heartbeats_in_files_take_no_more_room(tmp_path: Path) -> None:
    files, key = HeartbeatFiles(tmp_path), "seqpar/heartbeat/0"
    assert not files.check([key])
    with pytest.raises(OSError, match="No such file"):
        files.get(key)
    sizes = set()
    for text in ("a" * 300, "b", "12"):
        files.set(key, text)
        assert files.get(key) == text.encode()
        (file,) = tmp_path.iterdir()
        sizes.add((file.stat().st_size, file.stat().st_mode & 0o777))
    assert sizes == {(301, 0o600)}


def test_a_sign_that_a_stranger_has_written_is_none_and_the_ranks_go_on_telling(tmp_path: Path) -> None:
    """The threads are real here, and so is the store of one of the pairs."""
    store: Any = dist.TCPStore("localhost", 0, 1, True, timedelta(seconds=60))  # pyright: ignore
    for shared in (lambda: HeartbeatFiles(tmp_path), store.clone):
        mine, other = (Heartbeats(rank, shared(), lambda: 60.0, lambda: None) for rank in range(2))
        before = seen(mine, lambda sign: True)
        files = shared()
        with other._lock:
            sign = '{"beat": 1, "left": false, "entered": {}'
            files.set("seqpar/heartbeat/2", sign + "}")  # of another rank, which a bad sign must not hide
            deep = sign + ', "x": ' + "[" * 10**5 + "]" * 10**5 + "}"
            before = mine.read((1,))[1]
            for text in (" ", "{", '{"beat": "x", "left": false, "entered": {}}', '{"beat": 1}', "[" * 10**5, deep):
                files.set("seqpar/heartbeat/1", text)
                assert mine.read((1, 2)) == {1: before, 2: Heartbeat(1, False, {})}
        assert not seen(mine, lambda sign, beat=before.beat: sign.beat > beat).left
        other.enter("calls of x")
        other.leave()
        assert seen(mine, lambda sign: sign.left).entered == {"calls of x": 1}
        mine.leave()


def seen(heartbeats: Heartbeats, wanted: Callable[[Heartbeat], bool]) -> Heartbeat:
    """Return the first sign of rank 1 that is wanted."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        sign = heartbeats.read((1,)).get(1)
        if sign is not None and wanted(sign):
            return sign
        time.sleep(0.01)
    raise AssertionError("no sign")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    """Fake a device: its calls are over or not. What a graph of NCCL waits for is seen by no other timer."""
    events: list[Event] = []
    monkeypatch.setattr(torch.cuda, "Event", lambda: events.append(Event()) or events[-1])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr("seqpar.mesh.watch.GRACE_S", 0.01)
    return events


GPU = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("name", "reason"),
    [("computes", None), ("late", "it is alive but has not entered this call"), ("stopped", "no heartbeat for")],
)
def test_a_call_on_a_device_that_waits_in_vain_is_told_from_one_that_computes(
    two: Callable[..., Ranks], gpu: list[Event], monkeypatch: pytest.MonkeyPatch, name: str, reason: str | None
) -> None:
    aborted, fatal, ranks, group = queue.Queue[object](), queue.Queue[str](), two(), Group()
    monkeypatch.setattr("seqpar.mesh.watch._abort", aborted.put)
    mine, other = ranks.watches
    mine.add(group)  # pyright: ignore[reportArgumentType]
    mine.on_fatal = fatal.put  # pyright: ignore[reportAttributeAccessIssue]
    with mine.call("step 7", (0, 1), False, GPU):
        assert mine.limit_s == SHORT.later_s
    if name != "late":
        with other.call("step 7", (0, 1), False, CPU):
            pass
    ranks.alive -= {1} if name == "stopped" else set()
    ranks.sleep(2 * SHORT.later_s)
    if reason is None:
        assert mine.failed is None
        gpu[-1].over = True
        ranks.sleep(2 * SHORT.host_s)
        mine.raise_if_failed()
        assert aborted.empty()
        return
    assert aborted.get(timeout=60) is group
    text = fatal.get(timeout=60)  # nothing had raised the error in the time of grace
    assert text.startswith("rank 0: timed out after")
    assert f"waiting for rank 1 (step 7): {reason}" in text
    assert timed_out(mine.raise_if_failed) == text
    assert timed_out(mine.call("step 8", (0, 1), False, GPU).__enter__) == text


class Group:
    """A process group."""


def test_a_device_that_hangs_is_noticed_though_all_ranks_live(two: Callable[..., Ranks], gpu: list[Event]) -> None:
    ranks = two()
    for each in ranks.watches:
        each.on_fatal = lambda error: None  # pyright: ignore[reportAttributeAccessIssue]
        with each.call("step 7", (0, 1), False, GPU):
            pass
    ranks.sleep(SHORT.host_s - BEAT_S)
    ranks.mine.raise_if_failed()
    ranks.sleep(3 * BEAT_S)
    assert "(step 7): all send heartbeats, so a device may hang" in timed_out(ranks.mine.raise_if_failed)


def test_a_call_that_holds_the_host_up_while_it_is_queued_is_watched(
    two: Callable[..., Ranks], gpu: list[Event]
) -> None:
    """As NCCL's first exchange does, which waits on the host until all ranks have come."""
    ranks, fatal = two(), queue.Queue[str]()
    ranks.mine.on_fatal = fatal.put  # pyright: ignore[reportAttributeAccessIssue]
    ranks.alive.discard(1)
    with ranks.mine.call("step 1", (0, 1), False, GPU):
        ranks.sleep(SHORT.later_s + 2 * BEAT_S)
    assert "waiting for rank 1 (step 1): no heartbeat for" in fatal.get(timeout=60)


def test_a_device_that_fails_does_not_end_the_heartbeats(two: Callable[..., Ranks], gpu: list[Event]) -> None:
    ranks = two()
    with ranks.mine.call("step 1", (0, 1), False, GPU):
        pass
    gpu[-1].error = "CUDA error: an illegal memory access was encountered"
    before = heartbeats_of(ranks.other).read((0,))[0].beat
    ranks.sleep(2 * SHORT.host_s)
    assert heartbeats_of(ranks.other).read((0,))[0].beat > before
    ranks.mine.raise_if_failed()


def test_deadlines_change_from_call_to_call_also_on_devices() -> None:
    class Moves:
        def __init__(self) -> None:
            self.late, self.limits = Late.on(CPU, 9.0), []

        def limit(self, deadline_s: float) -> None:
            self.limits.append(deadline_s)

    watch, moves = Watch(0, SHORT, None), Moves()
    watch.follow(moves)
    assert watch.limit_s == SHORT.first_s
    for is_first in (True, False, False):
        with watch.call("a call", (0, 1), is_first, CPU), watch.call("within it", (0, 1), True, CPU):
            assert watch.limit_s == (SHORT.first_s if is_first else SHORT.later_s)
    assert moves.limits == [SHORT.first_s, SHORT.later_s, SHORT.later_s]
    before = moves.late.note.data_ptr()
    moves.late.limit(0.5)
    assert (moves.late.note.tolist(), moves.late.note.data_ptr()) == ([0, 500_000_000], before)  # where kernels read it


def test_a_rank_that_never_starts_is_named() -> None:
    store = dist.TCPStore("localhost", 0, 1, True, timedelta(seconds=10))  # pyright: ignore[reportPrivateImportUsage]
    store.set("seqpar/started/0/2", "1")
    text = timed_out(lambda: _wait_for_all(store, 0, 3, 0.5))
    assert text.startswith("rank 0: timed out after 0.5 s waiting for rank 1 of 3 to start")


def left_alone(rank: int, world: int, device: torch.device, transport: str, port: int, way: str) -> tuple[str, float]:
    """Do work on a model three times, and once more without rank 1; return rank 0's error, and its seconds.

    way: calls of the model, or steps of the loop, which are replays of a CUDA graph on GPUs. The signs of life go
    through a store of their own, as the pool's store is a file.
    """
    store: Any = dist.TCPStore("localhost", port, world, rank == 0, timedelta(seconds=60))  # pyright: ignore
    mesh = mesh_for("ulysses", world, device)
    watch = Watch(rank, Deadlines(first_s=60, later_s=3, host_s=60), store.clone())
    for group in {mesh.world.group, mesh.sequence.group} - {None}:
        watch.add(group)  # pyright: ignore[reportArgumentType]
    mesh = _watched(mesh, watch)
    try:
        model = diffusers_dit().to(device, torch.bfloat16 if device.type == "cuda" else torch.float64)
        dit = DistributedDiT(model, mesh, "ulysses", local(device), transport)
        x, t = torch.ones(1, 4, 8, 8, device=device, dtype=dit.dtype), torch.tensor([3], device=device)
        work = _steps(dit) if way == "steps" else lambda: dit(x, t, class_labels=t)
        for _ in range(3):
            work()
        mesh.collect(0, int)
        start = time.monotonic()
        if rank == 0:
            with pytest.raises(TimeoutError) as caught:
                _ended(dit, work)
            store.set("ended", "1")
            return str(caught.value), time.monotonic() - start
        if way == "calls":
            dit.inputs_of_rank_0({"hidden_states": x, "timestep": t, "class_labels": t})
        store.wait(["ended"], timedelta(seconds=50))  # a rank that leaves is noticed before the deadline
        return "nothing", 0.0
    finally:
        watch.close()


def _steps(dit: DistributedDiT) -> Callable[[], object]:
    """Return what does a step of a run; on GPUs it is a replay, which no timer of NCCL's sees."""
    conditions = {"class_labels": torch.tensor([3])}
    run = begin(dit, Request(scheduler(), torch.ones(1, 4, 8, 8), conditions, 5, Guidance(3.0)))
    if dit.device.type == "cuda":
        run.capture()
    return run.step


def _ended(dit: DistributedDiT, work: Callable[[], object]) -> None:
    work()
    dit.wait()  # on GPUs the work is only queued


def _watched(mesh: Mesh, watch: Watch) -> Mesh:
    """Return the mesh with another watch on all of its axes."""
    axes = {field.name: getattr(mesh, field.name) for field in fields(mesh)}
    mine = {name: replace(x, watch=x.watch and watch) for name, x in axes.items() if isinstance(x, Axis)}
    return replace(mesh, **mine)


# on CPUs a way for each transport is enough; on GPUs other timers see replays and calls
@pytest.mark.parametrize(
    ("transport", "way"),
    [
        pytest.param(transport, way, marks=[pytest.mark.gpu] if (way == "calls") == (transport == "peer") else [])
        for transport in _contract.names()
        for way in ("calls", "steps")
    ],
)
def test_a_call_without_one_rank_ends_after_the_later_deadline_and_names_it(
    ranks: Pool, transport: str, way: str
) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    (text, seconds), (other, _) = ranks.run(2, left_alone, transport, port, way)
    if transport == "collective":
        ranks.close()  # the group of an exchange that timed out is not used again
    assert text.startswith("rank 0: timed out after ")
    nccl = ranks.device == "cuda" and transport == "collective"
    what = ("step 4 of 5" if way == "steps" else "a call of the transformer") if nccl else "axis ulysses, "
    assert f"waiting for rank 1 ({what}" in text
    assert 3 <= seconds < 50  # not the first deadline
    assert other == "nothing"
