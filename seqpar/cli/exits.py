"""How a process exits: one message, an exit code that says whose fault it was, and no rank that hangs or stays.

Exit codes: 2 for invalid flags and files, 1 for failures (timeouts, memory, a full disk, values that are not finite,
bugs), 128 + n for signal n. torchrun itself always exits with 1.

Under torchrun, rank 0 prints the message and passes it to torchrun's report. Ranks that `seqpar` started
(`seqpar/cli/ranks.py`) write a `Report` to their starter, which prints one of them.
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
LAST_GRACE_S = 1.0  # the same for ranks whose main thread had time already
CAUSE_S = 1.0  # a rank that lost another one prints this long after `GRACE_S`, so that the other reports first
INTERRUPTED_S = 2.0  # for the main thread to exit after a signal
MISTAKE, FAILURE = 2, 1  # exit codes
STARTER = "SEQPAR_STARTER"  # environment of a rank: a process id
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # torchrun shows what a rank wrote here in its own report
LOST = (meshes.LostRankError, dist.DistBackendError, dist.DistNetworkError)
LONGEST = 1500  # characters of a message: it may quote a flag or a file's contents
LONGEST_TRACE = 15_000  # characters of a traceback: at most 60,000 bytes, which fit into a pipe before anything is read


@dataclass(frozen=True)
class Report:
    """Why a rank exited: an invalid argument, a failure, a bug with its traceback, or a lost rank (never the cause)."""

    kind: Kind
    text: str
    time: float

    @property
    def code(self) -> int:
        return MISTAKE if self.kind == "mistake" else FAILURE

    @staticmethod
    def of(error: BaseException) -> Report:
        kind = kind_of(error)
        if kind == "bug":
            return Report(kind, shortened("".join(traceback.format_exception(error)), LONGEST_TRACE), time.time())
        return Report(kind, f"error: {line_of(error)}", time.time())

    def write(self, pipe: int) -> None:
        """Send the report to the starter: through a pipe, because the disk may be full."""
        text = json.dumps(asdict(self), ensure_ascii=False).encode(errors="backslashreplace") + b"\n"
        while text:
            text = text[os.write(pipe, text) :]


class Reports:
    """The starter's ends of the ranks' pipes."""

    def __init__(self) -> None:
        self._pipes: list[int] = []
        self._texts: list[bytes] = []

    def open(self) -> int:
        """The write end for the next rank; the caller closes it in this process."""
        receive, send = os.pipe()
        os.set_blocking(receive, False)
        self._pipes.append(receive)
        self._texts.append(b"")
        return send

    def read(self) -> dict[int, Report]:
        for rank, pipe in enumerate(self._pipes):
            with suppress(BlockingIOError):
                while text := os.read(pipe, 1 << 16):
                    self._texts[rank] += text
        return {rank: Report(**json.loads(text)) for rank, text in enumerate(self._texts) if text.endswith(b"\n")}

    def close(self) -> None:
        for pipe in self._pipes:
            os.close(pipe)
        self._pipes.clear()


def kind_of(error: BaseException) -> Kind:
    """Classify an error: invalid argument, failure of the machine, bug, or lost rank."""
    if isinstance(error, LOST) or (isinstance(error, RuntimeError) and is_lost(error)):
        return "lost"
    if is_failure(error):
        return "failure"
    return "mistake" if isinstance(error, (ValueError, OSError)) else "bug"


def cause_of(error: BaseException) -> BaseException:
    """The error before a lost rank: releasing memory after a bug or a signal needs ranks that have exited."""
    cause: BaseException | None = error
    while cause is not None and kind_of(cause) == "lost":
        if cause.__cause__ is not None:  # the process group's error about the lost rank
            cause = cause.__cause__
        cause = None if cause.__suppress_context__ and cause.__cause__ is None else cause.__context__
    return cause or error


def line_of(error: BaseException) -> str:
    """An error's message as one line of limited length in printable characters."""
    parts = [part.strip() for part in str(error).splitlines() if part.strip()]
    text = shortened("; ".join(parts) or type(error).__name__, LONGEST)
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def of_rank(rank: int, text: str) -> str:
    prefix = f"rank {rank}: "  # a lost rank's message has it already
    return text if rank == 0 or text.startswith(f"error: {prefix}") else prefix + text


