"""ms of one evaluation of the model under each scheduler, with its update inside the same CUDA graph, beside DDIM's.

Every scheduler that is traced to coefficients runs on local tokens (docs/schedulers.md), so its step should cost what
DDIM's costs. All schedulers share one model; their graphs are timed in turn, round after round.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from math import isqrt
from pathlib import Path
from typing import Any

import torch

from launch.benches.ladder import GUIDANCE, start_of_run
from launch.benches.steps import check_squares
from launch.benches.timing import append, command, environment, in_turn, spread
from seqpar.engine.distributed import DistributedDiT
from seqpar.mesh import Mesh, pick_device
from seqpar.pipelines.class_labels import Files
from seqpar.sampling.request import Request
from seqpar.sampling.run import Run, begin

DDIM = "DDIMScheduler"
STEPS = 25


@dataclass(frozen=True)
class Schedules:
    """Time a step under each scheduler beside a step of DDIM, on one GPU."""

    model: str = "dit-xl/2"
    """A preset with random weights."""
    tokens: int = 1024
    """Tokens of the square image."""
    schedulers: tuple[str, ...] = (
        "DPMSolverMultistepScheduler",
        "UniPCMultistepScheduler",
        "EulerDiscreteScheduler",
        "HeunDiscreteScheduler",
        "FlowMatchEulerDiscreteScheduler",
    )
    """Class names of diffusers, each of which must step on local tokens."""
    rounds: int = 5
    """Rounds in which every scheduler is timed once; ms are medians."""
    repeat: int = 100
    """Steps timed in a round."""
    out: Path | None = None
    """Append JSON lines here."""


def main(args: Schedules) -> None:
    """Capture a run of each scheduler, time them in turn, print the table, append the lines."""
    check_squares((args.tokens,))
    files = Files.locate(args.model)
    model = files.blueprint.build(torch.bfloat16, pick_device(1))
    dit = DistributedDiT(model, Mesh.single(pick_device(1)))
    runs = {name: captured(dit, files, name, args.tokens) for name in (DDIM, *args.schedulers)}
    times = in_turn({name: going_round(run) for name, run in runs.items()}, args.rounds, args.repeat)
    base = spread(times[DDIM])["median"]
    made = {"gpus": 1, "command": command(), "env": environment(dit.device)}
    lines: list[dict[str, Any]] = []
    for name, values in times.items():
        case = {"model": args.model, "tokens": args.tokens, "scheduler": name, "evaluations": len(runs[name].timesteps)}
        ms = spread(values)
        lines.append({"bench": "schedules", "case": case, "ms": ms, "over_ddim": ms["median"] / base, **made})
        print(f"{name:34} {ms['median']:8.4f} ms ({ms['min']:.4f} - {ms['max']:.4f})  {ms['median'] / base:.4f} x DDIM")
    append(lines, args.out)


def captured(dit: DistributedDiT, files: Files, name: str, tokens: int) -> Run:
    """A run of 25 steps under this scheduler whose step is a CUDA graph; ValueError if it cannot be captured."""
    noise, labels = start_of_run(dit, isqrt(tokens) * dit.config.patch_size)
    with torch.no_grad():
        run = begin(dit, Request(files.schedule(name, STEPS), noise, labels, STEPS, GUIDANCE))
        if run.why_no_graph is not None:
            raise ValueError(f"got {name}, expected a scheduler whose step is a CUDA graph: {run.why_no_graph}")
        run.capture()
    return run


def going_round(run: Run) -> Callable[[], None]:
    """One step of the run, which begins again after its last step so that the state stays finite."""
    done = itertools.count()

    def step() -> None:
        if next(done) % len(run.timesteps) == 0:
            run.rewind()
        run.step()

    return step
