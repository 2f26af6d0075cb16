"""Start this command on several processes of this machine; a failing rank ends all, with one message and its exit code.

Each rank is `python -m seqpar.cli` with the flags of this process. Ranks meet and send heartbeats in a folder that only
this user can access, so that no port is open for it.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import get_args

import torch

from seqpar.cli.exits import STARTER, Kind, Report, Reports, of_rank
from seqpar.cli.signals import REPORTS, SIGNALS
from seqpar.mesh.processes import MEETING
from seqpar.types.arguments import check_whole

MODULE = "seqpar.cli"  # what a rank runs
POLL_S = 0.1  # between two checks of the ranks
CAUSE_S = 1.0  # for the cause to be reported where ranks have only lost others
SHUTDOWN_S = 5.0  # before ranks are killed
MOST = 128  # processes of one machine, each of which needs about 1 GB of host memory
SERVED = "SEQPAR_SERVE"  # environment of a server's ranks: the path of its socket
STOPS = (*SIGNALS, signal.SIGQUIT)
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")  # environment: where gloo and NCCL open their sockets
FOLDERS = ("TMPDIR", "TMP", "TEMP", "TEMPDIR")  # environment: the first that is set holds torch's sockets, else /tmp
LOOPBACK, UP = 0x8, 0x1  # flags of an interface, as Linux shows them


class Signalled:
    """A handler that notes the first signal. number: 0 before.

    It raises nothing: an exception in a handler is lost where Python itself calls a function, as around a fork.
    """

    number = 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.number = self.number or number


def wanted(gpus: int | None, ranks: int | None) -> int:
    """The number of processes that the flags request; ValueError if they disagree or GPUs are missing."""
    if gpus is not None and ranks is not None:
        raise ValueError(f"got --gpus {gpus} and --ranks {ranks}; drop one of them")
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
    """Run `seqpar WORDS` on `count` processes; one message and SystemExit if a rank fails."""
    served = os.environ.get(SERVED)  # a server removes its folder, however its ranks exit
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
            _end(ranks)  # also if a rank could not be started
            remove_sockets([rank.pid for rank in ranks])
            received = reports.read()
            reports.close()
        if stop.number:
            with suppress(OSError):  # the terminal is closed
                print("stopped", file=sys.stderr, flush=True)
            raise SystemExit(128 + stop.number)
        if failed:
            # the exit codes of the others are not the cause: they were terminated
            others = dict.fromkeys((rank for rank, process in enumerate(ranks) if process.poll()), -signal.SIGTERM)
            message, code = verdict({**failed, **others, **failed}, received)
            print(message, file=sys.stderr, flush=True)
            raise SystemExit(code)


def remove_sockets(processes: Iterable[int]) -> None:
    """Remove symm_mem-PID of these processes, which have exited; one that answers belongs to another process by now.

    While ranks map each other's memory, torch's symmetric memory has such a socket for each; killed processes leave it.
    """
    folder = next((os.environ[name] for name in FOLDERS if name in os.environ), "/tmp")
    for process in processes:
        path = Path(folder, f"symm_mem-{process}")
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as client:
            if path.is_socket() and client.connect_ex(str(path)) != 0:
                path.unlink()


def _first_failed(ranks: Sequence[subprocess.Popen[bytes]], reports: Reports, stop: Signalled) -> dict[int, int]:
    """Wait for a signal, a failed rank or the end of all; return the exit codes of failed ranks.

    If these have only lost another rank, `CAUSE_S` remain for that one to report.
    """
    end = float("inf")
    while not stop.number:
        codes = [rank.poll() for rank in ranks]
        received, failed = reports.read(), {rank: code for rank, code in enumerate(codes) if code}
        end = min(end, time.monotonic() + CAUSE_S) if failed else end
        lost = all(rank in received and received[rank].kind == "lost" for rank in failed)
        if None not in codes or (failed and (not lost or time.monotonic() > end)):
            return failed
        time.sleep(POLL_S)
    return {}


def _end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """Terminate the running ranks, stopped ones too, then kill what is left."""
    # SIGTERM after any signal: at SIGINT a starting Python prints a traceback. A stopped process needs SIGCONT
    for number in (signal.SIGTERM, signal.SIGCONT):
        _send(ranks, number)
    for last in (False, True):
        end = time.monotonic() + SHUTDOWN_S
        for rank in ranks:
            with suppress(subprocess.TimeoutExpired):  # after SIGKILL: stuck in the kernel, and left there
                rank.wait(max(0.0, end - time.monotonic()))
        if not last:
            _send(ranks, signal.SIGKILL)


def _send(ranks: Sequence[subprocess.Popen[bytes]], number: int) -> None:
    for rank in ranks:
        if rank.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(rank.pid, number)


@contextmanager
def _noted(stop: Signalled) -> Iterator[None]:
    """Note signals in this context, and ignore them after it, while ranks end. Ignored signals stay ignored."""
    numbers = [number for number in STOPS if signal.getsignal(number) is not signal.SIG_IGN]
    for number in numbers:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)


def _environment(folder: str, rank: int, count: int, pipe: int) -> dict[str, str]:
    """A rank's environment: torchrun's variables, the folder, and sockets on this machine only."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    ours = {REPORTS: str(pipe), MEETING: folder, STARTER: str(os.getpid())}
    defaults = {
        "OMP_NUM_THREADS": "1",  # like torchrun
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # warnings about lost connections name no rank
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",  # like torchrun
        "NCCL_RAS_ENABLE": "0",  # a service that answers every user of the machine
        # torch 2.13 deprecates collectives that torch 2.11 has under no other name
        "PYTHONWARNINGS": "ignore::FutureWarning:torch.distributed.c10d_logger",
    }
    missing = [name for name in INTERFACES if name not in os.environ]
    defaults |= dict.fromkeys(missing, loopback()) if missing else {}
    return {**defaults, **os.environ, **{name: str(value) for name, value in place.items()}, **ours}


