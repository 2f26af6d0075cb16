"""`profile`: records a run on all ranks and tells where its time went."""

from __future__ import annotations

import gzip
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from torch import nn

from seqpar.adapter.call import Call
from seqpar.planner.plan import Plan
from seqpar.planner.predict import Load
from seqpar.ranks.mesh import Mesh
from seqpar.sight.clocks import merged
from seqpar.sight.picture import check_drawable, draw
from seqpar.sight.record import MEASURED, StepRecorder
from seqpar.sight.report import facts, report
from seqpar.sight.result import Profile, profile_of, told
from seqpar.sight.trace import RankTrace, trimmed


def profile(
    call: Callable[..., object],
    folder: str | Path | None = None,
    *,
    plan: Plan | None = None,
    load: Load | None = None,
    steps: int = MEASURED,
    mesh: Mesh | None = None,
) -> Profile:
    """Return where the time of a call's steps went; all ranks must call this at the same time.

    call: makes pictures. If it takes an argument, it gets a function of an index to call after each step; else each
    call of a parallelized transformer is a step. Blocks of graphs that were captured before are not known. folder:
    where rank 0 writes traces, a table and a picture (`write`); None writes nothing. plan: that of the run; None takes
    that of the parallelized transformer. load: what a step of the run computes, without which no rates are told: a plan
    of the library is one for the model's own size. steps: how many are measured, after those in which graphs are made.
    Raises ValueError if the call has too few steps.
    """
    mesh, plans = mesh or Mesh.joined(), list[Plan]() if plan is None else [plan]
    if folder is not None:
        mesh.together(check_drawable)
    recorder = StepRecorder(mesh, steps)
    with recorder:
        if inspect.signature(call).parameters:
            call(recorder)
        else:
            with recorder.calls_of(lambda module: _is_parallel(module, plans)):
                call()
    return finished(recorder, mesh, next(iter(plans), None), load, folder)


def _is_parallel(module: nn.Module, plans: list[Plan]) -> bool:
    """Return whether a module is a parallelized transformer, whose plan is added."""
    forward = vars(module).get("forward")
    if isinstance(forward, Call):
        plans.append(forward.body.ranks.plan)
    return isinstance(forward, Call)


def finished(
    recorder: StepRecorder, mesh: Mesh, plan: Plan | None, load: Load | None, folder: str | Path | None
) -> Profile:
    """Return the profile of a recording that has ended; every rank must call this at the same time."""
    mesh.together(recorder.check)
    ranks = mesh.collect(told(recorder.trace, recorder.first), RankTrace)
    result, moved = profile_of(ranks, plan, load)
    if folder is not None:
        packed = gzip.compress(msgspec.json.encode(trimmed(recorder.trace, recorder.first)))
        every = mesh.collect(packed, bytes)
        mesh.together(lambda: write(result, every, moved, Path(folder)) if mesh.is_main else None)
    return result


def write(result: Profile, packed: list[bytes], moved: list[float], folder: Path) -> None:
    """Write a trace of every rank and one of all, for ui.perfetto.dev, the table, the numbers and the picture."""
    folder.mkdir(parents=True, exist_ok=True)
    traces: list[dict[str, Any]] = [msgspec.json.decode(gzip.decompress(each)) for each in packed]
    for rank, each in enumerate(packed):
        (folder / f"trace-rank{rank}.json.gz").write_bytes(each)
    whole = msgspec.json.encode(merged(traces, moved))
    (folder / "trace.json.gz").write_bytes(gzip.compress(whole))
    (folder / "profile.txt").write_text(report(result) + "\n", encoding="utf-8")
    (folder / "profile.json").write_text(json.dumps(facts(result), indent=1), encoding="utf-8")
    draw(result, folder / "profile.png")
