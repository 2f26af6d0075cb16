"""What a run prints before its first step, and the parameters that the picture's metadata holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import diffusers
import torch

import seqpar
from seqpar.cli.args import Args
from seqpar.cli.job import DTYPES, scales
from seqpar.kernels import _quack
from seqpar.loading.names import preset_of
from seqpar.loop.loop import why_not_captured
from seqpar.loop.steppers import Decision, decide
from seqpar.mesh import exact
from seqpar.mesh.mesh import Mesh
from seqpar.pipelines.diffusers import Adapted
from seqpar.pipelines.job import Job
from seqpar.planner.plan import Plan

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