def loopback(interfaces: Path = Path("/sys/class/net")) -> str:
    """The name of the loopback interface; ValueError if there is none."""
    for file in sorted(interfaces.glob("*/flags")):
        if int(file.read_text(), 16) & (LOOPBACK | UP) == LOOPBACK | UP:
            return file.parent.name
    raise ValueError(
        f"no loopback interface in {interfaces}, which ranks of this machine need; name another interface by "
        f"{' and '.join(INTERFACES)}"
    )


def verdict(codes: Mapping[int, int], reports: Mapping[int, Report]) -> tuple[str, int]:
    """The message and exit code for failed ranks. codes: by rank; negative ones are signals.

    The first that applies: an invalid argument, a signal to a rank, a closed output, a failure, a signal that the
    starter does not send, a bug, an exit without a report, a lost rank. So the order in which ranks exit is irrelevant.
    """
    kinds: dict[str, dict[int, Report]] = {kind: {} for kind in get_args(Kind)}
    for rank, report in reports.items():
        kinds[report.kind][rank] = report
    for rank, report in kinds["mistake"].items():
        return of_rank(rank, report.text), report.code
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
            return f"error: rank {rank} exited with code {code} without a message", code
    if kinds["lost"]:
        return _first(kinds["lost"])
    rank, code = next(iter(codes.items()))
    return _ended_by(rank, -code), 128 - code


def _first(reports: Mapping[int, Report]) -> tuple[str, int]:
    rank, first = min(reports.items(), key=lambda pair: pair[1].time)
    seen_on_0 = 0 in reports and reports[0].text == first.text
    return of_rank(0 if seen_on_0 else rank, first.text), first.code


def _ended_by(rank: int, number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:  # a real-time signal has no name
        name = f"signal {number}"
    hint = "; the system does so if memory runs out" if name == "SIGKILL" else ""
    return f"error: rank {rank} was terminated by {name}{hint}"


def _safe_path() -> list[str]:
    """Python's flag that excludes the working directory from sys.path, if it is excluded here."""
    return [] if sys.path[0] in ("", os.getcwd()) else ["-P"]
