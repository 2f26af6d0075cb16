"""Run the command line in processes of their own, on the CPU, as a user starts it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from seqpar.cli.main import main
from tests.support.forks import Forked
from tests.support.pool import server

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-m", "seqpar.cli")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
SCRIPT = str(ROOT / "launch" / "sample.py")
LIMIT_S = 120


def environment() -> dict[str, str]:
    """This process's environment without GPUs, with this checkout first."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "COLUMNS": "200", "PYTHONPATH": path}


def seqpar(*words: object) -> subprocess.CompletedProcess[str]:
    """`seqpar WORDS`, forked with its ranks; a hang is a failure."""
    server()
    with tempfile.TemporaryDirectory(prefix="seqpar-test-") as folder:
        output, errors = Path(folder, "output"), Path(folder, "errors")
        code = Forked(main, words, environment(), output, errors).wait(LIMIT_S)
        assert code is not None, f"no end within {LIMIT_S} s"
        return subprocess.CompletedProcess([*map(str, words)], code, output.read_text(), errors.read_text())


def torchrun(*flags: object) -> subprocess.CompletedProcess[str]:
    """`torchrun --nproc_per_node=2 launch/sample.py FLAGS`, not forked; a hang is a failure."""
    command = [*TORCHRUN, SCRIPT, *map(str, flags)]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=environment(), check=False)
