"""Signals end a run alike in every phase; in steps all ranks end at the same boundary, whichever one got the signal."""

from __future__ import annotations

import importlib.abc
import os
import signal
import sys
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.run import main as agent

from launch.benches.fault_job import BAR
from seqpar.cli import entry
from seqpar.cli.args import Args
from seqpar.cli.exits import stoppable
from seqpar.cli.main import main, sample
from seqpar.cli.signals import SIGNALS, Stopped, ends_when_stopped
from seqpar.cli.summary import Progress
from seqpar.mesh.mesh import Mesh
from seqpar.pipelines import pictures
from tests.cli.processes import LIMIT_S, SCRIPT, environment
from tests.support.forks import Forked
from tests.support.pool import Pool, server

pytestmark = pytest.mark.slow

PHASE, FOLDER = "SEQPAR_TEST_PHASE", "SEQPAR_TEST_FOLDER"  # environment: where ranks pause, and leave a file then
FLAGS = ("--model", "builtin", "--classes", "cat")
PAUSES = {  # phase -> a function at whose call a rank pauses for ever
    "checks": "seqpar.cli.sample.checked",
    "loading": "seqpar.loop.blueprint.Blueprint.build",
    "decoding": "seqpar.pipelines.own_loop.Loaded.decode",
}
PHASES = ("imports", "checks", "loading", "sampling", "decoding", "writing")
STEPS, AT = 8, 5


def pause(*_: object) -> None:
    """Show that this rank is here, and stay."""
    Path(os.environ[FOLDER], os.environ.get("RANK", "0")).touch()
    time.sleep(LIMIT_S)


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, *_: object) -> None:
        if name == "seqpar.cli.main":
            try:
                pause()
            except BaseException as error:  # as some packages do with whatever comes while they are imported
                raise ImportError("swallowed") from error


def paused() -> None:
    phase, agents = os.environ[PHASE], "TORCHELASTIC_RUN_ID" in os.environ
    is_starter = "--ranks" in sys.argv and "RANK" not in os.environ
    counted = Progress.__call__

    def slow(self: Progress, index: int) -> None:
        counted(self, index)
        Path(os.environ[FOLDER], os.environ.get("RANK", "0")).touch()
        time.sleep(0.05)

    def half(image: Any, file: Any, info: Any = None) -> None:
        file.write(b"half a picture")
        file.flush()
        pause()

    with pytest.MonkeyPatch.context() as patch:
        if is_starter:
            return main()
        if phase in PAUSES:
            patch.setattr(PAUSES[phase], pause)
        patch.setattr(Progress, "__call__", slow if phase == "sampling" else counted)
        patch.setattr(pictures, "write_png", half if phase == "writing" else pictures.write_png)
        if phase == "imports":
            patch.delitem(sys.modules, "seqpar.cli.main")
            patch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
            entry.main()
        return sample() if agents else entry.main()


