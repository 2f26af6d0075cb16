"""What a process says at its end: one line, and a code that tells the user's mistakes from what went wrong."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, NoReturn

import pytest
import torch
from diffusers.schedulers.scheduling_ddim import DDIMScheduler

from seqpar import DistributedDiT, Guidance, sample
from seqpar.cli.exits import INTERRUPTED_S, LONGEST, Report, kind_of, line_of
from seqpar.cli.stopped import RUN, end_ranks, stopped_ranks
from seqpar.local import sdpa
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
    dit, noise, labels = DistributedDiT(diffusers_dit()), torch.zeros(1, 4, 4, 4), {"class_labels": torch.tensor([1])}

    def kind(on_step: Callable[[int], None], **settings: Any) -> tuple[str, str]:
        with pytest.raises((ValueError, RuntimeError)) as raised:
            sample(dit, DDIMScheduler(), noise, labels, guidance=Guidance(1.0), on_step=on_step, **settings)
        return kind_of(raised.value), str(raised.value)

    def failing(*_: object) -> NoReturn:
        raise ValueError("got 3, expected 4")

    assert kind(lambda index: None, steps=0) == ("mistake", "got steps=0, expected a whole number from 1 to 10000")
    assert kind(failing, steps=2) == ("mistake", "got 3, expected 4")
    monkeypatch.setattr(sdpa, "attend", failing)
    dit.release()
    assert kind(lambda index: None, steps=2) == ("bug", "step 1 failed: got 3, expected 4")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a\n\n  b\r\nc", "a; b; c"),
        ("\x1b[31mred\x00\u202e", r"\x1b[31mred\x00\u202e"),
        ("", "ValueError"),
        ("a caf\u00e9", "a caf\u00e9"),
    ],
)
def test_a_message_is_one_line_that_terminals_show_as_it_is(text: str, line: str) -> None:
    assert line_of(ValueError(text)) == line


def test_a_message_that_quotes_a_long_flag_keeps_its_ends() -> None:
    line = line_of(ValueError(f"got {'x' * 10**6}, expected y"))
    assert len(line) <= LONGEST + 5
    assert line.startswith("got x")
    assert line.endswith(", expected y")


# the main thread locks a mutex twice, so that it waits in C for ever and no handler of Python's runs
STUCK = """
import ctypes, signal, sys, time
import torch.distributed as dist
from seqpar import processes
from seqpar.cli.exits import guarded

signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell runs the tests in the background

def work(rank):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(mutex)
    if sys.argv[1] == "handled":
        signal.signal(signal.SIGINT, lambda *_: print("handled", file=sys.stderr))
        library.pthread_mutex_unlock(mutex)
    print("ready", flush=True)
    if sys.argv[1] == "handled":
        time.sleep(4)
    if sys.argv[1] == "vain":
        processes.watch()._fail("rank 0 waited in vain for rank 1")
    library.pthread_mutex_lock(mutex)

guarded(work)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="C's mutexes have other names and sizes")
def test_a_process_that_waits_in_native_code_ends_after_ctrl_c_and_after_a_vain_wait() -> None:
    """As the host does while NCCL makes a communicator, or while it synchronizes with a GPU."""
    path = os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": {**os.environ, "PYTHONPATH": path}}
    words = ("interrupted", "unread", "vain", "vain unread", "handled")
    with ExitStack() as opened:
        jobs = {word: subprocess.Popen([sys.executable, "-c", STUCK, *word.split()], **pipes) for word in words}
        for job in jobs.values():
            opened.enter_context(job)
        for job in jobs.values():
            opened.callback(job.kill)
        for word in ("unread", "vain unread"):  # as when the reader of a pipe has left
            _pipe(jobs[word].stderr).close()
        start = time.monotonic()
        for word in ("interrupted", "unread", "handled"):
            assert _pipe(jobs[word].stdout).readline() == b"ready\n"
            start = time.monotonic()
            jobs[word].send_signal(signal.SIGINT)
        codes = {word: jobs[word].wait(60) for word in words}
        assert time.monotonic() - start >= INTERRUPTED_S
        told = {word: _pipe(jobs[word].stderr).read().decode() for word in ("interrupted", "vain", "handled")}
    assert codes == {"interrupted": 130, "unread": 130, "vain": 1, "vain unread": 1, "handled": 0}
    assert {word: text.splitlines()[-1] for word, text in told.items()} == {
        "interrupted": "stopped",
        "vain": "error: rank 0 waited in vain for rank 1",
        "handled": "handled",  # as by torchrun's agent
    }


def _pipe(end: IO[bytes] | None) -> IO[bytes]:
    assert end is not None
    return end


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds processes in /proc")
def test_stopped_ranks_are_found_and_ended_whatever_their_names_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = os.fsencode(tmp_path) + b"/\xff\xfe ) T"
    shutil.copy(os.fsencode(shutil.which("sleep") or ""), program)
    run = {name: f"{name} here" for name in RUN}
    environments = {
        "rank 0": {**run, "RANK": "0"},
        "rank 1": {**run, "RANK": "1"},
        "of another job": {**run, RUN[2]: "1", "RANK": "1"},
        "no rank": run,
        "not of torchrun": {"RANK": "1"},
    }
    others = {name: subprocess.Popen([program, b"60"], env=env) for name, env in environments.items()}
    monkeypatch.setattr(os, "getppid", os.getpid)  # as if this process were one of the ranks
    monkeypatch.delenv(RUN[0], raising=False)
    assert stopped_ranks() == []
    for name, value in run.items():
        monkeypatch.setenv(name, value)
    try:
        stopped = {name: each for name, each in others.items() if name != "rank 0"}
        for each in stopped.values():
            each.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, each.pid, os.WSTOPPED)
        assert stopped_ranks() == [stopped["rank 1"].pid]
        end_ranks([each.pid for each in others.values()])  # numbers that may have gone to others
        assert stopped["rank 1"].wait(10) == -signal.SIGKILL
        end_ranks([stopped["rank 1"].pid])  # it has ended
        assert {name for name, each in others.items() if each.poll() is None} == {*others} - {"rank 1"}
    finally:
        for each in others.values():
            each.kill()
            each.wait()
