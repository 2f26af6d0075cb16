"""What a process says at its end: one line, and a code that tells the user's mistakes from what went wrong."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from diffusers.schedulers.scheduling_ddim import DDIMScheduler

from seqpar import DistributedDiT, Guidance, sample
from seqpar.cli.exits import INTERRUPTED_S, LONGEST, Report, cause_of, guarded, kind_of, line_of
from seqpar.cli.signals import Stopped
from seqpar.local import reference
from seqpar.mesh import processes
from seqpar.mesh.watch import LostRankError
from tests.support.forks import Forked
from tests.support.pool import server
from tests.support.tiny import diffusers_dit

NO_MEMORY = "[enforce fail at alloc_cpu.cpp:130] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (ValueError("got x"), "mistake", 2),
        (FileNotFoundError(errno.ENOENT, "No such file", "x"), "mistake", 2),
        (PermissionError(errno.EACCES, "Permission denied", "x"), "mistake", 2),
        (TimeoutError("rank 1 did not come"), "failure", 1),
        (OSError(errno.ENOSPC, "No space left on device", "x.png"), "failure", 1),
        (OSError(errno.EFBIG, "File too large", "x.png"), "failure", 1),  # as under `ulimit -f`
        (ConnectionResetError("gone"), "failure", 1),
        (LostRankError("rank 1 did not come"), "lost", 1),
        (RuntimeError("[gloo] Connection closed by peer"), "lost", 1),
        (dist.DistBackendError("NCCL error: remote process exited"), "lost", 1),
        (dist.DistStoreError("No space left on device"), "failure", 1),
        (FloatingPointError("latents stopped being finite"), "failure", 1),
        (torch.OutOfMemoryError("CUDA out of memory"), "failure", 1),
        (RuntimeError(NO_MEMORY), "failure", 1),
        (MemoryError(), "failure", 1),
        (RuntimeError("shape"), "bug", 1),
        (KeyError("x"), "bug", 1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_code_tells_mistakes_from_what_went_wrong(error: Exception, kind: str, code: int) -> None:
    try:
        raise error
    except Exception as raised:
        report = Report.of(raised)
    assert (report.kind, report.code) == (kind, code)
    assert ("Traceback" in report.text) == (kind == "bug")
    assert report.text.startswith("error: ") or kind == "bug"


def test_a_value_error_of_a_step_is_a_bug_and_one_of_the_arguments_or_the_caller_a_mistake(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dit = DistributedDiT(diffusers_dit(), local="reference")
    noise, labels = torch.zeros(1, 4, 4, 4), {"class_labels": torch.tensor([1])}

    def kind(on_step: Callable[[int], None], **settings: Any) -> tuple[str, str]:
        with pytest.raises((ValueError, RuntimeError)) as raised:
            sample(dit, DDIMScheduler(), noise, labels, guidance=Guidance(1.0), on_step=on_step, **settings)
        return kind_of(raised.value), str(raised.value)

    def failing(*_: object) -> NoReturn:
        raise ValueError("got 3, expected 4")

    assert kind(lambda index: None, steps=0) == ("mistake", "got steps=0, expected a whole number from 1 to 10000")
    assert kind(failing, steps=2) == ("mistake", "got 3, expected 4")
    monkeypatch.setattr(reference, "attend", failing)
    dit.release()
    assert kind(lambda index: None, steps=2) == ("bug", "step 1 failed: got 3, expected 4")


def raised(*errors: tuple[BaseException, BaseException | None]) -> BaseException:
    """Return the last of some errors, each raised while the one before is handled; with its cause."""
    last: BaseException | None = None
    for error, cause in errors:
        error.__context__ = cause or last
        if cause is not None:
            error.__cause__, cause.__context__ = cause, last
        last = error
    assert last is not None
    return last


@pytest.mark.parametrize(
    ("errors", "cause"),
    [
        ([(ValueError("got x"), None), (LostRankError("rank 1"), RuntimeError("Connection closed by peer"))], "got x"),
        ([(Stopped(15), None), (LostRankError("rank 1"), None)], "15"),
        ([(KeyError("x"), None), (RuntimeError("Connection reset"), None), (LostRankError("rank 1"), None)], "'x'"),
        ([(LostRankError("rank 1"), RuntimeError("aborted"))], "rank 1"),  # what says so is no cause
        ([(KeyError("x"), None), (ValueError("got x"), None)], "got x"),
    ],
)
def test_an_error_is_told_and_not_the_rank_that_was_lost_while_it_was_handled(errors: Any, cause: str) -> None:
    """As where memory is released after an error, which needs the other ranks."""
    assert str(cause_of(raised(*errors))) == cause


def test_a_message_is_one_line_that_terminals_show_as_it_is_and_keeps_its_ends() -> None:
    texts = ["a\n\n  b\r\nc", "\x1b[31mred\x00\u202e", "", "a caf\u00e9"]
    lines = ["a; b; c", r"\x1b[31mred\x00\u202e", "ValueError", "a caf\u00e9"]
    assert [line_of(ValueError(text)) for text in texts] == lines
    line = line_of(ValueError(f"got {'x' * 10**6}, expected y"))
    assert len(line) <= LONGEST + 5
    assert line.startswith("got x")
    assert line.endswith(", expected y")


def stuck() -> None:
    """Lock a mutex twice in the main thread, so that it waits in C for ever and no handler of Python's runs."""
    how, handled = sys.argv[1], []

    def work(rank: int) -> None:
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
        if how.endswith("unread"):  # as where the reader of a pipe has left
            reader, writer = os.pipe()
            os.dup2(writer, 2)
            os.close(reader)
        if how == "handled":
            signal.signal(signal.SIGINT, lambda *_: handled.append(print("handled", file=sys.stderr)))
        print("ready", flush=True)
        while how == "handled" and not handled:
            time.sleep(0.1)
        if how == "handled":
            time.sleep(INTERRUPTED_S + 1)
            return
        if how.startswith("vain"):
            processes.watch()._fail("rank 0 waited in vain for rank 1")
        library.pthread_mutex_lock(mutex)
        library.pthread_mutex_lock(mutex)

    guarded(work)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="C's mutexes have other names and sizes")
