"""Starts one job with a fault, watches its processes until the last one is gone, and says what they left behind.

A job is a command that starts ranks. Its processes are found in /proc as the descendants of the first one, also those
whose parent has died. It counts time from the fault itself, which a planted fault writes down.
"""

from __future__ import annotations

import getpass
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from launch.benches.planted import PLANTED, Plant

ROOT = Path(__file__).parents[2]
LOOK_S = 0.05  # between two looks at the processes, which cost milliseconds each
SHARED = Path("/dev/shm")
# caches of torch, the logs of torchrun's own agent, and semaphores, which Python's own tracker of resources removes
KEPT = ("torchinductor_", "torchelastic_", "sem.mp-")
SETTLE_S = 1.0  # a file that someone else is about to remove, as Python's tracker does, is gone after this time
DIGEST = re.compile(r"latents ([0-9a-f]{16})")
BAR = re.compile(r"[^\r\n]*?\d+/\d+ \[[^\]\r\n]*/s\]|\r")
Process = tuple[int, int]
"""A process: its id, and when it started, in ticks since the machine did."""


class Started(Protocol):
    """A started job: `subprocess.Popen` is one."""

    pid: int

    def poll(self) -> int | None: ...


@dataclass(frozen=True)
class Signal:
    """A signal that the harness sends, this long after the fault: to the process started first, or to stopped ranks."""

    number: signal.Signals
    after_s: float = 0.0
    to: str = "starter"


@dataclass(frozen=True)
class Job:
    """What to start. words: of the `seqpar` command, without --out; limit_s: when a job that hangs is killed."""

    words: tuple[str, ...]
    folder: Path
    plant: Plant = field(default_factory=Plant)
    signals: tuple[Signal, ...] = ()
    limit_s: float = 200.0
    environment: tuple[tuple[str, str], ...] = ()

    @property
    def out(self) -> Path:
        return self.folder / "out" / "picture.png"

    def command(self) -> list[str]:
        return [*self.words, "--out", str(self.out)]

    def settings(self) -> dict[str, str]:
        """What the job's environment has besides this process's; its temporary files have their own folder."""
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        own = {"TMPDIR": str(self.folder / "tmp"), PLANTED: self.plant.text(), "PYTHONPATH": path, "COLUMNS": "200"}
        return {"OMP_NUM_THREADS": "1", **own, **dict(self.environment)}


@dataclass(frozen=True)
class Outcome:
    """How a job ended. seconds: from the fault (without one, from the start) until its last process was gone."""

    code: int | None
    seconds: float
    text: str
    left: tuple[str, ...]
    picture: bool

    @property
    def lines(self) -> list[str]:
        return [line for line in BAR.sub("\n", self.text).splitlines() if line.strip()]

    @property
    def message(self) -> str:
        return self.lines[-1] if self.lines else ""

    @property
    def digest(self) -> str | None:
        found = DIGEST.search(self.text)
        return found[1] if found else None


def by_command(job: Job) -> Started:
    return _started(job, [sys.executable, "-m", "launch.benches.planted"])


def by_torchrun(job: Job) -> Started:
    agent = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    return _started(job, [*agent, "-m", "launch.benches.planted"])


def _started(job: Job, program: list[str]) -> Started:
    with open(job.folder / "told", "wb") as told:
        return subprocess.Popen(
            [*program, *job.command()],
            cwd=ROOT,
            env={**os.environ, **job.settings()},
            stdin=subprocess.DEVNULL,
            stdout=told,
            stderr=told,
            start_new_session=True,
        )


