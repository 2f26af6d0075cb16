"""Tests of deadlines and the watch: ranks that are gone, stopped, busy or late, in each place where a rank waits."""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from seqpar import DistributedDiT, Guidance
from seqpar.deadlines import KINDS, Calls, Deadlines
from seqpar.kernels.flags import Late
from seqpar.mesh import Axis, Mesh
from seqpar.processes import _gather_all
from seqpar.pulse import Files, Sign
from seqpar.sampling.request import Request
from seqpar.sampling.run import begin
from seqpar.transports import _folder
from seqpar.waits import is_lost
from seqpar.watch import Watch
from tests.engine.test_distributed import local
from tests.sampling.test_sampling import scheduler
from tests.support.meshes import mesh_for
from tests.support.pool import Pool
from tests.support.tiny import diffusers_dit

SHORT = Deadlines(first_s=1.5, later_s=1.0, host_s=4.0)
CPU = torch.device("cpu")


@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf, 10**7, True, "30", None])
def test_a_deadline_that_is_no_number_of_seconds_is_refused(value: Any) -> None:
    for name in ("first_s", "later_s", "host_s"):
        with pytest.raises(ValueError, match=f"got a deadline {name}="):
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


class Never:
    """An exchange on the host that never ends."""

    def wait(self, timeout: timedelta) -> None:
        time.sleep(timeout.total_seconds())
        raise RuntimeError("Operation timed out!")

    def is_completed(self) -> bool:
        return False


class Just:
    """An exchange on the host that ends just after a slice of the wait for it, well or with an error."""

    def __init__(self, error: str = "") -> None:
        self.error = error

    def wait(self, timeout: timedelta | None = None) -> bool:
        if timeout is not None or self.error:
            raise RuntimeError("Operation timed out!" if timeout is not None else self.error)
        return True

    def is_completed(self) -> bool:
        return True


class Event:
    """A call on a device that has ended or not."""

    def __init__(self) -> None:
        self.over = False

    def record(self) -> None: ...

    def query(self) -> bool:
        return self.over


@contextmanager
def watches(folder: Path | None = None) -> Iterator[list[Watch]]:
    """Yield the watches of two ranks that share a folder or, without one, a store, all in this process."""
    store = dist.TCPStore("localhost", 0, 1, True, timedelta(seconds=10))  # pyright: ignore[reportPrivateImportUsage]
    made = [Watch(rank, 2, SHORT, Files(folder) if folder else _connection(store)) for rank in range(2)]
    try:
        yield made
    finally:
        for each in made:
            each.close()


def _connection(store: Any) -> Any:
    return store.clone()


def stop(watch: Watch) -> None:
    """Let a rank show no more signs of life, as one that was stopped."""
    assert watch._pulse is not None
    watch._pulse._over.set()


def told(work: Callable[[], object]) -> tuple[str, float]:
    """Return the TimeoutError of some work, and the seconds until then."""
    start = time.monotonic()
    with pytest.raises(TimeoutError) as caught:
        work()
    return str(caught.value), time.monotonic() - start


def test_a_host_exchange_that_ends_between_two_looks_is_not_lost() -> None:
    mine = Watch(0, 2, SHORT, None)
    mine.host(Just(), "an exchange", (0, 1))  # pyright: ignore[reportArgumentType]
    with pytest.raises(TimeoutError, match="in vain for another rank"):
        mine.host(Just("Connection closed by peer"), "an exchange", (0, 1))  # pyright: ignore[reportArgumentType]
    with pytest.raises(RuntimeError, match="shape"):
        mine.host(Just("shape '[3]' is invalid"), "an exchange", (0, 1))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("board", ["store", "files"])
