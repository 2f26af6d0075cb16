"""Start this command on several processes of this machine, which meet in a folder that only this user can reach.

Each rank is `python -m seqpar.cli` with the flags of this process. As soon as one fails, all others are ended; then
this process prints one message and exits with the failed rank's code. A signal ends all ranks. By what lies in the
folder ranks find each other and show that they live, so that no port is open for it.
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
from typing import get_args

import torch

from seqpar.cli.exits import STARTER, Kind, Report, Reports
from seqpar.cli.signals import REPORTS, SIGNALS
from seqpar.mesh.processes import MEETING
from seqpar.transports._sockets import remove_sockets
from seqpar.types.arguments import check_whole

MODULE = "seqpar.cli"  # what a rank runs
LOOK_S = 0.1  # between two looks at the ranks
CAUSE_S = 1.0  # where ranks have only lost others, these have so long to say why
SHUTDOWN_S = 5.0  # a rank that does not end in this time is killed
MOST = 128  # processes of one machine, each of which needs about 1 GB of host memory
SERVED = "SEQPAR_SERVE"  # environment of a server's ranks: the path of its socket
STOPS = (*SIGNALS, signal.SIGQUIT)  # they end the ranks, then this process
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")  # environment: where gloo and NCCL open their sockets
LOOPBACK, UP = 0x8, 0x1  # flags of an interface, as Linux shows them


class Signalled:
    """A handler that notes the first signal that tells this process to end; number: 0 before.

    It raises nothing: an error in a handler is lost where Python itself calls a function, as around a fork.
    """

    number = 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Note the signal."""
        self.number = self.number or number


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
    reports = Reports()
    ranks: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="seqpar-", dir=parent) as folder:  # of mode 0700
        stop, failed = Signalled(), dict[int, int]()
        try:
            with _noted(stop):
                command = (sys.executable, "-u", *_safe_path(), "-m", MODULE, *words)
                for rank in range(count):
                    pipe = reports.open()
                    environment = _environment(folder, rank, count, pipe)
                    try:
                        started = subprocess.Popen(command, env=environment, start_new_session=True, pass_fds=[pipe])
                    finally:
                        os.close(pipe)
                    ranks.append(started)
                failed = _first_failed(ranks, reports, stop)
        finally:
            _end(ranks)  # also where a rank could not be started
            remove_sockets([rank.pid for rank in ranks])
            told = reports.read()
            reports.close()
        if stop.number:
            with suppress(OSError):  # the terminal is closed
                print("stopped", file=sys.stderr, flush=True)
            raise SystemExit(128 + stop.number)
        if failed:
            # how others have ended is not the cause: they were ended
            others = dict.fromkeys((rank for rank, one in enumerate(ranks) if one.poll()), -signal.SIGTERM)
            message, code = verdict({**failed, **others, **failed}, told)
            print(message, file=sys.stderr, flush=True)
            raise SystemExit(code)


def _first_failed(ranks: Sequence[subprocess.Popen[bytes]], reports: Reports, stop: Signalled) -> dict[int, int]:
    """Wait for a signal, or until all ranks have ended or one has failed; return the exit codes of those that failed.

    Where these have only lost another rank, that one has `CAUSE_S` to say why it has failed.
    """
    end = float("inf")
    while not stop.number:
        codes = [rank.poll() for rank in ranks]
        told, failed = reports.read(), {rank: code for rank, code in enumerate(codes) if code}
        end = min(end, time.monotonic() + CAUSE_S) if failed else end
        lost = all(rank in told and told[rank].kind == "lost" for rank in failed)
        if None not in codes or (failed and (not lost or time.monotonic() > end)):
            return failed
        time.sleep(LOOK_S)
    return {}


def _end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """End the ranks that still run, also those that are stopped, and kill what is left after some time.

    By SIGTERM, whatever signal has come: at SIGINT a Python that is just starting prints a traceback.
    """
    for each in (signal.SIGTERM, signal.SIGCONT):  # a stopped process takes a signal when it continues
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
def _noted(stop: Signalled) -> Iterator[None]:
    """Note signals that tell the process to end in this context, and ignore more of them after it, while ranks end.

    One that is ignored stays ignored.
    """
    before = {each: signal.getsignal(each) for each in STOPS if signal.getsignal(each) is not signal.SIG_IGN}
    for each in before:
        signal.signal(each, stop)
    try:
        yield
    finally:
        for each in before:
            signal.signal(each, signal.SIG_IGN)  # the ranks are being ended already


def _environment(folder: str, rank: int, count: int, pipe: int) -> dict[str, str]:
    """Return a rank's environment: torchrun's names for its place, the folder, and sockets for this machine alone.

    pipe: for its report.
    """
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    ours = {REPORTS: str(pipe), MEETING: folder, STARTER: str(os.getpid())}
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

    In order: a mistake (rank 0's if it has told one), a rank that a signal has stopped, what went wrong first, a signal
    that the starter does not send to the others, the first bug, an end without a reason, and a lost rank, to which
    something of this has happened, or which does not answer. So the order in which ranks end does not matter.
    """
    kinds: dict[str, dict[int, Report]] = {kind: {} for kind in get_args(Kind)}
    for rank, report in reports.items():
        kinds[report.kind][rank] = report
    for rank, report in kinds["mistake"].items():
        return report.text if rank == 0 else f"rank {rank}: {report.text}", report.code
    for rank, code in codes.items():
        if code - 128 in SIGNALS:
            return f"stopped: rank {rank} got {signal.Signals(code - 128).name}", code
    if 128 + signal.SIGPIPE in codes.values():
        return "stopped: nothing reads the output any more", 128 + signal.SIGPIPE
    if kinds["failure"]:
        return _first(kinds["failure"])
    for rank, code in codes.items():
        if code < 0 and code != -signal.SIGTERM:
            return _ended_by(rank, -code), 128 - code
    if kinds["bug"]:
        rank, first = min(kinds["bug"].items(), key=lambda pair: pair[1].time)
        return f"rank {rank} failed, which is a bug:\n{first.text.rstrip()}", first.code
    for rank, code in codes.items():
        if code > 0 and rank not in reports:
            return f"error: rank {rank} ended with exit code {code} and told no reason", code
    if kinds["lost"]:
        return _first(kinds["lost"])
    rank, code = next(iter(codes.items()))
    return _ended_by(rank, -code), 128 - code


def _first(reports: Mapping[int, Report]) -> tuple[str, int]:
    """The message and the exit code of the first report; what all ranks saw needs no number of a rank."""
    rank, first = min(reports.items(), key=lambda pair: pair[1].time)
    rank_0s = 0 in reports and reports[0].text == first.text
    return first.text if rank_0s else f"rank {rank}: {first.text}", first.code


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
