"""Run the command line in processes of their own, on the CPU, as a user starts it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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
    """`seqpar WORDS`; a hang is a failure."""
    return _finished([*COMMAND, *map(str, words)])


def torchrun(*flags: object) -> subprocess.CompletedProcess[str]:
    """`torchrun --nproc_per_node=2 launch/sample.py FLAGS`; a hang is a failure."""
    return _finished([*TORCHRUN, SCRIPT, *map(str, flags)])


def _finished(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=environment(), check=False)
