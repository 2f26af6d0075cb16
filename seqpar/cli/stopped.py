"""Ends ranks that are stopped (SIGSTOP, Ctrl-Z, a frozen container) when another rank of the same starter gives up.

A stopped process cannot end itself, and torchrun's agent would wait 30 s for it after another rank has failed. When it
wins: the processes of a job are gone some seconds after its deadline, under torchrun too. It finds them in /proc, so
where there is none it does nothing, and the agent's 30 s pass.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

AGENT = "TORCHELASTIC_RUN_ID"  # environment of a rank whose parent is torchrun's agent: all its children are ranks


def stopped_ranks() -> list[int]:
    """Return the process ids of the stopped ones among the ranks that were started with this one."""
    if AGENT not in os.environ:
        return []
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = path.read_text(errors="replace").rpartition(")")[2].split()[:2]
        except OSError:
            continue  # it has ended since, or belongs to someone else
        if state == "T" and int(parent) == os.getppid():
            found.append(int(path.parent.name))
    return found


def end_ranks(processes: Sequence[int]) -> None:
    """Kill these processes, as far as they are still there and belong to this user."""
    for process in processes:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(process, signal.SIGKILL)
