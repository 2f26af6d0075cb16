"""Servers and jobs of benches on CPUs, forked with their ranks from a process that has imported torch and diffusers."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import pytest
import torch
from torch.distributed.run import main as agent

from launch.benches import compare, compare_job, loading, served
from seqpar.cli.entry import main
from tests.cli.processes import environment, seqpar
from tests.support.forks import Forked
from tests.support.pool import server


class Server(Forked):
    """`seqpar WORDS`, as the part of `subprocess.Popen` that `served.server` uses; stderr is a pipe."""

    def __init__(self, words: Sequence[str]) -> None:
        with tempfile.TemporaryDirectory(prefix="seqpar-test-") as folder:
            errors = Path(folder, "errors")
            os.mkfifo(errors)
            super().__init__(main, words, environment(), Path(os.devnull), errors)
            self.stderr = errors.open()  # waits until the process has opened it, too

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class LoadingJob(Forked):
    """A job of `loading`, as the part of `subprocess.Popen` that it uses."""

    def __init__(self, program: Sequence[str], words: Sequence[str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="seqpar-test-")
        output, errors = Path(self._folder.name, "output"), Path(self._folder.name, "errors")
        self.args, self._output, self._errors, self.returncode = words, output, errors, None
        flags = program[len(loading.RANKS) - 1 :]
        given = (agent, (*flags, loading.__file__, *words)) if flags else (job, words)
        super().__init__(*given, environment(), output, errors, job)

    def communicate(self, timeout: float) -> tuple[bytes, None]:
        self.returncode = self.wait(timeout)
        assert self.returncode is not None, f"no end within {timeout} s"
        output, errors = self._output.read_bytes(), self._errors.read_text()
        print(errors, file=sys.stderr)
        self._folder.cleanup()
        return output, None


class CompareJob(Forked):
    """A job of `compare`, as the part of `subprocess.Popen` that it uses."""

    def __init__(self, words: Sequence[str], log: IO[str]) -> None:
        super().__init__(agent, words, environment(), Path(log.name), Path(log.name), compare_ranks)

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)


def compare_ranks() -> None:
    compare_job.main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), sys.argv[5] == "small")


def job() -> None:
    loading.job(sys.argv[1], sys.argv[2], Path(sys.argv[3]))


def fork(patch: pytest.MonkeyPatch) -> None:
    """Let benches fork servers, commands and jobs on CPUs; jobs of diffusers' way stay new Pythons."""
    if torch.cuda.is_available():
        return
    server()
    own = loading._started  # pyright: ignore[reportPrivateUsage]

    def started(program: list[str], words: tuple[str, ...], gpu: int | None = None) -> object:
        # its way has a variable that diffusers reads while it is imported
        return own(program, words, gpu) if words[0] == "theirs" else LoadingJob(program, words)

    patch.setattr(loading, "_started", started)
    patch.setattr(compare, "_started", CompareJob)
    patch.setattr(served, "started", Server)
    patch.setattr(served, "ended", lambda words: seqpar(*words))
