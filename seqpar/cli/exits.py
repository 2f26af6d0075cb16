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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Literal, NoReturn

import torch.distributed as dist

from seqpar.cli.args import Args, ProfileArgs
from seqpar.cli.signals import AGENT, REPORTS, Handler, Stopped, ends_when_stopped, handled, leaves
from seqpar.mesh import mesh as meshes
from seqpar.mesh.boundary import CancelledError, StepBoundary
from seqpar.mesh.errors import is_failure
from seqpar.mesh.mesh import Mesh
from seqpar.mesh.processes import MEETING
from seqpar.mesh.watch import is_lost

Kind = Literal["mistake", "failure", "bug", "lost"]
GRACE_S = 5.0  # other ranks give rank 0 this long to print its message
LAST_GRACE_S = 1.0  # the same for ranks whose main thread has been given time already
CAUSE_S = 1.0  # a rank that has lost another one prints this much after `GRACE_S`, in which that one says why
INTERRUPTED_S = 2.0  # for the main thread to end after a signal
MISTAKE, FAILURE = 2, 1  # exit codes
STARTER = "SEQPAR_STARTER"  # environment of a rank: a process id
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # torchrun shows what a rank wrote here in its own report
LOST = (meshes.LostRankError, dist.DistBackendError, dist.DistNetworkError)
LONGEST = 1500  # characters of a message: it may quote a flag or a file's contents
LONGEST_TRACE = 15_000  # characters of a traceback: at most 60,000 bytes, which fit into a pipe that nobody reads yet


@dataclass(frozen=True)
class Report:
    """Why a rank ended: the user's mistake, what went wrong, a bug of the program with its traceback, or a lost rank.

    A lost rank is never the cause: something has happened to the rank that is lost.
    """

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
        if kind == "bug":
            return Report(kind, shortened("".join(traceback.format_exception(error)), LONGEST_TRACE), time.time())
        return Report(kind, f"error: {line_of(error)}", time.time())

    def write(self, pipe: int) -> None:
        """Send the report to the starter, which reads it with `Reports`: no disk is needed, which may be full."""
        text = json.dumps(asdict(self), ensure_ascii=False).encode(errors="backslashreplace") + b"\n"
        while text:
            text = text[os.write(pipe, text) :]


class Reports:
    """A pipe per rank, for its report."""

    def __init__(self) -> None:
        self._pipes: list[int] = []
        self._texts: list[bytes] = []

    def open(self) -> int:
        """Return the end of a new pipe for the next rank; the caller closes it in this process."""
        receive, send = os.pipe()
        os.set_blocking(receive, False)
        self._pipes.append(receive)
        self._texts.append(b"")
        return send

    def read(self) -> dict[int, Report]:
        """Return the reports that are complete, by rank."""
        for rank, pipe in enumerate(self._pipes):
            with suppress(BlockingIOError):
                while text := os.read(pipe, 1 << 16):
                    self._texts[rank] += text
        return {rank: Report(**json.loads(text)) for rank, text in enumerate(self._texts) if text.endswith(b"\n")}

    def close(self) -> None:
        """Close all pipes."""
        for pipe in self._pipes:
            os.close(pipe)
        self._pipes.clear()


def kind_of(error: BaseException) -> Kind:
    """Return whether the user, the machine, the program or another rank is to blame for an error."""
    if isinstance(error, LOST) or (isinstance(error, RuntimeError) and is_lost(error)):
        return "lost"
    if is_failure(error):
        return "failure"
    return "mistake" if isinstance(error, (ValueError, OSError)) else "bug"


def cause_of(error: BaseException) -> BaseException:
    """Return the error that was handled when this one came, if this one is a lost rank; else this one.

    What releases memory after a bug, or after a signal, meets ranks that have left.
    """
    each: BaseException | None = error
    while each is not None and kind_of(each) == "lost":
        if each.__cause__ is not None:  # what the process group said of the lost rank
            each = each.__cause__
        each = None if each.__suppress_context__ and each.__cause__ is None else each.__context__
    return each or error


def line_of(error: BaseException) -> str:
    """Return an error's message as one line of limited length that a terminal shows as it is."""
    parts = [part.strip() for part in str(error).splitlines() if part.strip()]
    text = shortened("; ".join(parts) or type(error).__name__, LONGEST)
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def shortened(text: str, longest: int) -> str:
    """Return both ends of a text that is longer than this."""
    return text if len(text) <= longest else f"{text[: longest // 2]} ... {text[-longest // 2 :]}"