def signalled(folder: Path, phase: str, start: str, number: signal.Signals) -> tuple[int | None, list[str]]:
    """Return exit code and lines of a job that gets a signal in a phase; nothing may be left."""
    server()
    here, out, temporary, errors = (folder / name for name in ("here", "out", "tmp", "errors"))
    for path in (here, out, temporary):
        path.mkdir()
    more = {PHASE: phase, FOLDER: str(here), "TMPDIR": str(temporary)}
    flags = (*FLAGS, "--steps", 900 if phase == "sampling" else 2, "--out", out / "x.png")
    words, program = ("sample", *(("--ranks", 2) if start == "ranks" else ()), *flags), paused
    if start == "torchrun":
        words, program = ("--standalone", "--nproc_per_node=2", SCRIPT, *flags), agent
    job, end = Forked(program, words, environment() | more, folder / "output", errors, paused), time.monotonic()
    try:
        while not (here / "0").exists():
            assert job.poll() is None, errors.read_text()
            assert time.monotonic() < end + LIMIT_S, errors.read_text()
            time.sleep(0.02)
        os.kill(job.pid, number)
        code = job.wait(LIMIT_S)
    finally:
        job.wait(0)
    assert not list(out.iterdir())
    assert not list(temporary.glob("seqpar-*"))
    # rank 1 may still connect when the signal comes: then torch's C++ logs the failed connection
    lines = [line for line in BAR.sub("\n", errors.read_text()).splitlines() if "ProcessGroupGloo.cpp" not in line]
    return code, [line for line in lines if line.strip()]


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("start", ["alone", "ranks"])
def test_a_signal_ends_every_phase_with_one_line_and_leaves_nothing(tmp_path: Path, phase: str, start: str) -> None:
    """Signals take turns: in each phase one comes to the starter of ranks, and another one to a process alone."""
    number = SIGNALS[(PHASES.index(phase) + (start == "ranks")) % len(SIGNALS)]
    assert signalled(tmp_path, phase, start, number) == (128 + number, ["stopped"])


@pytest.mark.parametrize(("phase", "number"), zip(("checks", "sampling", "writing"), SIGNALS, strict=True))
def test_under_torchrun_a_signal_leaves_nothing_and_ranks_say_one_line(
    tmp_path: Path, phase: str, number: signal.Signals
) -> None:
    """The agent prints a traceback of its own, and ends its ranks by the signal that it got."""
    code, lines = signalled(tmp_path, phase, "torchrun", number)
    assert code
    assert lines.count("stopped") == (number != signal.SIGTERM), lines
    assert [line for line in lines if "seqpar/" in line] == [], "\n".join(lines)  # no traceback of a rank


@contextmanager
def handler(wanted: Any) -> Iterator[None]:
    before = signal.signal(signal.SIGINT, wanted)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class Dies:
    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


class HeldWeakly:
    def __init__(self) -> None:
        weakref.finalize(self, signal.raise_signal, signal.SIGINT)


def test_a_signal_is_not_lost_where_exceptions_are() -> None:
    """Of a weak reference's callback and of `__del__` Python prints an exception, and goes on."""

    def stays(number: int) -> Any:
        """In place of the end of the process, which its thread would bring after the test."""

    def dies(kind: type[Dies | HeldWeakly]) -> None:
        with handler(signal.default_int_handler), ends_when_stopped(stays, LIMIT_S):
            kind()
            time.sleep(LIMIT_S)

    for kind in (Dies, HeldWeakly):
        with pytest.raises(Stopped):
            dies(kind)


def interrupted(rank: int, world: int, device: torch.device, reached: int) -> tuple[int, bool, bool]:
    """Return how many steps a rank made, whether it was stopped, and whether its handler is back."""
    done, stopped, wanted = 0, False, signal.default_int_handler
    with handler(wanted):
        try:
            with stoppable(Args(), Mesh.from_env(device=device)) as boundary:
                for step in range(STEPS):
                    if (rank, step) == (reached, AT):
                        os.kill(os.getpid(), signal.SIGINT)
                    boundary()
                    done += 1
        except KeyboardInterrupt:
            stopped = True
        return done, stopped, signal.getsignal(signal.SIGINT) is wanted


@pytest.mark.parametrize(("world", "reached"), [(1, 0), (3, 0), (3, 2)])
def test_all_ranks_end_after_the_same_step(ranks: Pool, world: int, reached: int) -> None:
    assert ranks.run(world, interrupted, reached) == [(AT, True, True)] * world


def ignored(rank: int, world: int, device: torch.device) -> bool:
    with handler(signal.SIG_IGN), stoppable(Args(), Mesh.from_env(device=device)) as boundary:
        os.kill(os.getpid(), signal.SIGINT)
        boundary()
        return signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_another_handler_stays(ranks: Pool) -> None:
    assert ranks.run(2, ignored) == [True] * 2
