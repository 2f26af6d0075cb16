"""How a process ends: one message, an exit code that says whose fault it was, no rank that hangs or stays.

Exit codes: 2 for what the user got wrong (flags, files), 1 for what went wrong (a time limit, memory, a full disk,
numbers that are not finite, a bug), 128 + n for the signal n. torchrun itself always ends with 1.

Under torchrun rank 0 prints the message and hands it to torchrun's report. Ranks that `seqpar` itself started
(`seqpar/cli/ranks.py`) leave a report of ours instead, and their starter prints one of the reports.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Literal, NoReturn

from seqpar.cli.interrupted import ends_when_interrupted
from seqpar.mesh import mesh as meshes
from seqpar.mesh.errors import is_failure

Kind = Literal["mistake", "failure", "bug"]
GRACE_S = 5.0  # other ranks give rank 0 this long to tell its message
LAST_GRACE_S = 1.0  # the same for ranks whose main thread has been given time already
INTERRUPTED_S = 2.0  # for the main thread to end after Ctrl-C
MISTAKE, FAILURE, STOPPED = 2, 1, 128 + signal.SIGINT  # exit codes; shells have the last one after Ctrl-C
PROCESS = ".process"  # name of the file in the folder of reports that holds a rank's process id, after the rank
REPORTS, STARTER = "SEQPAR_REPORTS", "SEQPAR_STARTER"  # environment of a rank: a folder, a process id
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # torchrun shows what a rank wrote here in its own report
LONGEST = 1500  # characters of a message: it may quote a flag or a file's contents


@dataclass(frozen=True)
class Report:
    """Why a rank ended: the user's mistake, what went wrong, or a bug of the program with its traceback."""

    kind: Kind
    text: str
    time: float

    @property
    def code(self) -> int:
        """Return the exit code."""
        return MISTAKE if self.kind == "mistake" else FAILURE

    @staticmethod
    def of(error: BaseException) -> Report:
        """Return the report of an error that ends this process now."""
        kind = kind_of(error)
        text = traceback.format_exc() if kind == "bug" else f"error: {line_of(error)}"
        return Report(kind, text, time.time())

    def write(self, folder: str, rank: int) -> None:
        """Leave the report where `read` finds it; it appears whole or not at all."""
        unfinished = Path(folder, f"{rank}.part")
        unfinished.write_text(json.dumps(asdict(self)))
        unfinished.replace(Path(folder, f"{rank}.json"))

    @staticmethod
    def read(folder: str | Path) -> dict[int, Report]:
        """Rank -> its report, in order of ranks."""
        reports = {int(path.stem): Report(**json.loads(path.read_text())) for path in Path(folder).glob("*.json")}
        return dict(sorted(reports.items()))


def kind_of(error: BaseException) -> Kind:
    """Return whether the user, the machine or the program is to blame for an error."""
    if is_failure(error):
        return "failure"
    return "mistake" if isinstance(error, (ValueError, OSError)) else "bug"


def line_of(error: BaseException) -> str:
    """Return an error's message as one line of limited length that a terminal shows as it is."""
    parts = [part.strip() for part in str(error).splitlines() if part.strip()]
    text = "; ".join(parts) or type(error).__name__
    if len(text) > LONGEST:
        text = f"{text[: LONGEST // 2]} ... {text[-LONGEST // 2 :]}"
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def guarded(work: Callable[[int], None], interrupted_s: float = INTERRUPTED_S) -> None:
    """Run `work(rank)`; an error that a bug did not cause ends in one line, a bug ends in a traceback.

    Returns only if `work` did; otherwise the process exits at once with the code of the error. interrupted_s: how long
    `work` may clean up after Ctrl-C.
    """
    rank, folder = int(os.environ.get("RANK", "0")), os.environ.pop(REPORTS, None)
    _end_with_the_starter(folder)
    if folder is not None:
        with suppress(OSError):  # a full disk: then the socket of a killed rank stays
            Path(folder, f"{rank}{PROCESS}").write_text(str(os.getpid()))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a name that cannot be encoded must not end finished work
            stream.reconfigure(errors="backslashreplace")
    meshes.last_words(lambda error: _tell(rank, folder, meshes.LostRankError(error), LAST_GRACE_S))
    with ends_when_interrupted(lambda: _stopped(rank, folder), interrupted_s):
        try:
            try:
                work(rank)
            except SystemExit as stop:  # from the parser of the flags, which has printed, or from a launch that failed
                _leave(rank, stop.code)
            meshes.close()
        except KeyboardInterrupt:
            _stopped(rank, folder)
        except BrokenPipeError:  # who reads our output has left, as `head` does
            os._exit(128 + signal.SIGPIPE)
        except BaseException as error:  # told now, because leaving the group may wait for others for ever
            _tell(rank, folder, error, GRACE_S)


