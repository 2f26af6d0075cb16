"""Faults: jobs of two ranks that are killed, stopped, interrupted or run out of something; how do they end?

Each job is started as a user starts it, a fault happens in it, and the table says what its exit code and last line
were, how many seconds after the fault its last process was gone, and what was left: processes, files in shared memory,
temporary files, half a picture, memory of GPUs. The bench ends with 1 if anything is not as `CASES` says.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from launch.benches.fault_job import Job, Outcome, Signal, Started, by_command, by_torchrun, carried_out
from launch.benches.planted import Plant
from launch.benches.timing import environment, record
from seqpar.cli.exits import GRACE_S
from seqpar.transports import _contract

MORE_S = 5.0  # every process is gone this long after its deadline
CONTINUED_S = 10.0
LATE = r"timed out|late|did not"
KILLED = "error: rank {rank} was terminated by SIGKILL"


@dataclass(frozen=True)
class Case:
    """One fault. message: a pattern of the last line, code: the exit code of the command.

    within: which deadline may pass before all processes are gone: none, the one of later calls, or that of first calls.
    in_place: only for transports whose ranks write into each other's memory.
    A job that survives its fault (code 0) must leave the picture of a job without one, bit by bit; any other no file.
    """

    name: str
    plant: Plant
    code: int
    message: str = ""
    signals: tuple[Signal, ...] = ()
    within: Literal["nothing", "first", "later"] = "nothing"
    in_place: bool = False


@dataclass(frozen=True)
class Deadlines:
    """Seconds that a rank waits for another: in first calls of a shape, and later; and until all processes are gone."""

    first: float
    later: float
    more: float = MORE_S

    def flags(self) -> tuple[str, ...]:
        return "--first-deadline-s", f"{self.first:g}", "--deadline-s", f"{self.later:g}"

    def bound(self, case: Case) -> float | None:
        """The seconds after which no process may be left; None for a job that goes on."""
        if case.code == 0:
            return None
        return self.more + {"nothing": 0.0, "first": self.first, "later": self.later}[case.within]


def _later(number: signal.Signals, after_s: float = 0.3) -> tuple[Signal, ...]:
    return (Signal(number, after_s),)


NOTHING = Case("nothing", Plant("nothing"), 0)
CASES = (
    Case("rank 1 killed", Plant("kill"), 137, KILLED.format(rank=1)),
    Case("rank 0 killed", Plant("kill", rank=0), 137, KILLED.format(rank=0)),
    Case("rank 1 stopped in a step", Plant("stop"), 1, rf"rank 1.*({LATE})|({LATE}).*rank 1", within="later"),
    Case("rank 0 stopped in a step", Plant("stop", rank=0), 1, rf"rank 0.*({LATE})|({LATE}).*rank 0", within="later"),
    Case("rank 1 stopped in its first exchange", Plant("stop", "exchange", at=0), 1, "rank 1", within="first"),
    Case("rank 1 never starts", Plant("stop", "start"), 1, "rank 1", within="first"),
    Case("rank 1 stopped for a while", Plant("stop"), 0, signals=(Signal(signal.SIGCONT, CONTINUED_S, "stopped"),)),
    Case("rank 1 late at every exchange", Plant("late", "exchange"), 0),
    # on GPUs the host runs ahead, so that the others may still wait in a first call
    Case("rank 1 leaves with code 0", Plant("leave"), 1, "rank 1", within="first"),
    Case("rank 1 raises", Plant("raise"), 1, "planted bug"),
    Case("rank 1 out of memory", Plant("memory"), 1, "rank 1.*memory"),
    Case("rank 1 killed while an arena is made", Plant("kill", "arena"), 137, KILLED.format(rank=1), in_place=True),
    Case("Ctrl-C in a step", Plant("slow"), 130, "stopped", _later(signal.SIGINT)),
    Case("Ctrl-C while the picture is written", Plant("slow", "write", 0), 130, "stopped", _later(signal.SIGINT)),
    Case("terminated while the picture is written", Plant("slow", "write", 0), 143, "stopped", _later(signal.SIGTERM)),
    Case("starter killed", Plant("slow"), -9, signals=_later(signal.SIGKILL)),
    Case("disk full while the picture is written", Plant("disk", "write", 0), 1, "No space left on device"),
)


def wrong(
    case: Case, outcome: Outcome, deadlines: Deadlines, bits: str | None, message: str | None = None
) -> list[str]:
    """What is not as it must be, nothing if all is.

    bits: the digest of a job without a fault; message: the line that says how the job ended, the last one by default.
    """
    message = outcome.message if message is None else message
    found = [f"left {name}" for name in outcome.left]
    if outcome.code != case.code:
        found.append(f"exit code {outcome.code}, expected {case.code}")
    if not re.search(case.message, message):
        found.append(f"message {message!r}, expected {case.message!r}")
    bound = deadlines.bound(case)
    if bound is not None and outcome.seconds > bound:
        found.append(f"gone after {outcome.seconds:.1f} s, expected {bound:g}")
    if outcome.picture != (case.code == 0):
        found.append("no picture" if case.code == 0 else "a picture")
    if case.code == 0 and bits is not None and outcome.digest != bits:
        found.append(f"latents {outcome.digest}, expected {bits}")
    return found


def for_a_while(case: Case, seconds: float) -> Case:
    signals = (replace(each, after_s=seconds) if each.number == signal.SIGCONT else each for each in case.signals)
    return replace(case, signals=tuple(signals))


WORDS = ("--model", "builtin", "--classes", "cat", "--steps", "6", "--mesh", "ulysses=2")
STARTERS: dict[str, Callable[[Job], Started]] = {"seqpar": by_command, "torchrun": by_torchrun}
ENOUGH_S = 100.0  # besides all deadlines: to start, and to end
FREE_MB = 64  # memory of a GPU may differ by this much after all jobs
# caches of compiled kernels: of Triton, inductor, the driver, FlashAttention-4 and its packages
CACHES = (
    "TRITON_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "CUDA_CACHE_PATH",
    "CUTE_DSL_CACHE_DIR",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR",
    "QUACK_CACHE_DIR",
    "TVM_FFI_CACHE_DIR",
)
Caches = tuple[tuple[str, str], ...]
"""Environment of all jobs: the folders of their caches."""
COLUMNS = ("fault", "starter", "transport", "code", "seconds", "verdict", "message")
# torchrun ends with 1, and with its own report; what one of all lines says:
UNDER_TORCHRUN = {
    "rank 1 killed": "Signal 9",
    "rank 1 stopped in a step": "error: rank 0: timed out .* rank 1",
    "rank 0 stopped in a step": "error: rank 1: timed out .* rank 0",
    "rank 1 raises": "^rank 1: error: a bug: .*planted bug",
    "Ctrl-C in a step": "^stopped",
}


@dataclass(frozen=True)
class Faults:
    """Run jobs of two ranks with a fault in each, and check how they end."""

    only: tuple[str, ...] = ()
    """Run the faults whose name contains one of these words."""
    transports: tuple[str, ...] = ()
    """Transports to run each fault over; all by default."""
    starters: tuple[str, ...] = ("seqpar", "torchrun")
    """"seqpar" (the command starts its ranks) and torchrun (some of the faults)."""
    side_by_side: int = 2
    """Number of jobs that run at the same time, on the same GPUs."""
    first_deadline_s: float = 30.0
    """Seconds that a rank waits for another in first calls."""
    deadline_s: float = 12.0
    """Seconds that a rank waits for another later."""
    stopped_s: float = 10.0
    """Seconds for which a rank is stopped that goes on."""
    out: Path | None = None
    """Append JSON lines here."""

    @property
    def over(self) -> list[str]:
        return list(self.transports or _contract.names())

    @property
    def deadlines(self) -> Deadlines:
        return Deadlines(self.first_deadline_s, self.deadline_s)


def main(args: Faults) -> None:
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ValueError(
            f"got {os.environ['WORLD_SIZE']} processes, but this bench starts its own: run it without torchrun"
        )
    if args.side_by_side < 1 or not 0 < args.stopped_s < args.deadline_s <= args.first_deadline_s:
        raise ValueError(f"got {args}, expected jobs, and 0 < --stopped-s < --deadline-s <= --first-deadline-s")
    environment()  # this may take memory of a GPU
    before = used()
    print(*map(row_of, (COLUMNS, ["---"] * len(COLUMNS))), sep="\n", flush=True)
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        caches = tuple((name, os.environ.get(name, str(Path(folder, name.lower())))) for name in CACHES)
        lines = run_all(args, [(NOTHING, "seqpar", transport) for transport in args.over], {}, caches)
        clean = {line["case"]["transport"]: line["latents"] for line in lines}
        lines += run_all(args, planned(args), clean, caches)
    more = freed(before)
    kept = [f"GPU {index} holds {megabytes} MB more" for index, megabytes in enumerate(more) if megabytes > FREE_MB]
    print(*kept, sep="\n", flush=True)
    record({"bench": "faults", "jobs": len(lines), "megabytes_more_on_each_gpu": more}, args.out)
    if kept or any(line["wrong"] for line in lines):
        raise SystemExit(1)


def planned(args: Faults) -> list[tuple[Case, str, str]]:
    found = []
    for starter in args.starters:
        for case in CASES:
            if (args.only and not any(word in case.name for word in args.only)) or (
                starter == "torchrun" and case.name not in UNDER_TORCHRUN
            ):
                continue
            fits = [each for each in args.over if not case.in_place or _contract.facts(each).in_place]
            found += [(case, starter, each) for each in fits]
    return found


def run_all(
    args: Faults, jobs: Sequence[tuple[Case, str, str]], clean: Mapping[str, str | None], caches: Caches
) -> list[dict[str, Any]]:
    """Run the jobs, some at the same time; after one whose processes were killed, run one without a fault at once.

    clean: transport -> digest of the latents of a job without a fault. Each line is printed and written as it comes.
    """
    written = threading.Lock()

    def one(planned: tuple[Case, str, str]) -> list[dict[str, Any]]:
        case, starter, transport = planned
        lines = [job(args, case, starter, transport, clean, caches)]
        if "killed" in case.name and starter == "seqpar":
            again = replace(NOTHING, name=f"again after: {case.name}")
            lines.append(job(args, again, starter, transport, clean, caches))
        with written:
            for line in lines:
                of, verdict = line["case"], "; ".join(line["wrong"]) or "right"
                facts = str(line["code"]), f"{line['seconds']:.1f}", verdict, line["message"][:160]
                print(row_of((of["fault"], starter, transport, *facts)), flush=True)
                record(line, args.out)
        return lines

    with ThreadPoolExecutor(args.side_by_side) as pool:
        return [line for lines in pool.map(one, jobs) for line in lines]


def job(
    args: Faults, case: Case, starter: str, transport: str, clean: Mapping[str, str | None], caches: Caches
) -> dict[str, Any]:
    """Run a job and return its line."""
    ranks = ("--ranks", "2") if starter == "seqpar" else ()
    words = ("sample", *ranks, *WORDS, "--transport", transport, *args.deadlines.flags())
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        case = for_a_while(case, args.stopped_s)
        plant = replace(case.plant, folder=folder)
        limit = ENOUGH_S + args.first_deadline_s + args.deadline_s
        done = carried_out(Job(words, Path(folder), plant, case.signals, limit, caches), STARTERS[starter])
    message, bounds = done.message, args.deadlines
    if starter == "torchrun":  # where a rank that fails waits for rank 0 to report first
        case, bounds = replace(case, code=1, message=UNDER_TORCHRUN[case.name]), replace(bounds, more=MORE_S + GRACE_S)
        message = next((text for text in done.lines if re.search(case.message, text)), message)
    deadlines = {"first": args.first_deadline_s, "later": args.deadline_s}
    about = {"fault": case.name, "starter": starter, "transport": transport}
    return {
        "bench": "faults",
        "case": {**about, "deadline_s": deadlines, "side_by_side": args.side_by_side},
        "gpus": 2 if torch.cuda.is_available() else 0,
        "code": done.code,
        "seconds": round(done.seconds, 2),
        "message": message,
        "left": done.left,
        "wrong": wrong(case, done, bounds, clean.get(transport), message),
        "latents": done.digest,
    }


def used() -> list[int]:
    if not torch.cuda.is_available():
        return []
    ask = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return [int(text) for text in subprocess.run(ask, capture_output=True, text=True, check=True).stdout.split()]


def freed(before: Sequence[int]) -> list[int]:
    end = time.monotonic() + 10
    while max(more := [now - then for now, then in zip(used(), before, strict=True)], default=0) > FREE_MB:
        if time.monotonic() > end:
            break
        time.sleep(0.5)
    return more


def row_of(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"
