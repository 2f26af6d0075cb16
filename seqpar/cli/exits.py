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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NoReturn

import torch.distributed as dist

from seqpar.cli.args import Args, ProfileArgs
from seqpar.mesh import mesh as meshes
from seqpar.mesh.boundary import CancelledError, Reason, StepBoundary
from seqpar.mesh.errors import is_failure
from seqpar.mesh.mesh import Mesh
from seqpar.mesh.processes import MEETING
from seqpar.mesh.watch import is_lost

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
REPORTS = "SEQPAR_REPORTS"  # environment of a rank: a pipe to the process that started it, and prints for it
AGENT = "TORCHELASTIC_RUN_ID"  # environment of a rank that torchrun's agent has started
Leave = Callable[[int], NoReturn]


class Stopped(KeyboardInterrupt):
    """A signal tells this process to end. number: the signal."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Noted:
    """A handler of signals after which the main thread ends by itself as soon as it can."""

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Note the signal, or raise `Stopped`."""
        raise NotImplementedError


class Ends(Noted):
    """A handler that raises `Stopped`, or leaves at once where nothing has to be removed (`at_once`).

    Only the first signal raises, because a second one would interrupt the removal of files.
    """

    def __init__(self, leave: Leave, at_once: bool = False) -> None:
        self.at_once, self._leave, self._raised = at_once, leave, False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Raise `Stopped`, or leave."""
        if self.at_once:
            self._leave(number)
        if not self._raised:
            self._raised = True
            raise Stopped(number)


def leaves() -> Leave:
    """Return what exits with 128 + n after signal n; one process of a job says "stopped": rank 0, or the starter.

    torchrun's agent ends ranks by SIGTERM when another one has failed, and has a report of its own.
    """
    speaks = REPORTS not in os.environ and os.environ.get("RANK", "0") == "0"
    by_agent = AGENT in os.environ

    def leave(number: int) -> NoReturn:
        try:
            if speaks and not (by_agent and number == signal.SIGTERM):
                os.write(2, b"stopped\n")  # print may be what the signal has interrupted
        finally:  # also where nobody reads the output any more
            os._exit(128 + number)

    return leave


@contextmanager
def handled(handler: Noted, numbers: Sequence[signal.Signals] = SIGNALS) -> Iterator[None]:
    """Let a handler take signals in this context; see `take`."""
    before = take(handler, numbers)
    try:
        yield
    finally:
        for number, each in before.items():
            signal.signal(number, each)


def take(handler: Noted, numbers: Sequence[signal.Signals] = SIGNALS) -> dict[signal.Signals, Any]:
    """Let a handler take signals; return their handlers before.

    An ignored signal stays ignored, as by `nohup`; one that others handle is left to them, as to torchrun's agent while
    it ends its ranks.
    """
    before: dict[signal.Signals, Any] = {}
    for number in numbers:
        each = signal.getsignal(number)
        if each in (signal.SIG_DFL, signal.default_int_handler) or isinstance(each, Noted):
            before[number] = signal.signal(number, handler)
    return before


@contextmanager
def at_once() -> Iterator[None]:
    """Leave at once after a signal in this context: what is imported may take `Stopped` for an error of its own."""
    ends = {each for number in SIGNALS if isinstance(each := signal.getsignal(number), Ends)}
    for each in ends:
        each.at_once = True
    try:
        yield
    finally:
        for each in ends:
            each.at_once = False


@contextmanager
def ends_when_stopped(leave: Leave, grace_s: float) -> Iterator[None]:
    """Raise `Stopped` in the main thread after a signal in this context; call `leave` in a thread after `grace_s`.

    In this time the main thread may end by itself, and remove unfinished files.
    """
    receive, send = os.pipe()
    os.set_blocking(send, False)

    def watch() -> None:
        while number := os.read(receive, 1):
            if isinstance(signal.getsignal(number[0]), Noted):
                time.sleep(grace_s)
                leave(number[0])
        os.close(receive)

    threading.Thread(target=watch, daemon=True, name="seqpar-interrupted").start()
    before = signal.set_wakeup_fd(send, warn_on_full_buffer=False)
    try:
        with handled(Ends(leave)):
            yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(send)


NOTED = (signal.SIGINT, signal.SIGHUP)


class Stop(Noted):
    """A handler that notes a signal. number: the last one that has come; SIGINT if another rank got one."""

    def __init__(self) -> None:
        self.number, self._asked = int(signal.SIGINT), False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Note the signal."""
        self.number, self._asked = number, True

    def wants(self) -> Reason | None:
        """Return why this rank wants the run to end."""
        return "cancelled" if self._asked else None


@contextmanager
def stoppable(args: Args, mesh: Mesh) -> Iterator[Callable[[], None]]:
    """Yield the boundary that every rank passes between steps and parts; `Stopped` on all if one got a signal.

    A signal that something else handles stays with that. A profile has no boundary, which would be measured, too.
    """
    if isinstance(args, ProfileArgs):
        yield lambda: None
        return
    stop = Stop()
    try:
        with handled(stop, NOTED):
            yield StepBoundary(mesh, stop.wants)
    except CancelledError:
        raise Stopped(stop.number) from None
    if stop.wants():  # after the last boundary
        raise Stopped(stop.number)


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
    meshes.last_words(lambda error: _tell(rank, pipe, meshes.LostRankError(error), LAST_GRACE_S))
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
