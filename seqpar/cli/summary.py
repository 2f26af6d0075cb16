"""What a run prints before its first step, and the parameters that the picture's metadata holds."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

import diffusers
import torch
from tqdm import tqdm

import seqpar
from seqpar.cli.args import Args
from seqpar.cli.job import DTYPES, scales
from seqpar.kernels import _quack
from seqpar.loading.names import preset_of
from seqpar.loop.request import why_not_captured
from seqpar.loop.steppers import Decision, decide
from seqpar.mesh import exact
from seqpar.mesh.mesh import Mesh
from seqpar.pipelines.diffusers import Adapted
from seqpar.pipelines.own_loop import Job
from seqpar.planner.plan import Plan


class Bar:
    """A bar on rank 0 that appears with the first count, so that no error message follows an empty bar."""

    def __init__(self, total: int, unit: str, mesh: Mesh, title: str | None = None) -> None:
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
        """Count one more."""
        self.add(1)

    def add(self, done: int) -> None:
        """Count `done` more; 0 shows the bar."""
        if self._bar is None:
            self._bar = tqdm(total=self._total, unit=self._unit, desc=self._title, disable=not self._main)
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
        """Wait for all steps; ms a step without the first one, which is warm-up; None for a single step."""
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


WEIGHTS = "weights   random (preset)"


def summary(args: Args, pipeline: Any, job: Job, plan: Plan) -> str:
    """Lines that say what runs, where, and why."""
    dit, decision = pipeline.dit, decide(job.scheduler, {"eta": args.eta})
    lines = [
        *layout(args, plan, dit.mesh, str(dit.transport), str(dit.local)),
        f"work      {_work(args, job, decision)}",
        *_notes(args, pipeline, job, decision),
    ]
    return "\n".join(lines)


def layout(args: Args, plan: Plan, mesh: Mesh, transport: str, local: str) -> list[str]:
    """Lines that say how the ranks share the work. transport, local: with the reasons for them."""
    return [
        f"model     {args.model}",
        *([] if preset_of(args.model) is None else [WEIGHTS]),
        f"plan      {plan}",
        f"mesh      {mesh} ({mesh.world.size} x {_device(mesh)}, {_backend(mesh)})",
        f"strategy  {plan.strategy.name} ({plan.strategy.why})",
        f"transport {transport}",
        f"local     {local}{', exact mode' if exact.is_on() else ''}",
    ]


def parameters(args: Args, pipeline: Any, job: Job) -> dict[str, Any]:
    """The flags as given; under "chosen" the values that were used, under "versions" the packages that ran."""
    dit = pipeline.dit
    names = {"strategy": dit.strategy.name, "local": dit.local.name, "transport": dit.transport.name}
    way = pipeline.way(job.load.images, job.pixels, args.vae)
    own = {"scheduler": type(job.scheduler).__name__, "vae": None if way is None else way.name}
    return chosen(args, job, dit.mesh, {**names, **own, **{name: list(values) for name, values in job.named.items()}})


def chosen(args: Args, job: Job | Adapted, mesh: Mesh, more: Mapping[str, Any]) -> dict[str, Any]:
    """What `parameters` returns. more: values that were used, besides those of every run."""
    values = {
        "mesh": mesh.sizes,
        "world": mesh.world.size,
        "device": _device(mesh),
        "dtype": next(name for name, dtype in DTYPES.items() if dtype == job.dtype),
        "size": None if job.pixels is None else f"{job.pixels[0]}x{job.pixels[1]}",
        "guidance": scales(job),
        **more,
    }
    flags = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(args).items()}
    return flags | {"chosen": values, "versions": versions()}


def measured(per_step: float | None, loaded: float, whole: float) -> str:
    """The speed as text. per_step: milliseconds; loaded, whole: seconds until weights were there, and in all."""
    speed = "a step not measured (one alone is warm-up)" if per_step is None else f"{per_step:.1f} ms a step"
    return f"{speed}, {loaded:.1f} s to load, {whole:.1f} s in all"


def listed(paths: Sequence[Path]) -> str:
    """The files of a run as text."""
    return str(paths[0]) if len(paths) == 1 else f"{paths[0]} to {paths[-1].name}"


def versions() -> dict[str, str]:
    """The versions of the packages that ran."""
    return {module.__name__: module.__version__ for module in (torch, diffusers, seqpar)}


def _work(args: Args, job: Job, decision: Decision) -> str:
    """Pictures, tokens, data type, steps and guidance."""
    steps = args.steps if args.respacing is None else job.evaluations
    text = (
        f"{job.load.images} pictures, {job.load.tokens} tokens, {str(job.dtype).removeprefix('torch.')}, "
        f"{steps} steps of {type(job.scheduler).__name__} {decision}, {scales(job)}"
    )
    if job.evaluations != steps:
        text += f"; the scheduler calls the model {job.evaluations} times"
    return text


def _notes(args: Args, pipeline: Any, job: Job, decision: Decision) -> list[str]:
    """Lines that only some runs need, and the line about the CUDA graph."""
    dit, mesh = pipeline.dit, pipeline.dit.mesh
    lines = [f"{title:<9} {text}" for title, text in job.notes]
    whole = mesh.sequence.size == mesh.world.size > mesh.cfg.size == 1
    if job.guidance.on and whole and args.strategy != "auto" and "cfg" not in args.mesh:
        lines.append("branches  both on all ranks, so that the named strategy has them all; --mesh cfg=2 parts them")
    if mesh.device.type == "cuda" and hasattr(dit.config, "feed_forward"):
        missing = _quack.why_not()
        fused = "fused into its product (quack) where that was faster"
        lines.append(f"SwiGLU    {fused if missing is None else f'a kernel after cuBLAS: {missing}'}")
    reason = why_not_captured(dit, decision)
    lines.append(f"graph     {'a step is one CUDA graph' if reason is None else f'none: {reason}'}")
    way = pipeline.way(job.load.images, job.pixels, args.vae)
    none = "none comes with this model: pictures show the first three latent channels"
    lines.append(f"decoder   {none if way is None else way}")
    return lines


def _backend(mesh: Mesh) -> str:
    if mesh.world.size == 1:
        return "one process"
    return "NCCL" if mesh.device.type == "cuda" else "gloo"


def _device(mesh: Mesh) -> str:
    return torch.cuda.get_device_name(mesh.device) if mesh.device.type == "cuda" else "CPU"
