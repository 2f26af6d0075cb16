"""Ends ranks that are stopped (SIGSTOP, Ctrl-Z, a frozen container) when another rank of torchrun's agent gives up.

A stopped process cannot end itself, and torchrun's agent would wait 30 s for it after another rank has failed. When it
wins: the processes of a job are gone some seconds after its deadline under torchrun too; `seqpar.cli.ranks` needs no
help. It finds them in /proc, so where there is none it does nothing, and the agent's 30 s pass.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

# environment that torchrun's agent gives to its ranks and to nothing else; the values are those of one run of one agent
RANK, RUN = b"RANK=", ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")


def stopped_ranks() -> list[int]:
    """Return the process ids of the stopped ones among the ranks that were started with this one."""
    if not all(name in os.environ for name in RUN):
        return []
    return [process for path in Path("/proc").glob("[0-9]*") if _is_ours(process := int(path.name))]


def end_ranks(processes: Sequence[int]) -> None:
    """Kill these processes, as far as they still are what `stopped_ranks` finds."""
    for process in processes:
        with suppress(ProcessLookupError, PermissionError):
            if _is_ours(process):  # a number may have gone to another process since
                os.kill(process, signal.SIGKILL)


def _is_ours(process: int) -> bool:
    """Return whether a process is stopped and was started as a rank by the agent that has started this one."""
    folder = Path("/proc", str(process))
    try:
        state, parent = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
        if state != "T" or int(parent) != os.getppid():
            return False
        started_with = set((folder / "environ").read_bytes().split(b"\0"))
    except OSError:
        return False  # it has ended since, or belongs to someone else
    run = {os.fsencode(f"{name}={os.environ[name]}") for name in RUN}
    return run <= started_with and any(line.startswith(RANK) for line in started_with)
