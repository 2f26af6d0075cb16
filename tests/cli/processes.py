"""Run the command line in processes of their own, on the CPU, as a user starts it."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch.distributed.run import main as agent

from seqpar.cli.entry import main
from seqpar.cli.main import sample
from tests.support.forks import Forked, Main
from tests.support.pool import server

ROOT = Path(__file__).parents[2]
SCRIPT = str(ROOT / "launch" / "sample.py")
LIMIT_S = 120
LONG = ("--model", "dit-s/8", "--size", "256", "--classes", "1", "--steps", "900", "--mesh", "ulysses=2")


def environment(gpus: str = "") -> dict[str, str]:
    """This process's environment with these GPUs alone, with this checkout first."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "CUDA_VISIBLE_DEVICES": gpus, "OMP_NUM_THREADS": "1", "COLUMNS": "200", "PYTHONPATH": path}


def seqpar(*words: object, rank: Main | None = None, **more: str) -> subprocess.CompletedProcess[str]:
    """`seqpar WORDS`, forked with its ranks; a hang is a failure. rank: what ranks run; more: environment."""
    return _forked(main, words, rank, more)


def torchrun(*flags: object, rank: Main = sample, **more: str) -> subprocess.CompletedProcess[str]:
    """`torchrun --nproc_per_node=2 launch/sample.py FLAGS`, forked with its ranks; see `seqpar`."""
    return _forked(agent, ("--standalone", "--nproc_per_node=2", SCRIPT, *flags), rank, more)


def _forked(
    program: Main, words: Sequence[object], rank: Main | None, more: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    server()
    with tempfile.TemporaryDirectory(prefix="seqpar-test-") as folder:
        output, errors = Path(folder, "output"), Path(folder, "errors")
        code = Forked(program, words, {**environment(), **more}, output, errors, rank).wait(LIMIT_S)
        assert code is not None, f"no end within {LIMIT_S} s"
        return subprocess.CompletedProcess([*map(str, words)], code, output.read_text(), errors.read_text())


def ranks_of(process: int) -> list[int]:
    return list(map(int, Path(f"/proc/{process}/task/{process}/children").read_text().split()))


@contextmanager
def running(folder: Path, temporary: Path) -> Iterator[tuple[Forked, list[int]]]:
    """A forked command whose two ranks are in their steps, and the ranks' process ids."""
    server()
    output, errors, end = folder / "output", folder / "errors", time.monotonic() + LIMIT_S
    words = ("sample", "--ranks", "2", *LONG, "--out", folder / "x.png")
    process = Forked(main, words, environment() | {"TMPDIR": str(temporary)}, output, errors)
    try:
        while not (output.exists() and "\ngraph" in output.read_text()):
            assert process.poll() is None, errors.read_text()
            assert time.monotonic() < end, errors.read_text()
            time.sleep(0.1)
        yield process, ranks_of(process.pid)
    finally:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGTERM)  # it ends its ranks
        process.wait(LIMIT_S)