def carried_out(job: Job, start: Callable[[Job], Started] = by_command) -> Outcome:
    for name in ("tmp", "out"):
        (job.folder / name).mkdir(parents=True)
    shared, began = _names(SHARED), time.time()
    process = start(job)
    code, gone, made = _watched(job, process, began, shared)
    moment = job.plant.moment()
    since = float(moment.read_text()) if moment.exists() else began
    # the folder of the user's name is CuTe DSL's, which keeps compiled kernels there
    left = [
        *_left(SHARED, made),
        *_left(job.folder / "tmp", _names(job.folder / "tmp") - {getpass.getuser()}),
        *_left(job.out.parent, _names(job.out.parent) - {job.out.name}),
    ]
    if code is None:
        left.append(f"processes after {job.limit_s:g} s")
    told = (job.folder / "told").read_text(errors="replace")
    return Outcome(code, gone - since, told, tuple(left), job.out.exists())


def _watched(job: Job, process: Started, began: float, shared: set[str]) -> tuple[int | None, float, set[str]]:
    """The exit code (None for a job that had to be killed), when its last process was gone, and what it shared.

    shared: the names of shared memory that were there before.
    """
    seen, waiting, made = {(process.pid, _ticks(process.pid) or 0)}, list(job.signals), set[str]()
    while True:
        code = process.poll()
        seen |= _descendants(seen)
        alive = [each for each in seen if _alive(each)]
        made |= _made(_names(SHARED) - shared - made, [pid for pid, _ in seen])
        if code is not None and not alive:
            return code, time.time(), made
        if time.time() - began > job.limit_s:
            _kill(alive)
            while process.poll() is None:
                time.sleep(LOOK_S)
            return None, time.time(), made
        waiting = _sent(job, process, alive, waiting)
        time.sleep(LOOK_S)


def _sent(job: Job, process: Started, alive: Iterable[Process], waiting: list[Signal]) -> list[Signal]:
    moment = job.plant.moment()
    if not waiting or not moment.exists():
        return waiting
    now, rest = time.time() - float(moment.read_text()), []
    for each in waiting:
        if now < each.after_s:
            rest.append(each)
        elif each.to == "starter":
            os.kill(process.pid, each.number)
        else:
            for pid, _ in (one for one in alive if _state(one[0]) == "T"):
                os.kill(pid, each.number)
    return rest


def _kill(alive: Iterable[Process]) -> None:
    for pid, _ in alive:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _stat(pid: int) -> list[str]:
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:  # all processes are looked at many times a second
            return file.read().rpartition(b")")[2].decode().split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def _ticks(pid: int) -> int | None:
    return int(fields[19]) if (fields := _stat(pid)) else None


def _state(pid: int) -> str:
    return (_stat(pid) or [""])[0]


def _alive(process: Process) -> bool:
    fields = _stat(process[0])
    return bool(fields) and fields[0] not in "ZX" and int(fields[19]) == process[1]


def _descendants(known: set[Process]) -> set[Process]:
    every = {int(name): fields for name in os.listdir("/proc") if name.isdigit() if (fields := _stat(int(name)))}
    found, new = set[Process](), {pid for pid, _ in known}
    while new:
        new = {pid for pid, fields in every.items() if int(fields[1]) in new} - {pid for pid, _ in found | known}
        found |= {(pid, int(every[pid][19])) for pid in new}
    return found


def _made(names: set[str], processes: Sequence[int]) -> set[str]:
    if not names:
        return set()
    own = {name for name in names if {int(digits) for digits in re.findall(r"\d+", name)} & set(processes)}
    for pid in processes:
        try:
            links = (os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir())
            paths = {*links, *re.findall(rf"{SHARED}/.*", Path(f"/proc/{pid}/maps").read_text())}
        except OSError:  # it has ended, or has closed a file meanwhile; the next look sees what is still open
            continue
        own |= {name for name in names if str(SHARED / name) in paths}
    return own


def _names(folder: Path) -> set[str]:
    return {name for name in os.listdir(folder) if not name.startswith(KEPT)} if folder.is_dir() else set()


def _left(folder: Path, names: set[str]) -> list[str]:
    end = time.monotonic() + SETTLE_S
    while (more := _names(folder) & names) and time.monotonic() < end:
        time.sleep(LOOK_S)
    return [str(folder / name) for name in sorted(more)]