def shortened(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest // 2]} ... {text[-longest // 2 :]}"


def guarded(work: Callable[[int], None], interrupted_s: float = INTERRUPTED_S) -> None:
    """Run `work(rank)`; a bug ends in a traceback, other errors in one line.

    Returns only if `work` did; otherwise the process exits with the code of the error. interrupted_s: time to clean up
    after a signal.
    """
    rank, leave = int(os.environ.get("RANK", "0")), leaves()
    reports = os.environ.pop(REPORTS, None)
    pipe = None if reports is None else int(reports)
    if pipe is not None:
        os.set_inheritable(pipe, False)
    _end_with_the_starter(os.environ.get(MEETING))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a name that cannot be encoded must not fail a finished run
            stream.reconfigure(errors="backslashreplace")
    meshes.on_fatal(lambda error: _report(rank, pipe, meshes.LostRankError(error), LAST_GRACE_S))
    try:
        with ends_when_stopped(leave, interrupted_s):
            try:
                try:
                    work(rank)
                except SystemExit as stop:  # of the flags' parser, which has printed, or of a failed start
                    _leave(rank, stop.code)
                meshes.close()
            except BrokenPipeError:  # the reader of the output has exited, such as `head`
                os._exit(128 + signal.SIGPIPE)
            except BaseException as error:  # report first: leaving the group may hang
                cause = cause_of(error)
                if isinstance(cause, KeyboardInterrupt):
                    leave(cause.number if isinstance(cause, Stopped) else signal.SIGINT)
                _report(rank, pipe, cause, GRACE_S)
    except Stopped as stop:  # a signal while the last call of `work` was in native code comes as the context is left
        leave(stop.number)


@contextmanager
def stoppable(args: Args, mesh: Mesh) -> Iterator[Callable[[], None]]:
    """Yield a function that every rank calls between steps: all ranks raise `Stopped` there if one got a signal.

    Without it, ranks on other machines, which a terminal does not reach, would time out. SIGTERM is not noted: the
    starter or torchrun sends it after a rank has failed, which then calls no boundary. A profile has none, because it
    would be measured.
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


def _report(rank: int, pipe: int | None, error: BaseException, grace_s: float) -> NoReturn:
    report = Report.of(error)
    try:
        if pipe is not None:
            report.write(pipe)
        else:
            _say(rank, report, error, grace_s)
        sys.stdout.flush()
    finally:  # also where the disk is full, or the output is closed
        # not sys.exit: it would wait for a process group whose other ranks wait in a collective
        os._exit(report.code)


def _say(rank: int, report: Report, error: BaseException, grace_s: float) -> None:
    # under torchrun rank 0 prints first, and others after `grace_s`, unless its end ends them; a rank that lost another
    # one waits until that one had its `grace_s`, too
    lost = report.kind == "lost" and "WORLD_SIZE" in os.environ
    _wait((grace_s + CAUSE_S if lost else 0.0) + ((CAUSE_S if lost else grace_s) if rank > 0 else 0.0))
    text = report.text.rstrip()
    if _to_torchrun(report) and report.kind == "bug":  # torchrun's report has the traceback
        text = f"error: a bug: {type(error).__name__}: {line_of(error)}"
    print(of_rank(rank, text), file=sys.stderr, flush=True)


def _to_torchrun(report: Report) -> bool:
    """Write the message to the file that torchrun's report shows; return whether that worked."""
    if ERROR_FILE not in os.environ:
        return False
    file = Path(os.environ[ERROR_FILE])
    message = {"message": report.text, "extraInfo": {"timestamp": str(int(report.time))}}
    try:
        file.write_text(json.dumps({"message": message}))
    except OSError:  # a full disk; torchrun cannot read a part of the file
        file.unlink(missing_ok=True)
        return False
    return True


def _wait(seconds: float) -> None:
    """Sleep. If torchrun's agent ends this rank meanwhile, exit without a line in its report."""

    def ended(number: int, frame: FrameType | None) -> None:
        os._exit(0)  # the agent knows that the run has failed, and lists every other exit code

    if AGENT in os.environ and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, ended)
    time.sleep(seconds)


def _leave(rank: int, code: int | str | None) -> None:
    """Exit with a code that is not 0. Other ranks exit after rank 0, so that its message comes first."""
    if not code:
        return
    if rank > 0:
        _wait(GRACE_S)
    try:
        sys.stdout.flush()
    finally:  # also where the output is closed
        os._exit(code if isinstance(code, int) else FAILURE)


def _end_with_the_starter(folder: str | None) -> None:
    """Exit when the process that started this one is gone, also while this one waits for other ranks or a GPU.

    folder: where ranks meet, which a killed starter could not remove. A process without one was started by a server:
    SIGTERM ends it and the ranks that it started.
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
