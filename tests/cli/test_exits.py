"""What a process says at its end: one line, and a code that tells the user's mistakes from what went wrong."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from seqpar.cli.exits import LONGEST, Report, line_of

NO_MEMORY = "[enforce fail at alloc_cpu.cpp:130] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (ValueError("got x"), "mistake", 2),
        (FileNotFoundError(errno.ENOENT, "No such file", "x"), "mistake", 2),
        (PermissionError(errno.EACCES, "Permission denied", "x"), "mistake", 2),
        (TimeoutError("rank 1 did not come"), "failure", 1),
        (OSError(errno.ENOSPC, "No space left on device", "x.png"), "failure", 1),
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
    settings = {"env": {**os.environ, "PYTHONPATH": path}, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = [sys.executable, "-c", STUCK]
    words = ("interrupted", "vain", "handled")
    jobs = {word: subprocess.Popen([*command, word], text=True, **settings) for word in words}
    for word in ("interrupted", "handled"):
        output = jobs[word].stdout
        assert output is not None
        assert output.readline() == "ready\n"
        jobs[word].send_signal(signal.SIGINT)
    ends = {word: (job.communicate(timeout=60)[1].splitlines()[-1], job.returncode) for word, job in jobs.items()}
    assert ends == {
        "interrupted": ("stopped", 130),
        "vain": ("error: rank 0 waited in vain for rank 1", 1),
        "handled": ("handled", 0),  # as by torchrun's agent
    }