def guarded(work: Callable[[int], None], interrupted_s: float = INTERRUPTED_S) -> None:
    """Run `work(rank)`; an error that a bug did not cause ends in one line, a bug ends in a traceback.

    Returns only if `work` did; otherwise the process exits at once with the code of the error. interrupted_s: how long
    `work` may clean up after a signal.
    """
    rank, leave = int(os.environ.get("RANK", "0")), leaves()
    reports = os.environ.pop(REPORTS, None)
    pipe = None if reports is None else int(reports)
    if pipe is not None:
        os.set_inheritable(pipe, False)
    _end_with_the_starter(os.environ.get(MEETING))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a name that cannot be encoded must not end finished work
            stream.reconfigure(errors="backslashreplace")
    meshes.on_fatal(lambda error: _tell(rank, pipe, meshes.LostRankError(error), LAST_GRACE_S))
    with ends_when_stopped(leave, interrupted_s):
        try:
            try:
                work(rank)
            except SystemExit as stop:  # from the parser of the flags, which has printed, or from a launch that failed
                _leave(rank, stop.code)
            meshes.close()
        except BrokenPipeError:  # who reads our output has left, as `head` does
            os._exit(128 + signal.SIGPIPE)
        except BaseException as error:  # told now, because leaving the group may wait for others for ever
            cause = cause_of(error)
            if isinstance(cause, KeyboardInterrupt):
                leave(cause.number if isinstance(cause, Stopped) else signal.SIGINT)
            _tell(rank, pipe, cause, GRACE_S)


@contextmanager
def stoppable(args: Args, mesh: Mesh) -> Iterator[Callable[[], None]]:
    """Yield a function that every rank calls between steps: all ranks raise `Stopped` there if one got a signal.

    Without it, ranks on other machines, which a terminal does not reach, would time out. SIGTERM is not noted: it comes
    from what ends ranks after one has failed, which then calls no boundary. A profile has none, because it would be
    measured.
    """
    if isinstance(args, ProfileArgs):
        yield lambda: None
        return
    handler = Handler("note", leaves())
    try:
        with handled(handler, (signal.SIGINT, signal.SIGHUP)):
            yield StepBoundary(mesh, lambda: None if handler.number is None else "cancelled")
    except CancelledError:
        raise Stopped(handler.number or signal.SIGINT) from None
    if handler.number is not None:  # after the last boundary
        raise Stopped(handler.number)


def _tell(rank: int, pipe: int | None, error: BaseException, grace_s: float) -> NoReturn:
    """Tell why this rank ends, and exit. pipe: to the starter; grace_s: see `_say`."""
    report = Report.of(error)
    try:
        if pipe is not None:
            report.write(pipe)
        else:
            _say(rank, report, error, grace_s)
        sys.stdout.flush()
    finally:  # also where the disk is full, or nobody reads the output any more
        # not sys.exit: a process group whose other ranks wait in a collective would hold the exit up
        os._exit(report.code)


def _say(rank: int, report: Report, error: BaseException, grace_s: float) -> None:
    """Print why this rank ends. Under torchrun rank 0 prints first, others after `grace_s` if it had nothing to say.

    A rank that has lost another one waits until that one had its `grace_s`, too.
    """
    lost = report.kind == "lost" and "WORLD_SIZE" in os.environ
    _wait((grace_s + CAUSE_S if lost else 0.0) + ((CAUSE_S if lost else grace_s) if rank > 0 else 0.0))
    text = report.text.rstrip()
    if _to_torchrun(report) and report.kind == "bug":  # whose report has the traceback
        text = f"error: a bug: {type(error).__name__}: {line_of(error)}"
    print(text if rank == 0 else f"rank {rank}: {text}", file=sys.stderr, flush=True)


def _to_torchrun(report: Report) -> bool:
    """Have torchrun's report show the message where it otherwise says how to get one; return whether it will."""
    if ERROR_FILE not in os.environ:
        return False
    file = Path(os.environ[ERROR_FILE])
    message = {"message": report.text, "extraInfo": {"timestamp": str(int(report.time))}}
    try:
        file.write_text(json.dumps({"message": message}))
    except OSError:  # a full disk; torchrun cannot read a part of it
        file.unlink(missing_ok=True)
        return False
    return True


def _wait(seconds: float) -> None:
    """Sleep. If torchrun's agent ends this rank meanwhile, leave without a line in its report."""

    def ended(number: int, frame: FrameType | None) -> None:
        os._exit(0)  # the agent knows already that the run has failed, and lists whatever ends with another code

    if AGENT in os.environ and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, ended)
    time.sleep(seconds)


def _leave(rank: int, code: int | str | None) -> None:
    """Exit, unless the code says that all is well. Other ranks leave after rank 0, so that its message comes first."""
    if not code:
        return
    if rank > 0:
        _wait(GRACE_S)
    try:
        sys.stdout.flush()
    finally:  # also where nobody reads the output any more
        os._exit(code if isinstance(code, int) else FAILURE)


def _end_with_the_starter(folder: str | None) -> None:
    """End this process when the one that started it is gone, also while it waits for other ranks or for a GPU.

    folder: in which the ranks meet; a starter that was killed could not remove it. A process without one is started by
    a server, alone or as the starter of ranks, and ends them and itself by SIGTERM.
    """
    starter = os.environ.pop(STARTER, None)
    if starter is None and AGENT not in os.environ:
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
