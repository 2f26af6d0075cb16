"""Start this command on several processes of this machine, which meet in a folder that only this user can reach.

Each rank is `python -m seqpar.cli` with the flags of this process. As soon as one fails, all others are ended; then
this process prints one message and exits with the failed rank's code. Ctrl-C ends all ranks. By what lies in the folder
ranks find each other and show that they live, so that no port is open for it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import torch

from seqpar.cli.exits import PROCESS, REPORTS, STARTER, STOPPED, Report
from seqpar.mesh.processes import MEETING
from seqpar.transports._sockets import remove_sockets
from seqpar.types.arguments import check_whole

MODULE = "seqpar.cli"  # what a rank runs
LOOK_S = 0.1  # between two looks at the ranks
SHUTDOWN_S = 5.0  # a rank that does not end in this time is killed
MOST = 128  # processes of one machine, each of which needs about 1 GB of host memory
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # they end the ranks, then this process
SERVED = "SEQPAR_SERVE"  # environment of a server's ranks: the path of its socket
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")  # environment: where gloo and NCCL open their sockets
LOOPBACK, UP = 0x8, 0x1  # flags of an interface, as Linux shows them


class StoppedError(Exception):
    """A signal told this process to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def wanted(gpus: int | None, ranks: int | None) -> int:
    """The number of processes that the flags ask for; `ValueError` if they disagree or there are too few GPUs."""
    if gpus is not None and ranks is not None:
        raise ValueError(f"got --gpus {gpus} and --ranks {ranks}, expected one of them")
    for name, count in (("gpus", gpus), ("ranks", ranks)):
        if count is not None:
            check_whole(f"--{name}", count, 1, MOST)
    if gpus is not None and gpus > (present := torch.cuda.device_count()):
        raise ValueError(
            f"got --gpus {gpus} on a machine with {present} GPU(s), expected at most {present}"
            + ("" if present else f"; use --ranks {gpus} for processes on the CPU")
        )
    return gpus or ranks or 1


def start(words: Sequence[str], count: int) -> None:
    """Run `seqpar WORDS` on `count` processes; SystemExit with a non-zero code, after one message, if a rank fails."""
    served = os.environ.get(SERVED)  # a server removes its own folder, whatever ends its ranks
    parent = None if served is None else os.path.dirname(served)
    with tempfile.TemporaryDirectory(prefix="seqpar-", dir=parent) as folder:  # of mode 0700
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            with _signals_raised():
                command = (sys.executable, "-u", *_safe_path(), "-m", MODULE, *words)
                for rank in range(count):
                    environment = _environment(folder, rank, count)
                    ranks.append(subprocess.Popen(command, env=environment, start_new_session=True))
                failed = _first_failed(ranks)
        except StoppedError as stop:
            _end(ranks, stop.number)
            print("stopped", file=sys.stderr, flush=True)
            raise SystemExit(128 + stop.number) from None
        finally:
            _end(ranks, signal.SIGTERM)  # also where a rank could not be started
            processes = [path.read_text() for path in Path(folder).glob(f"*{PROCESS}")]
            remove_sockets([int(process) for process in processes if process])
        if failed:
            codes = {rank: code for rank, one in enumerate(ranks) if (code := one.poll())}
            killed = {rank: -signal.SIGTERM for rank in codes if codes[rank] == -signal.SIGKILL}  # by `_end`
            message, code = verdict({**failed, **codes, **killed, **failed}, Report.read(folder))
            print(message, file=sys.stderr, flush=True)
            raise SystemExit(code)


def _first_failed(ranks: Sequence[subprocess.Popen[bytes]]) -> dict[int, int]:
    """Wait until all ranks have ended or one has failed; return the exit codes of those that failed, by rank."""
    while True:
        codes = [rank.poll() for rank in ranks]
        if any(codes) or None not in codes:
            return {rank: code for rank, code in enumerate(codes) if code}
        time.sleep(LOOK_S)


def _end(ranks: Sequence[subprocess.Popen[bytes]], number: int) -> None:
    """End the ranks that still run by a signal, also those that are stopped, and kill what is left after some time."""
    for each in (number, signal.SIGCONT):  # a stopped process takes a signal when it continues
        _send(ranks, each)
    end = time.monotonic() + SHUTDOWN_S
    for again in (True, False):
        for rank in ranks:
            with suppress(subprocess.TimeoutExpired):  # after SIGKILL: it is stuck in the kernel, and is left there
                rank.wait(max(0.0, end - time.monotonic()))
        if again:
            _send(ranks, signal.SIGKILL)
            end = time.monotonic() + SHUTDOWN_S


