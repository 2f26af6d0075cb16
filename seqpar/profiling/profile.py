"""`profile`: records a run on all ranks and reports where its time went."""

from __future__ import annotations

import gzip
import inspect
import json
from collections.abc import Callable
from pathlib import Path

import msgspec
from torch import nn

from seqpar.mesh.mesh import Mesh
from seqpar.pipelines.pictures import written
from seqpar.planner.plan import Plan
from seqpar.planner.predict import Load
from seqpar.profiling.ranks import merged
from seqpar.profiling.record import MEASURED, StepRecorder
from seqpar.profiling.report import facts, report, rows
from seqpar.profiling.result import Profile, profile_of
from seqpar.profiling.trace import RankTrace, read, trimmed
from seqpar.transformer.parallelize import call_of


def profile(
    call: Callable[..., object],
    folder: str | Path | None = None,
    *,
    plan: Plan | None = None,
    load: Load | None = None,
    steps: int = MEASURED,
    mesh: Mesh | None = None,
) -> Profile:
    """Measure where the time of a call's steps goes. Collective: call on all ranks.

    call: generates images. If it takes an argument, it gets a function of an index to call after each step; otherwise
    each call of a parallelized transformer is a step. The blocks of graphs captured before the call are unknown.
    folder: rank 0 writes traces and a table here (`write`). plan: the run's plan; default: the parallelized
    transformer's. load: the size of a step; without it no rates are reported. steps: measured steps, after those that
    warm up and capture graphs. Raises ValueError if the call has too few steps.
    """
    mesh, plans = mesh or Mesh.joined(), list[Plan]() if plan is None else [plan]
    recorder = StepRecorder(mesh, steps)
    with recorder:
        if inspect.signature(call).parameters:
            call(recorder)
        else:
            with recorder.calls_of(lambda module: _is_parallel(module, plans)):
                call()
    return finished(recorder, mesh, next(iter(plans), None), load, folder)


def _is_parallel(module: nn.Module, plans: list[Plan]) -> bool:
    if (call := call_of(module)) is not None:
        plans.append(call.state.plan)
    return call is not None


def finished(
    recorder: StepRecorder, mesh: Mesh, plan: Plan | None, load: Load | None, folder: str | Path | None
) -> Profile:
    """The profile of a finished recording. Collective: call on all ranks."""
    mesh.on_all_ranks(recorder.check)
    ranks = mesh.collect(read(recorder.trace, recorder.first), RankTrace)
    result, moved = profile_of(ranks, plan, load)
    if folder is not None:
        packed = gzip.compress(msgspec.json.encode(trimmed(recorder.trace, recorder.first)))
        traces = mesh.collect(packed, bytes)
        mesh.on_all_ranks(lambda: write(result, traces, moved, Path(folder)) if mesh.is_main else None)
    return result


def write(result: Profile, packed: list[bytes], moved: list[float], folder: Path) -> None:
    """Write a trace per rank and one of all ranks (for ui.perfetto.dev), the table and the numbers.

    packed: the compressed traces of all ranks. moved: what brings them onto one clock. Each file is written whole or
    not at all; OSError for a file that cannot be written.
    """
    whole = msgspec.json.encode(merged([msgspec.json.decode(gzip.decompress(trace)) for trace in packed], moved))
    files = {
        **{f"trace-rank{rank}.json.gz": trace for rank, trace in enumerate(packed)},
        "trace.json.gz": gzip.compress(whole),
        "profile.txt": f"{report(result)}\n".encode(),
        "profile.csv": rows(result).encode(),
        "profile.json": json.dumps(facts(result), indent=1).encode(),
    }
    for name, content in files.items():
        with written(folder / name) as path:
            path.write_bytes(content)
