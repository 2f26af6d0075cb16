"""Ranks that `seqpar` starts: however they end, one message, a non-zero exit, and no rank that stays."""

from __future__ import annotations

import errno
import os
import re
import resource
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest
import torch
import torch.distributed as dist

from launch.benches.fault_job import BAR
from seqpar.cli import exits
from seqpar.cli.exits import LONGEST_TRACE, Report, Reports, kind_of
from seqpar.cli.main import command, main, sample
from seqpar.cli.ranks import start, verdict, wanted
from seqpar.cli.summary import Progress
from seqpar.mesh.watch import Watch
from tests.cli.processes import LIMIT_S, LONG, running, seqpar, torchrun

RIGHT = ("--steps", "2", "--size", "64")
FAILURE = Report("failure", "error: full", 1.0)
LOST = Report("lost", "error: rank 0 waited in vain for rank 1", 0.0)
MISTAKE, BUG = Report("mistake", "error: got x", 2.0), Report("bug", "Traceback: x", 1.0)
LATER = Report("bug", "y", 3.0)


def gone(pids: list[int]) -> bool:
    end = time.monotonic() + 20
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    return not any(map(alive, pids))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="finds ranks in /proc")
def test_ctrl_c_ends_all_ranks_with_one_line(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    temporary = tmp_path_factory.mktemp("temporary")
    with running(tmp_path, temporary) as (process, pids):
        assert len(pids) == 2
        assert all(map(alive, pids))
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(LIMIT_S) == 130
    told = (tmp_path / "errors").read_text()
    # a bar whose rank had to be cut off has no end of line
    assert re.sub(r"denoising:.*?step/s\]", "", told).split() == ["stopped"], told
    assert gone(pids)
    assert not (tmp_path / "x.png").exists()
    assert not list(temporary.glob("seqpar-*"))  # nor the folder of reports


def test_ranks_end_where_a_later_one_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    create = subprocess.Popen

    def first_only(*_: object, **__: object) -> subprocess.Popen[bytes]:
        if started:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        started.append(create(["sleep", "100"], start_new_session=True))
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", first_only)
    with pytest.raises(OSError, match="Resource temporarily unavailable") as caught:  # one line by `guarded`
        start(["sample"], 2)
    assert kind_of(caught.value) == "failure"
    assert started[0].poll() == -signal.SIGTERM


def test_a_mistake_is_one_line_and_torchrun_reports_nothing(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.png"
    done = seqpar("sample", "--ranks", "2", "--model", folder, "--out", out, *RIGHT, "--mesh", "ulysses=3")
    assert done.returncode == 2
    assert done.stderr.startswith("error: got a mesh of data=1 x cfg=1 x ring=1 x ulysses=3, 3 ranks, for 2 process")
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""
    assert not list(tmp_path.iterdir())


def test_under_torchrun_a_mistake_is_our_message_once(folder: Path, tmp_path: Path) -> None:
    done = torchrun("--model", folder, "--out", tmp_path / "x.png", *RIGHT, "--classes", "99")
    assert done.returncode != 0
    message = "error: got class '99', expected a number 0 to 9"
    first, *rest = done.stderr.splitlines()
    assert first == message
    assert "ChildFailedError" in done.stderr  # torchrun's report, which `seqpar` does not have, and which quotes ours:
    assert [line for line in rest if message in line] == [f"  traceback : {message}"]
    assert "NO_OTHER_FAILURES" in done.stderr
    assert len(rest) <= 50  # 36 of torchrun's report with Python 3.11, 47 with 3.13
    assert "step/s" not in done.stderr
    assert done.stdout == ""
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("codes", "reports", "message", "code"),
    [
        ({1: 1, 0: -15}, {1: MISTAKE}, "rank 1: error: got x", 2),  # rank 0 did not come to speak
        ({0: 1, 1: 1}, {0: MISTAKE, 1: Report("mistake", "other", 1.0)}, "error: got x", 2),
        ({0: 1, 1: 1}, {0: BUG, 1: MISTAKE}, "rank 1: error: got x", 2),  # rank 0 lost its connection to rank 1
        ({0: 1, 1: 1}, {0: LATER, 1: FAILURE}, "rank 1: error: full", 1),
        ({0: 1, 1: 2}, {0: FAILURE, 1: MISTAKE}, "rank 1: error: got x", 2),
        ({0: 1, 1: 1}, {0: replace(FAILURE, time=9.0), 1: FAILURE}, "error: full", 1),  # all ranks saw it
        ({0: 141, 1: -15}, {}, "stopped: nothing reads the output any more", 141),
        ({0: 1, 1: -9}, {0: BUG}, "error: rank 1 was terminated by SIGKILL", 137),
        ({0: 1, 1: -11}, {0: BUG}, "error: rank 1 was terminated by SIGSEGV", 139),
        ({0: 1, 1: 1}, {0: LATER, 1: BUG}, "rank 1 failed, which is a bug:\nTraceback: x", 1),
        ({0: 1, 1: -15}, {0: BUG}, "rank 0 failed, which is a bug:\nTraceback: x", 1),  # the agent ended rank 1
        ({1: -15, 0: -15}, {}, "error: rank 1 was terminated by SIGTERM", 143),
        ({1: 130, 0: -15}, {}, "stopped: rank 1 got SIGINT", 130),  # there alone
        ({1: 143, 0: 1}, {0: LOST}, "stopped: rank 1 got SIGTERM", 143),
        ({1: 130, 0: 1}, {0: LATER}, "stopped: rank 1 got SIGINT", 130),
        ({1: 3, 0: -15}, {}, "error: rank 1 exited with code 3 without a message", 3),
        ({0: 1, 1: 3}, {0: LOST}, "error: rank 1 exited with code 3 without a message", 3),
        ({0: 1, 1: 1}, {0: LOST, 1: LATER}, "rank 1 failed, which is a bug:\ny", 1),  # rank 0 told before rank 1
        ({0: 1, 1: 1}, {0: LOST, 1: replace(FAILURE, time=9.0)}, "rank 1: error: full", 1),
        ({0: 1, 1: -11}, {0: LOST}, "error: rank 1 was terminated by SIGSEGV", 139),
        ({0: 1, 1: -15}, {0: LOST}, "error: rank 0 waited in vain for rank 1", 1),  # stopped, then ended by the starter
    ],
)
def test_one_rank_is_named_with_the_reason(
    codes: dict[int, int], reports: dict[int, Report], message: str, code: int
) -> None:
    told, left = verdict(codes, reports)
    assert told.startswith(message)
    assert left == code


def test_reports_come_back_whole() -> None:
    reports = Reports()
    texts = [f"Traceback\n\u00e9 \udc80 {'x' * 40_000}", "y"]
    try:
        for text in texts:
            pipe = reports.open()
            Report("bug", text[:LONGEST_TRACE], 2.0).write(pipe)
            os.close(pipe)
        told = reports.read()
    finally:
        reports.close()
    assert told == {rank: Report("bug", text[:LONGEST_TRACE], 2.0) for rank, text in enumerate(texts)}


def limited() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    main()


def test_a_rank_that_can_write_no_file_says_why_it_ends(tmp_path: Path) -> None:
    done = seqpar("sample", "--ranks", "2", *LONG, "--out", tmp_path / "x.png", rank=limited)
    assert re.fullmatch(
        r"(rank 1: )?error: ranks cannot meet in \S+: File too large; free space there, or set TMPDIR to another "
        r"folder\n",
        done.stderr,
    ), done.stderr
    assert done.returncode == 1


def planted() -> None:
    """A rank of which one has a bug while flags are checked, and the other then loses it."""
    order, rank = os.environ[ORDER], os.environ.get("RANK")

    def failing(*_: object) -> NoReturn:
        if "left" in order:  # so that rank 0 tells of it before this rank does
            dist.destroy_process_group()
            time.sleep(0.5)
        raise RuntimeError("a planted bug")

    with pytest.MonkeyPatch.context() as patch:
        if rank == "0" and "no sign" in order:
            patch.setattr(Watch, "_read", lambda *_: {})
        if rank == "1":
            patch.setattr("seqpar.cli.job.check", failing)
        main()


ORDER = "SEQPAR_TEST_ORDER"


def planted_under_torchrun() -> None:
    """A rank of which one has a bug in a step; the other waits in vain for it before it is told."""
    steps = Progress.__call__

    def step(self: Progress, index: int) -> None:
        steps(self, index)
        if index == 4 and os.environ["RANK"] == "1":
            raise RuntimeError("a planted bug")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Progress, "__call__", step)
        patch.setattr(exits, "GRACE_S", 2.0)
        sample()


