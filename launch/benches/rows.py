"""Times rows of one table: each is set up, timed in turn with its reference (A B A B), printed, and freed.

A row is a way of computing what the table is about. Its reference is what it is divided by: the ceiling of its layout,
or another row that everybody knows. A reference is set up once and kept, so that drifting clocks of GPUs affect it and
the row alike. The slowest rank counts. Every row is a JSON line; one that is not possible has the reason.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from launch.benches.timing import attempt, calls_for, elapsed, record, slowest
from seqpar.mesh.mesh import Mesh
from seqpar.profiling.profile import finished
from seqpar.profiling.ranks import NAMES, mean
from seqpar.profiling.record import MEASURED, StepRecorder

GIB = 1 << 30
# what engines, compilers and torch raise for a case that they cannot run
REFUSALS = (ValueError, RuntimeError, AssertionError, TypeError, AttributeError, ImportError, KeyError, IndexError)
LATE = "left out: --minutes are over"
Steps = Callable[[int, Callable[[int], None]], object]
"""Makes a number of steps and calls a function of their index after each."""
Line = dict[str, Any]


@dataclass(frozen=True)
class Timed:
    """A row that is set up.

    ms: takes a number of calls and returns this rank's mean ms of one. facts: what the line adds, when all is timed.
    steps: makes steps for `--split`, if the row has any.
    """

    ms: Callable[[int], float]
    facts: Callable[[], Line] = dict
    steps: Steps | None = None

    @staticmethod
    def of(step: Callable[[], object], device: torch.device, facts: Callable[[], Line] = dict) -> Timed:

        def steps(count: int, on_step: Callable[[int], None]) -> None:
            for index in range(count):
                step()
                on_step(index)

        return Timed(lambda calls: elapsed(step, calls, device), facts, steps)


@dataclass(frozen=True)
class Reference:
    """What rows are divided by. Rows whose references have one name share it."""

    name: str
    ready: Callable[[], AbstractContextManager[Timed]]


@dataclass(frozen=True)
class Row:
    """A way of computing. kind: "ours" or "peer". case: the facts that its JSON line repeats.

    times: how much of the reference's work one call of the row does, 2 for both branches of guidance.
    """

    kind: str
    name: str
    ready: Callable[[], AbstractContextManager[Timed]]
    reference: Reference | None = None
    case: Mapping[str, Any] = field(default_factory=dict)
    times: int = 1


@dataclass(frozen=True)
class Flags:
    """Flags of every bench whose table has rows."""

    only: tuple[str, ...] = ()
    """Time only rows whose name contains one of these words, those of the first word first."""
    rounds: int = 3
    """Number of rounds; medians are over rounds."""
    seconds: float = 0.3
    """Seconds that one row runs in a round, at least one call."""
    minutes: float = 9.0
    """Rows that are not set up after this time are left out."""
    split: bool = False
    """Also say where the time of each row goes, as `seqpar profile` does, after it is timed."""
    out: Path | None = None
    """Append JSON lines here."""

    def check(self) -> None:
        if self.rounds < 1 or self.seconds <= 0:
            told = f"--rounds {self.rounds} --seconds {self.seconds:g}"
            raise ValueError(f"got {told}, expected at least 1 and more than 0")


def asked(rows: Iterable[Row], words: Sequence[str]) -> list[Row]:
    by_name = {row.name: row for row in rows}
    names = [name for word in words or ("",) for name in by_name if word in name]
    return [by_name[name] for name in dict.fromkeys(names)]


def measure(bench: str, about: Line, rows: Iterable[Row], mesh: Mesh, flags: Flags) -> list[Line]:
    """Time the rows that the flags ask for in turn; rank 0 prints and appends each line at once.

    bench: the name of the table; about: what all its lines repeat. A collective call.
    """
    lines, begun = list[Line](), time.monotonic()
    with ExitStack() as kept:
        references: dict[str, tuple[Timed | None, str | None]] = {}  # each set up when its first row comes, or why not

        def reference_of(row: Row) -> tuple[Timed | None, str | None]:
            if (wanted := row.reference) is None:
                return None, None
            if wanted.name not in references:
                references[wanted.name] = attempt(lambda: kept.enter_context(wanted.ready()), mesh, *REFUSALS)
            return references[wanted.name]

        for row in asked(rows, flags.only):
            late = mesh.share(time.monotonic() - begun > 60 * flags.minutes, bool)
            result = {"ms": None, "refused": LATE} if late else _measured(row, mesh, flags, reference_of)
            case = {**about, "kind": row.kind, "way": row.name, **row.case}
            lines.append({"bench": bench, "case": case, "gpus": mesh.world.size, **result})
            free(mesh.device)
            if mesh.is_main:
                record(lines[-1], flags.out, mesh.device)
                print(shown(lines[-1]), flush=True)
    return lines


def _measured(
    row: Row, mesh: Mesh, flags: Flags, reference_of: Callable[[Row], tuple[Timed | None, str | None]]
) -> Line:
    """Set a row up, time it in turn with its reference, and return what its line says."""
    begun = time.monotonic()
    reference, why = reference_of(row)
    before = _allocated(mesh.device)
    with ExitStack() as stack:
        ready, why = (None, why) if why else attempt(lambda: stack.enter_context(row.ready()), mesh, *REFUSALS)
        if ready is None:
            return {"ms": None, "refused": why}
        setup_s, sides = time.monotonic() - begun, {"row": ready} | ({"reference": reference} if reference else {})
        times, why = attempt(lambda: _in_turn(sides, flags, mesh), mesh, *REFUSALS)
        if times is None:
            return {"ms": None, "refused": why}
        parts = split(ready.steps, mesh) if flags.split and ready.steps is not None else {}
        result: Line = parts | {"setup_s": setup_s, "gib": (_allocated(mesh.device) - before) / GIB, **ready.facts()}
    spreads = slowest(times, mesh)
    result["ms"] = spreads["row"]
    if row.reference is not None:
        result |= {"reference": row.reference.name, "reference_ms": spreads["reference"]}
        result["over"] = spreads["row"]["median"] / spreads["reference"]["median"] / row.times
    return result


def _in_turn(sides: Mapping[str, Timed], flags: Flags, mesh: Mesh) -> dict[str, list[float]]:
    calls = {}
    for name, side in sides.items():
        side.ms(1)  # allocates, compiles and captures
        calls[name] = calls_for(flags.seconds, side.ms(1), mesh)
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(flags.rounds):
        for name, side in sides.items():
            mesh.collect(None, None)  # on the host: no rank's GPU waits
            times[name].append(side.ms(calls[name]))
    return times


def _allocated(device: torch.device) -> float:
    return float(torch.cuda.max_memory_allocated()) if device.type == "cuda" else 0.0


def free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def shown(line: Line) -> str:
    name, ms = line["case"]["way"], line["ms"]
    if ms is None:
        return f"{name:<58} {line['refused']}"
    text = f"{name:<58} {ms['median']:9.3f} ms ({ms['min']:.3f} - {ms['max']:.3f})"
    if "over" in line:
        text += f"  {line['over']:.3f} x {line['reference']} {line['reference_ms']['median']:.3f}"
    text += f"  {line['gib']:.1f} GiB" if line["gib"] else ""
    text += "".join(f"  {name} {line[name]:.1e}" for name in ("error", "difference") if name in line)
    text += f"  {line['digest']}" if "digest" in line else ""
    for parts in ("parts_ms", "split_ms"):
        if parts in line:
            text += "\n  ms: " + ", ".join(f"{name} {value:.2f}" for name, value in line[parts].items())
    return text + (f", hidden {line['hidden_ms']:.2f}" if "hidden_ms" in line else "")


def split(steps: Steps, mesh: Mesh) -> dict[str, Any]:
    """What the line of a row says, whose graphs have been captured; `split_ms` adds up to the time of a step."""
    recorder = StepRecorder(mesh, MEASURED, before=0, blocks=False)
    with recorder:
        steps(recorder.needs, recorder)
    profile = finished(recorder, mesh, None, None, None)
    whole = mean([profile.mean(rank) for rank in profile.ranks])
    return {"split_ms": {name: getattr(whole, name) for name in NAMES}, "hidden_ms": whole.hidden}
