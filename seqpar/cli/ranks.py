"""Start this command on several processes of this machine, by torchrun's own agent and without torchrun's report.

Each rank is `python -m seqpar.cli` with the flags of this process. The agent ends all ranks as soon as one fails; then
this process prints one message and exits with the failed rank's code. Ctrl-C ends all ranks.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from seqpar.cli.exits import PROCESS, REPORTS, STARTER, Report
from seqpar.transports._sockets import remove_sockets

SHUTDOWN_S = 5  # a rank that does not end in this time is killed
MOST = 128  # processes of one machine, each of which needs about 1 GB of host memory


def wanted(gpus: int | None, ranks: int | None) -> int:
    """The number of processes that the flags ask for; `ValueError` if they disagree or there are too few GPUs."""
    if gpus is not None and ranks is not None:
        raise ValueError(f"got --gpus {gpus} and --ranks {ranks}, expected one of them")
    for name, count in (("gpus", gpus), ("ranks", ranks)):
        if count is not None and count < 1:
            raise ValueError(f"got --{name} {count}, expected at least 1")
        if count is not None and count > MOST:
            raise ValueError(f"got --{name} {count}, expected at most {MOST} processes on one machine")
    if gpus is not None and gpus > (there := torch.cuda.device_count()):
        raise ValueError(
            f"got --gpus {gpus} on a machine with {there} GPU(s), expected at most {there}"
            + ("" if there else f"; use --ranks {gpus} for processes on the CPU")
        )
    return gpus or ranks or 1


def start(words: Sequence[str], count: int) -> None:
    """Run `seqpar WORDS` on `count` processes; SystemExit with a non-zero code, after one message, if a rank fails."""
    with tempfile.TemporaryDirectory(prefix="seqpar-") as folder:
        os.environ.update({REPORTS: folder, STARTER: str(os.getpid())})
        # like torchrun: ranks that each use all cores would slow each other down
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # warnings about lost connections name no rank
        # torch 2.13 deprecates collectives that torch 2.11 has under no other name
        os.environ.setdefault("PYTHONWARNINGS", "ignore::FutureWarning:torch.distributed.c10d_logger")
        os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SHUTDOWN_S))
        _quiet()
        try:
            elastic_launch(_config(count, folder), sys.executable)("-u", *_safe_path(), "-m", "seqpar.cli", *words)
        except SignalException as stop:
            print("stopped", file=sys.stderr, flush=True)
            raise SystemExit(128 + stop.sigval) from None
        except ChildFailedError as failed:
            codes = {rank: failure.exitcode for rank, failure in failed.failures.items()}
            message, code = verdict(codes, Report.read(folder))
            print(message, file=sys.stderr, flush=True)
            raise SystemExit(code) from None
        finally:
            told = [path.read_text() for path in Path(folder).glob(f"*{PROCESS}")]
            remove_sockets([int(text) for text in told if text])


def verdict(codes: Mapping[int, int], reports: Mapping[int, Report]) -> tuple[str, int]:
    """The message and the exit code for failed ranks: rank -> exit code (a negative one is a signal), and its report.

    In order: a mistake (rank 0's if it has told one), what went wrong first, a signal that the agent does not send to
    the others, the first bug, any other end. A deadline comes before signals, because the rank that it names may have
    been stopped and then killed with the job; the agent sees a rank that was killed first long before a deadline.
    """
    for rank, report in reports.items():
        if report.kind == "mistake":
            return report.text if rank == 0 else f"rank {rank}: {report.text}", report.code
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


def _config(count: int, folder: str) -> LaunchConfig:
    """One machine, no restarts, a free port."""
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id=str(uuid.uuid4()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        local_addr="localhost",
        logs_specs=DefaultLogsSpecs(log_dir=str(Path(folder, "logs"))),
    )


def _safe_path() -> list[str]:
    """Python's flag that leaves the working directory out of the search for `seqpar`, if it is left out here too."""
    return [] if sys.path[0] in ("", os.getcwd()) else ["-P"]


def _quiet() -> None:
    """Silence the agent's own log: what it says of a failed rank, we say in one line."""
    log = logging.getLogger("torch.distributed.elastic")
    log.addHandler(logging.NullHandler())
    log.propagate = False
