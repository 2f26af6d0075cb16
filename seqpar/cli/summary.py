"""What a run prints before its first step, and the parameters that the picture's metadata holds."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

import diffusers
import torch
from tqdm import tqdm

import seqpar
from seqpar.cli.args import Args
from seqpar.cli.job import DTYPES
from seqpar.loading.names import random_model_of
from seqpar.mesh import exact
from seqpar.mesh.mesh import Mesh
from seqpar.pipelines.protocol import Job, Model, scales


class Bar:
    """A bar on rank 0 that appears with the first count, so that no error message follows an empty bar.

    total: None for a count alone.
    """

    def __init__(self, total: int | None, unit: str, mesh: Mesh, title: str | None = None) -> None:
        self._total, self._unit, self._title, self._main = total, unit, title, mesh.is_main
        self._bar: tqdm | None = None

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Leave the bar as it is, so that another one can follow it."""
        if self._bar is not None:
            self._bar.close()

    def __call__(self, index: int) -> None:
        self.add(1)

    def add(self, done: int, total: int | None = None) -> None:
        """Count `done` more; 0 shows the bar. total: in place of the bar's own."""
        if self._bar is None:
            total = self._total if total is None else total
            self._bar = tqdm(total=total, unit=self._unit, desc=self._title, disable=not self._main)
        self._bar.update(done)


class Progress(Bar):
    """A bar of steps that polls CUDA events during the run and waits for them only at the end."""

    def __init__(self, steps: int, mesh: Mesh) -> None:
        super().__init__(steps, "step", mesh, "denoising")
        self._cuda = mesh.device.type == "cuda"
        self._times: list[float] = []
        self._events: list[torch.cuda.Event] = []
        self._open: deque[torch.cuda.Event] = deque()

    def __enter__(self) -> Progress:
        return self

    def __call__(self, index: int) -> None:
        """Count a step that has been queued (GPU) or done (CPU)."""
        if not self._cuda:
            self._times.append(time.perf_counter())
            self.add(1)
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append(event)
        self._open.append(event)
        self.add(0)
        while self._open and self._open[0].query():
            self._open.popleft()
            self.add(1)

    def finish(self) -> float | None:
        """Wait for all steps; return ms per step without the first, which is warm-up; None for one step."""
        while self._open:
            self._open.popleft().synchronize()
            self.add(1)
        marks = self._events if self._cuda else self._times
        if len(marks) < 2:
            return None
        spent = (
            self._events[0].elapsed_time(self._events[-1]) if self._cuda else 1e3 * (self._times[-1] - self._times[0])
        )
        return spent / (len(marks) - 1)


def say(mesh: Mesh, text: str) -> None:
    if mesh.is_main:
        print(text, flush=True)


def summary(args: Args, model: Model, job: Job) -> str:
    mesh, plan = model.mesh, model.plan
    lines = [
        ("model", args.model),
        *([] if random_model_of(args.model) is None else [("weights", "random")]),
        ("plan", plan),
        ("mesh", f"{mesh} ({mesh.world.size} x {_device(mesh)}, {_backend(mesh)})"),
        ("strategy", f"{plan.strategy.name} ({plan.strategy.why})"),
        ("transport", plan.transport),
        ("local", f"{plan.local}{', exact mode' if exact.is_on() else ''}"),
        *model.notes(job),
    ]
    return "\n".join(f"{title:<9} {text}" for title, text in lines)


def parameters(args: Args, model: Model, job: Job) -> dict[str, Any]:
    """The flags as given; under "chosen" the values that were used, under "versions" the packages that ran."""
    plan, mesh = model.plan, model.mesh
    values = {
        "mesh": mesh.sizes,
        "world": mesh.world.size,
        "device": _device(mesh),
        "strategy": plan.strategy.name,
        "local": plan.local.name,
        "transport": plan.transport.name,
        "dtype": next(name for name, dtype in DTYPES.items() if dtype == job.request.dtype),
        "size": None if job.pixels is None else f"{job.pixels[0]}x{job.pixels[1]}",
        "guidance": scales(job),
        **model.facts(job),
    }
    flags = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(args).items()}
    return flags | {"steps": job.request.steps, "chosen": values, "versions": versions()}


def measured(per_step: float | None, loaded: float, whole: float) -> str:
    """The speed as text. per_step: milliseconds; loaded, whole: seconds until weights were there, and in all."""
    speed = "a step not measured (one alone is warm-up)" if per_step is None else f"{per_step:.1f} ms per step"
    return f"{speed}, {loaded:.1f} s to load, {whole:.1f} s in all"


def listed(paths: Sequence[Path]) -> str:
    return str(paths[0]) if len(paths) == 1 else f"{paths[0]} to {paths[-1].name}"


def versions() -> dict[str, str]:
    return {module.__name__: module.__version__ for module in (torch, diffusers, seqpar)}


def _backend(mesh: Mesh) -> str:
    if mesh.world.size == 1:
        return "one process"
    return "NCCL" if mesh.device.type == "cuda" else "gloo"


def _device(mesh: Mesh) -> str:
    return torch.cuda.get_device_name(mesh.device) if mesh.device.type == "cuda" else "CPU"