def _send(ranks: Sequence[subprocess.Popen[bytes]], number: int) -> None:
    """Send a signal to the ranks that still run, with the processes that they have started."""
    for rank in ranks:
        if rank.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(rank.pid, number)


@contextmanager
def _signals_raised() -> Iterator[None]:
    """Raise StoppedError in this context when a signal tells the process to end; one that is ignored stays ignored."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise StoppedError(number)

    before = {each: signal.getsignal(each) for each in SIGNALS if signal.getsignal(each) is not signal.SIG_IGN}
    for each in before:
        signal.signal(each, stop)
    try:
        yield
    finally:
        for each in before:
            signal.signal(each, signal.SIG_IGN)  # the ranks are being ended already


def _environment(folder: str, rank: int, count: int) -> dict[str, str]:
    """Return a rank's environment: torchrun's names for its place, the folder, and sockets for this machine alone."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    ours = {REPORTS: folder, MEETING: folder, STARTER: str(os.getpid())}
    wishes = {
        "OMP_NUM_THREADS": "1",  # like torchrun: ranks that each use all cores would slow each other down
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # warnings about lost connections name no rank
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",  # like torchrun
        "NCCL_RAS_ENABLE": "0",  # a service for administrators, which answers every user of the machine
        # torch 2.13 deprecates collectives that torch 2.11 has under no other name
        "PYTHONWARNINGS": "ignore::FutureWarning:torch.distributed.c10d_logger",
    }
    missing = [name for name in INTERFACES if name not in os.environ]
    wishes |= dict.fromkeys(missing, loopback()) if missing else {}
    return {**wishes, **os.environ, **{name: str(value) for name, value in place.items()}, **ours}


def loopback(interfaces: Path = Path("/sys/class/net")) -> str:
    """Return the name of the network interface that only this machine reaches; ValueError if there is none."""
    for file in sorted(interfaces.glob("*/flags")):
        if int(file.read_text(), 16) & (LOOPBACK | UP) == LOOPBACK | UP:
            return file.parent.name
    raise ValueError(
        f"got no loopback interface in {interfaces}, expected one between ranks of this machine; name the interface to "
        f"use with {' and '.join(INTERFACES)}"
    )


def verdict(codes: Mapping[int, int], reports: Mapping[int, Report]) -> tuple[str, int]:
    """The message and the exit code for failed ranks: rank -> exit code (a negative one is a signal), and its report.

    In order: a mistake (rank 0's if it has told one), an interrupted rank, what went wrong first, a signal that the
    starter does not send to the others, the first bug, any other end. A deadline comes before signals, because the rank
    that it names may have been stopped and then killed with the job; the starter sees a rank that was killed first long
    before a deadline.
    """
    for rank, report in reports.items():
        if report.kind == "mistake":
            return report.text if rank == 0 else f"rank {rank}: {report.text}", report.code
    if STOPPED in codes.values():
        rank = next(rank for rank, code in codes.items() if code == STOPPED)
        return f"stopped: rank {rank} was interrupted", STOPPED
    if 128 + signal.SIGPIPE in codes.values():
        return "stopped: nothing reads the output any more", 128 + signal.SIGPIPE
    if failures := {rank: report for rank, report in reports.items() if report.kind == "failure"}:
        rank, first = min(failures.items(), key=lambda pair: pair[1].time)
        rank_0s = 0 in failures and failures[0].text == first.text  # what all ranks saw needs no number
        return first.text if rank_0s else f"rank {rank}: {first.text}", first.code
    for rank, code in codes.items():
        if code < 0 and code != -signal.SIGTERM:
            return _ended_by(rank, -code), 128 - code
    if reports:
        rank, first = min(reports.items(), key=lambda pair: pair[1].time)
        return f"rank {rank} failed, which is a bug:\n{first.text.rstrip()}", first.code
    rank, code = next(iter(codes.items()))
    if code < 0:
        return _ended_by(rank, -code), 128 - code
    return f"error: rank {rank} ended with exit code {code} and told no reason", code


def _ended_by(rank: int, number: int) -> str:
    """The message for a rank that a signal ended."""
    try:
        name = signal.Signals(number).name
    except ValueError:  # a real-time signal has no name
        name = f"signal {number}"
    hint = "; the system does this if memory runs out" if name == "SIGKILL" else ""
    return f"error: rank {rank} was ended by {name}{hint}"


def _safe_path() -> list[str]:
    """Python's flag that leaves the working directory out of the search for `seqpar`, if it is left out here too."""
    return [] if sys.path[0] in ("", os.getcwd()) else ["-P"]