def test_a_host_exchange_waits_for_a_rank_that_lives_and_not_for_others(board: str, tmp_path: Path) -> None:
    folders = [tmp_path / name if board == "files" else None for name in ("busy", "gone", "stopped")]
    for folder in folders:
        if folder is not None:
            folder.mkdir()
    with (
        watches(folders[0]) as (mine, other),
        watches(folders[1]) as (left, gone),
        watches(folders[2]) as (here, stopped),
    ):
        jobs = {
            "busy": lambda: mine.host(Never(), "an exchange", (0, 1)),  # pyright: ignore[reportArgumentType]
            "gone": lambda: left.host(Never(), "an exchange", (0, 1)),  # pyright: ignore[reportArgumentType]
            "stopped": lambda: here.host(Never(), "an exchange", (0, 1)),  # pyright: ignore[reportArgumentType]
        }
        time.sleep(1.2)  # every rank has been seen
        gone.close()
        stop(stopped)
        found: dict[str, tuple[str, float]] = {}
        threads = [
            threading.Thread(target=lambda n=n, job=job: found.update({n: told(job)})) for n, job in jobs.items()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert other.failed is None
    text, seconds = found["gone"]
    assert "rank 0 waited" in text
    assert "in vain for rank 1 (an exchange); its process has ended by itself" in text
    assert seconds < SHORT.first_s
    text, seconds = found["stopped"]
    assert "in vain for rank 1 (an exchange); it has shown no sign of life for" in text
    assert SHORT.first_s <= seconds < SHORT.host_s
    text, seconds = found["busy"]
    assert "another rank of [0, 1] (an exchange); all show signs of life" in text
    assert seconds >= SHORT.host_s


def test_signs_in_files_take_no_more_room_and_are_read_whole(tmp_path: Path) -> None:
    files, key = Files(tmp_path), "seqpar/pulse/0"
    assert not files.check([key])
    with pytest.raises(OSError, match="No such file"):
        files.get(key)
    for text in ("a" * 300, "b"):
        files.set(key, text)
        assert files.get(key) == text.encode()
    (file,) = tmp_path.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    size = file.stat().st_size
    for count in range(1000):
        files.set(key, str(count))
    assert file.stat().st_size == size
    whole = file.read_bytes()
    for torn in (whole[:10], b"", whole[:3], whole[:8] + b"x" + whole[9:]):
        file.write_bytes(torn)
        with pytest.raises(ValueError, match="half a sign"):
            files.get(key)


def test_a_sign_that_a_stranger_has_written_is_none_and_the_ranks_go_on_telling(tmp_path: Path) -> None:
    with watches(tmp_path) as (mine, other):
        time.sleep(0.6)
        before = mine._signs((1,))[1]
        assert other._pulse is not None
        with other._pulse._lock:
            files, sign = Files(tmp_path), '{"beat": 1, "left": false, "begun": {}'
            files.set("seqpar/pulse/2", sign + "}")  # of another rank, which a bad sign must not hide
            deep = sign + ', "x": ' + "[" * 10**5 + "]" * 10**5 + "}"
            for text in ("", "{", '{"beat": "x", "left": false, "begun": {}}', '{"beat": 1}', "[" * 10**5, deep):
                files.set("seqpar/pulse/1", text or " ")
                assert mine._signs((1, 2)) == {1: before, 2: Sign(1, False, {})}
            (tmp_path / "seqpar-pulse-1.sign").write_bytes(b"half")
            assert mine._signs((1, 2)) == {1: before, 2: Sign(1, False, {})}
        time.sleep(1.2)
        assert mine._signs((1,))[1].beat > before.beat


def test_a_call_on_a_device_that_waits_in_vain_is_told_from_one_that_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is faked: its event is over or not. What a graph of NCCL waits for is seen by no other timer."""
    gpu, ended, words, events = torch.device("cuda", 0), [], [], []
    monkeypatch.setattr(torch.cuda, "Event", lambda: events.append(Event()) or events[-1])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr("seqpar.watch._abort", ended.append)
    monkeypatch.setattr("seqpar.watch.GRACE_S", 0.2)
    with watches() as late, watches() as stopped, watches() as computes:
        for name, (mine, other) in {"late": late, "stopped": stopped, "computes": computes}.items():
            mine.groups.append(name)  # pyright: ignore[reportArgumentType]
            mine.last_words = words.append  # pyright: ignore[reportAttributeAccessIssue]
            with mine.call("step 7", (0, 1), False, gpu):
                assert mine.limit_s == SHORT.later_s
            if name != "late":
                with other.call("step 7", (0, 1), False, CPU):
                    pass
        stop(stopped[1])
        time.sleep(2.6)
        assert computes[0].failed is None
        events[-1].over = True
        computes[0].raise_if_failed()
        assert sorted(ended) == ["late", "stopped"]  # the groups whose exchanges were aborted
        reasons = {"it lives, but has not begun this call": late[0], "it has shown no sign of life": stopped[0]}
        for reason, mine in reasons.items():
            text, _ = told(mine.raise_if_failed)
            assert "rank 0 waited" in text
            assert f"in vain for rank 1 (step 7); {reason}" in text
            assert text in words  # nothing had raised the error in the time of grace
            assert told(lambda mine=mine: mine.call("step 8", (0, 1), False, gpu).__enter__())[0] == text


def test_a_call_that_holds_the_host_up_while_it_is_queued_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """As NCCL's first exchange does, which waits on the host until all ranks have come."""
    gpu, words = torch.device("cuda", 0), []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr("seqpar.watch.GRACE_S", 0.2)
    with watches() as (mine, other):
        mine.last_words = words.append  # pyright: ignore[reportAttributeAccessIssue]
        time.sleep(0.6)
        stop(other)
        with mine.call("step 1", (0, 1), False, gpu):
            time.sleep(SHORT.later_s + 1.6)
        assert "in vain for rank 1 (step 1); it has shown no sign of life" in words[0]


def test_a_device_that_fails_does_not_end_the_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Event):
        def query(self) -> bool:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "Event", Broken)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with watches() as (mine, other):
        with mine.call("step 1", (0, 1), False, torch.device("cuda", 0)):
            pass
        mine.deadlines = replace(SHORT, later_s=2.5)
        time.sleep(0.7)
        assert mine._pulse is not None
        before = other._signs((0,))[0].beat
        time.sleep(1.2)
        assert other._signs((0,))[0].beat > before
        assert mine._pulse._store.timeout.total_seconds() == 2.5  # pyright: ignore[reportAttributeAccessIssue]