def test_a_process_that_waits_in_native_code_ends_after_ctrl_c_and_after_a_vain_wait(tmp_path: Path) -> None:
    """As the host does while NCCL makes a communicator, or while it synchronizes with a GPU."""
    server()
    numbers = {"interrupted": signal.SIGINT, "terminated": signal.SIGTERM, "hung up": signal.SIGHUP}
    cases = (*numbers, "interrupted unread", "vain", "vain unread", "handled")
    jobs = {how: Forked(stuck, (how,), os.environ, tmp_path / how, tmp_path / f"{how} errors") for how in cases}
    start = 0.0
    try:
        for how, job in jobs.items():
            end = time.monotonic() + 60
            while not ((tmp_path / how).exists() and "ready" in (tmp_path / how).read_text()):
                assert time.monotonic() < end, (tmp_path / f"{how} errors").read_text()
                time.sleep(0.02)
            start = time.monotonic()
            if not how.startswith("vain"):
                os.kill(job.pid, numbers.get(how, signal.SIGINT))
        codes = {how: job.wait(60) for how, job in jobs.items()}
        assert time.monotonic() - start >= INTERRUPTED_S
    finally:
        for job in jobs.values():
            job.wait(0)  # which kills what still runs
    expected = {"interrupted": 130, "terminated": 143, "hung up": 129}
    assert codes == {**expected, "interrupted unread": 130, "vain": 1, "vain unread": 1, "handled": 0}
    last_lines = {
        **dict.fromkeys(expected, "stopped"),
        "vain": "error: rank 0 waited in vain for rank 1",
        "handled": "handled",  # as by torchrun's agent
    }
    for how, line in last_lines.items():
        assert (tmp_path / f"{how} errors").read_text().splitlines()[-1] == line


def late() -> None:
    @contextmanager
    def interrupted(leave: object, grace_s: float) -> Iterator[None]:
        yield
        raise Stopped(signal.SIGHUP)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("seqpar.cli.exits.ends_when_stopped", interrupted)
        guarded(lambda rank: None)


def test_a_signal_that_comes_as_a_rank_ends_is_no_traceback(tmp_path: Path) -> None:
    server()
    job = Forked(late, (), os.environ, tmp_path / "output", tmp_path / "errors")
    assert job.wait(60) == 128 + signal.SIGHUP
    assert (tmp_path / "errors").read_text() == "stopped\n"
