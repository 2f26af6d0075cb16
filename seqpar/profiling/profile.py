"""`profile`: records a run on all ranks and tells where its time went."""

from __future__ import annotations

import gzip
import inspect
import json
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from torch import nn

from seqpar.mesh.mesh import Mesh
from seqpar.pipelines.pictures import written
from seqpar.planner.plan import Plan
from seqpar.planner.predict import Load
from seqpar.profiling.record import MEASURED, StepRecorder
from seqpar.profiling.report import check_drawable, drawn, facts, report, rows
from seqpar.profiling.result import Profile, profile_of, told
from seqpar.profiling.trace import RankTrace, merged, trimmed
from seqpar.transformer.parallelize import call_of

MOST_BYTES = 1 << 30  # of one rank's trace


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
        mesh.on_all_ranks(check_drawable)
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
    if (call := call_of(module)) is not None:
        plans.append(call.body.ranks.plan)
    return call is not None


def finished(
    recorder: StepRecorder, mesh: Mesh, plan: Plan | None, load: Load | None, folder: str | Path | None
) -> Profile:
    """Return the profile of a recording that has ended; every rank must call this at the same time."""
    mesh.on_all_ranks(recorder.check)
    ranks = mesh.collect(told(recorder.trace, recorder.first), RankTrace)
    result, moved = profile_of(ranks, plan, load)
    if folder is not None:
        packed = gzip.compress(msgspec.json.encode(trimmed(recorder.trace, recorder.first)))
        every = mesh.collect(packed, bytes)
        mesh.on_all_ranks(lambda: write(result, every, moved, Path(folder)) if mesh.is_main else None)
    return result


def write(result: Profile, packed: Sequence[bytes], moved: Sequence[float], folder: Path) -> None:
    """Write a trace of every rank and one of all, for ui.perfetto.dev, the table, the numbers and the picture.

    packed: the traces of all ranks, compressed. moved: what brings them onto one clock. Each file is whole or not
    there; OSError for one that cannot be written.
    """
    whole = msgspec.json.encode(merged([msgspec.json.decode(_unpacked(each)) for each in packed], moved))
    files = {
        **{f"trace-rank{rank}.json.gz": each for rank, each in enumerate(packed)},
        "trace.json.gz": gzip.compress(whole),
        "profile.txt": f"{report(result)}\n".encode(),
        "profile.csv": rows(result).encode(),
        "profile.json": json.dumps(facts(result), indent=1).encode(),
        "profile.png": drawn(result),
    }
    for name, content in files.items():
        with written(folder / name) as path:
            path.write_bytes(content)


def _unpacked(packed: bytes) -> bytes:
    """Return a trace of another rank; ValueError for one that would fill the memory."""
    found = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    trace = found.decompress(packed, MOST_BYTES)
    if not found.eof:
        raise ValueError(f"got a trace of over {MOST_BYTES} bytes, expected at most so many; measure fewer steps")
    return trace