def _stopped(rank: int, folder: str | None) -> NoReturn:
    """Exit after Ctrl-C."""
    try:
        if rank == 0 and folder is None:
            print("stopped", file=sys.stderr, flush=True)
    finally:  # also where nobody reads the output any more
        os._exit(STOPPED)


def _tell(rank: int, folder: str | None, error: BaseException, grace_s: float) -> NoReturn:
    """Tell why this rank ends, and exit. grace_s: see `_say`."""
    report = Report.of(error)
    try:
        if folder is not None:
            report.write(folder, rank)
        else:
            _say(rank, report, error, grace_s)
        sys.stdout.flush()
    finally:  # also where the disk is full, or nobody reads the output any more
        # not sys.exit: a process group whose other ranks wait in a collective would hold the exit up
        os._exit(report.code)


def _say(rank: int, report: Report, error: BaseException, grace_s: float) -> None:
    """Print why this rank ends. Under torchrun rank 0 prints first, others after `grace_s` if it had nothing to say."""
    line = line_of(error)
    if rank > 0:
        _wait(grace_s)
    text = report.text.rstrip() if report.kind == "bug" else f"error: {line}"
    if _to_torchrun(report) and report.kind == "bug":  # whose report has the traceback
        text = f"error: a bug: {type(error).__name__}: {line}"
    print(text if rank == 0 else f"rank {rank}: {text}", file=sys.stderr, flush=True)


def _to_torchrun(report: Report) -> bool:
    """Have torchrun's report show the message where it otherwise says how to get one; return whether it will."""
    file = os.environ.get(ERROR_FILE)
    if file is None:
        return False
    message = {"message": report.text, "extraInfo": {"timestamp": str(int(report.time))}}
    Path(file).write_text(json.dumps({"message": message}))
    return True


def _wait(seconds: float) -> None:
    """Sleep. If torchrun's agent ends this rank meanwhile, leave without a line in its report."""

    def ended(number: int, frame: FrameType | None) -> None:
        os._exit(0)  # the agent knows already that the run has failed, and lists whatever ends with another code

    if "TORCHELASTIC_RUN_ID" in os.environ and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, ended)
    time.sleep(seconds)


def _leave(rank: int, code: int | str | None) -> None:
    """Exit, unless the code says that all is well. Other ranks leave after rank 0, so that its message comes first."""
    if not code:
        return
    if rank > 0:
        _wait(GRACE_S)
    sys.stdout.flush()
    os._exit(code if isinstance(code, int) else FAILURE)


def _end_with_the_starter(folder: str | None) -> None:
    """End this process when the one that started it is gone, also while it waits for other ranks or for a GPU.

    folder: where ranks leave reports; a starter that was killed could not remove it. A process without one is started
    by a server, alone or as the starter of ranks, and ends them and itself by SIGTERM.
    """
    starter = os.environ.pop(STARTER, None)
    if starter is None and "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    expected = os.getppid() if starter is None else int(starter)

    def watch() -> None:
        while os.getppid() == expected:
            time.sleep(1)
        if folder is None and starter is not None:
            os.kill(os.getpid(), signal.SIGTERM)
            return
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(FAILURE)

    threading.Thread(target=watch, daemon=True).start()