def test_deadlines_change_from_call_to_call_also_on_devices() -> None:
    class Moves:
        def __init__(self) -> None:
            self.late, self.limits = Late.on(CPU, 9.0), []

        def limit(self, deadline_s: float) -> None:
            self.limits.append(deadline_s)

    watch, moves = Watch(0, 2, SHORT, None), Moves()
    watch.follow(moves)
    assert watch.limit_s == SHORT.first_s
    for is_first in (True, False, False):
        with watch.call("a call", (0, 1), is_first, CPU), watch.call("within it", (0, 1), True, CPU):
            assert watch.limit_s == (SHORT.first_s if is_first else SHORT.later_s)
    assert moves.limits == [SHORT.first_s, SHORT.later_s, SHORT.later_s]
    before = moves.late.note.data_ptr()
    moves.late.limit(0.5)
    assert (moves.late.note.tolist(), moves.late.note.data_ptr()) == ([0, 500_000_000], before)  # where kernels read it


def test_only_errors_of_lost_ranks_are_taken_for_those() -> None:
    assert is_lost(RuntimeError("[...] Connection closed by peer [127.0.0.1]:4748"))
    assert not is_lost(RuntimeError("shape '[3]' is invalid"))


def test_a_rank_that_never_starts_is_named() -> None:
    store = dist.TCPStore("localhost", 0, 1, True, timedelta(seconds=10))  # pyright: ignore[reportPrivateImportUsage]
    store.set("seqpar/started/0/2", "1")
    text, seconds = told(lambda: _gather_all(store, 0, 3, 0.5))
    assert text.startswith("rank 0 waited 0.5 s in vain for rank 1 of 3 to start")
    assert seconds < 3


def left_alone(
    rank: int, world: int, device: torch.device, transport: str, port: int, way: str
) -> tuple[str, float, bool]:
    """Do work on a model three times, and once more without rank 1; return rank 0's error, seconds, whether quick.

    way: calls of the model, or steps of the loop, which are replays of a CUDA graph on GPUs. The signs of life go
    through a store of their own, as the pool's store is a file.
    """
    store = dist.TCPStore("localhost", port, world, rank == 0, timedelta(seconds=10))  # pyright: ignore
    mesh = mesh_for("ulysses", world, device)
    watch = Watch(rank, world, Deadlines(first_s=30, later_s=1, host_s=60), _connection(store))
    watch.groups += [group for group in {mesh.world.group, mesh.sequence.group} if group is not None]
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
            seconds = time.monotonic() - start
            return str(caught.value), seconds, seconds < 10  # not the first deadline
        if way == "calls":
            dit._inputs.of_rank_0({"hidden_states": x, "timestep": t, "class_labels": t})
        time.sleep(3.2)
        return "nothing", 0.0, True
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
    return replace(
        mesh, **{name: replace(x, watch=x.watch and watch) for name, x in axes.items() if isinstance(x, Axis)}
    )


@pytest.mark.parametrize("way", ["calls", "steps"])
@pytest.mark.parametrize("transport", _folder.names())
def test_a_call_without_one_rank_ends_after_the_later_deadline_and_names_it(
    ranks: Pool, transport: str, way: str
) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    (text, seconds, quick), (other, _, _) = ranks.run(2, left_alone, transport, port, way)
    assert "rank 0 waited 1" in text
    nccl = ranks.device == "cuda" and transport == "collective"
    what = ("step 4 of 5" if way == "steps" else "a call of the transformer") if nccl else "axis ulysses, "
    assert f"in vain for rank 1 ({what}" in text
    assert seconds >= 1
    assert quick
    assert other == "nothing"
    if transport == "collective":
        ranks.close()  # the group of an exchange that timed out is not used again
