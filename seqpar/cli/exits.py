"""How a process ends: a mistake is one message and a non-zero exit, no rank hangs, and ranks end with their starter.

Under torchrun rank 0 prints the message. Ranks that `seqpar` itself started (`seqpar/cli/ranks.py`) leave a report
instead, and their starter prints one of the reports.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch

from seqpar import mesh as meshes
from seqpar.cli.stopped import end_stopped_ranks

GRACE_S = 5.0  # other ranks give rank 0 this long to tell its message
STOPPED = 130  # exit code after Ctrl-C, as shells have it
REPORTS, STARTER = "SEQPAR_REPORTS", "SEQPAR_STARTER"  # environment of a rank: a folder, a process id


@dataclass(frozen=True)
class Report:
    """Why a rank ended: the user's mistake, or a bug of the program with its traceback."""

    kind: Literal["mistake", "bug"]
    text: str
    time: float

    def write(self, folder: str, rank: int) -> None:
        """Leave the report where `read` finds it; it appears whole or not at all."""
        unfinished = Path(folder, f"{rank}.part")
        unfinished.write_text(json.dumps(asdict(self)))
        unfinished.replace(Path(folder, f"{rank}.json"))

    @staticmethod
    def read(folder: str | Path) -> dict[int, Report]:
        """Rank -> its report, in order of ranks."""
        found = {int(path.stem): Report(**json.loads(path.read_text())) for path in Path(folder).glob("*.json")}
        return dict(sorted(found.items()))


def guarded(work: Callable[[int], None]) -> None:
    """Run `work(rank)`; an error that a user can cause ends in a message, any other is a bug and ends in a traceback.

    Returns only if `work` did; otherwise the process exits at once with a non-zero code.
    """
    rank, folder = int(os.environ.get("RANK", "0")), os.environ.pop(REPORTS, None)
    _end_with_the_starter()
    try:
        work(rank)
    except SystemExit as stop:  # from the parser of the flags, which has printed, or from a launch that failed
        _leave(rank, stop.code)
    except (ValueError, OSError, torch.OutOfMemoryError) as error:
        end_stopped_ranks()
        _tell(rank, folder, f"error: {error}")
        _leave(rank, 1)
    except KeyboardInterrupt:
        if rank == 0 and folder is None:
            print("stopped", file=sys.stderr, flush=True)
        os._exit(STOPPED)
    except BaseException:  # a bug: told now, because leaving the group may wait for others for ever
        _tell_bug(rank, folder)
        os._exit(1)
    meshes.close()


def _tell(rank: int, folder: str | None, message: str) -> None:
    """Report a mistake. Under torchrun rank 0 prints first, and others only if rank 0 had nothing to say and runs."""
    if folder is not None:
        Report("mistake", message, time.time()).write(folder, rank)
    elif rank == 0:
        print(message, file=sys.stderr, flush=True)
    else:
        time.sleep(GRACE_S)
        print(f"rank {rank}: {message}", file=sys.stderr, flush=True)


def _tell_bug(rank: int, folder: str | None) -> None:
    if folder is None:
        traceback.print_exc()
    else:
        Report("bug", traceback.format_exc(), time.time()).write(folder, rank)


def _leave(rank: int, code: int | str | None) -> None:
    """Exit, unless the code says that all is well. Other ranks leave after rank 0, so that its message comes first."""
    if not code:
        return
    if rank > 0:
        time.sleep(GRACE_S)
    sys.stdout.flush()
    # not sys.exit: a process group whose other ranks wait in a collective would hold the exit up
    os._exit(code if isinstance(code, int) else 1)


def _end_with_the_starter() -> None:
    """End this rank when the process that started it is gone, also while the rank waits for others or for a GPU."""
    starter = os.environ.pop(STARTER, None)
    if starter is None and "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    expected = os.getppid() if starter is None else int(starter)

    def watch() -> None:
        while os.getppid() == expected:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
