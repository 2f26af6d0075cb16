"""What a run prints before its first step, and the parameters that the picture's metadata holds."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import diffusers
import torch

import seqpar
from seqpar.cli.args import Args
from seqpar.cli.job import DTYPES, scales
from seqpar.kernels import gated_linear
from seqpar.pipelines._family import Job
from seqpar.planner.plan import Plan
from seqpar.ranks import exact
from seqpar.ranks.mesh import Mesh
from seqpar.sampling.loop import why_not_captured
from seqpar.sampling.steppers import Decision, decide


def summary(args: Args, pipeline: Any, job: Job, plan: Plan) -> str:
    """Lines that say what runs, where, and why."""
    dit, mesh = pipeline.dit, pipeline.dit.mesh
    decision = decide(job.scheduler, {"eta": args.eta})
    lines = [
        f"model     {args.model}",
        f"plan      {plan}",
        f"mesh      {mesh} ({mesh.world.size} x {_device(mesh)}, {_backend(mesh)})",
        f"strategy  {dit.strategy.name} ({plan.strategy.why})",
        f"transport {dit.transport}",
        f"local     {dit.local}{', exact mode' if exact.is_on() else ''}",
        f"work      {_work(args, job, decision)}",
        *_notes(args, pipeline, job, decision),
    ]
    return "\n".join(lines)


def parameters(args: Args, pipeline: Any, job: Job) -> dict[str, Any]:
    """The flags as given; under "chosen" the values that were used, under "versions" the packages that ran."""
    dit, mesh = pipeline.dit, pipeline.dit.mesh
    height, width = job.pixels
    way = pipeline.way(job.load.images, job.pixels, args.vae)
    chosen = {
        "strategy": dit.strategy.name,
        "local": dit.local.name,
        "transport": dit.transport.name,
        "mesh": mesh.sizes,
        "world": mesh.world.size,
        "device": _device(mesh),
        "dtype": next(name for name, dtype in DTYPES.items() if dtype == job.dtype),
        "size": f"{height}x{width}",
        "scheduler": type(job.scheduler).__name__,
        "guidance": scales(job.guidance),
        "vae": None if way is None else way.name,
        **{name: list(values) for name, values in job.named.items()},
    }
    return asdict(args) | {"out": str(args.out), "chosen": chosen, "versions": versions()}


def versions() -> dict[str, str]:
    """The versions of the packages that ran."""
    return {module.__name__: module.__version__ for module in (torch, diffusers, seqpar)}


def _work(args: Args, job: Job, decision: Decision) -> str:
    """Pictures, tokens, data type, steps and guidance."""
    steps = args.steps if args.respacing is None else job.evaluations
    text = (
        f"{job.load.images} pictures, {job.load.tokens} tokens, {str(job.dtype).removeprefix('torch.')}, "
        f"{steps} steps of {type(job.scheduler).__name__} {decision}, {scales(job.guidance)}"
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
        missing = gated_linear.why_not()
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
