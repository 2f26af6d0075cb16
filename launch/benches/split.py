"""Where the time of a row goes, by the columns of `seqpar profile`: the mean over ranks of some steps, in ms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from seqpar.mesh.mesh import Mesh
from seqpar.profiling.columns import NAMES, mean
from seqpar.profiling.profile import finished
from seqpar.profiling.record import MEASURED, StepRecorder

Steps = Callable[[int, Callable[[int], None]], object]
"""Makes a number of steps and calls a function of their index after each."""


def split(steps: Steps, mesh: Mesh) -> dict[str, Any]:
    """Return what the line of a row says, whose graphs have been captured; `split_ms` adds up to the time of a step."""
    recorder = StepRecorder(mesh, MEASURED, before=0, blocks=False)
    with recorder:
        steps(recorder.needs, recorder)
    profile = finished(recorder, mesh, None, None, None)
    whole = mean([profile.mean(rank) for rank in profile.ranks])
    return {"split_ms": {name: getattr(whole, name) for name in NAMES}, "hidden_ms": whole.hidden}