def test_under_torchrun_a_bug_is_told_before_the_rank_that_was_lost_by_it(tmp_path: Path) -> None:
    flags = ("--deadline-s", "0.5", "--out", tmp_path / "x.png")
    done = torchrun(*LONG, *flags, rank=planted_under_torchrun)
    lines = BAR.sub("\n", done.stderr).splitlines()
    told = [line for line in lines if "error: " in line and "traceback :" not in line]
    assert told[:1] == ["rank 1: error: a bug: RuntimeError: a planted bug"], done.stderr
    assert not any("timed out" in line for line in told)


@pytest.mark.parametrize("order", ["no sign", "left", "left, no sign"])
def test_a_bug_is_told_and_not_the_rank_that_was_lost_by_it(tmp_path: Path, order: str) -> None:
    done = seqpar("sample", "--ranks", "2", *LONG, "--out", tmp_path / "x.png", rank=planted, **{ORDER: order})
    assert done.stderr.startswith("rank 1 failed, which is a bug:\nTraceback"), done.stderr
    assert done.stderr.endswith("\nRuntimeError: a planted bug\n")
    assert done.returncode == 1


def test_flags_say_how_many_processes_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [wanted(None, None), wanted(2, None), wanted(None, 4)] == [1, 2, 4]
    for gpus, ranks, message in (
        (3, None, "got --gpus 3 on a machine with 2 GPU"),
        (2, 2, "got --gpus 2 and --ranks 2; drop one"),
        (0, None, "got --gpus=0, expected a whole number from 1 to 128"),
        (None, -1, "got --ranks=-1, expected"),
    ):
        with pytest.raises(ValueError, match=message):
            wanted(gpus, ranks)
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match="got 2 ranks by flag and WORLD_SIZE=4"):
        command(["sample", "--ranks", "2"])
