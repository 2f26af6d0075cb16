"""One run of `seqpar sample` by diffusers' own loop: load, parallelize, call the pipeline, write pictures or videos."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers.utils import logging as diffusers_logging
from diffusers.utils.export_utils import export_to_video

from seqpar.adapter.parallelize import parallelize
from seqpar.adapter.sharing import Wished
from seqpar.cli.args import Args
from seqpar.cli.job import outputs
from seqpar.cli.progress import Progress
from seqpar.cli.summary import versions
from seqpar.pipelines._encoders import forget_encoders
from seqpar.pipelines._pictures import save, written
from seqpar.pipelines.adapted import Adapted
from seqpar.planner.plan import parse_mesh
from seqpar.ranks.mesh import Mesh

VAE: dict[str, Wished] = {
    "auto": "auto",
    "strips": True,
    "pictures": False,
    "tiled": "tiled",
}  # --vae for `parallelize`
FPS = 16  # frames a second of a video if the user names none


def run_adapted(args: Args, job: Adapted, ranks: Mesh) -> None:
    """The path from a checked order to files. Every rank calls it."""
    started = time.perf_counter()
    with _one_voice(ranks):
        pipe = job.load(ranks)
    vae = VAE[args.vae]
    parallelize(pipe, _mesh(args), strategy=args.strategy, local=args.local, transport=args.transport, vae=vae)
    if args.verify:
        from seqpar.fidelity.verify import EVALUATIONS, verify  # imports what no other run needs

        arguments = {name: value for name, value in job.arguments.items() if name != "output_type"}
        arguments["num_inference_steps"] = min(EVALUATIONS, job.steps)
        verify(pipe, **arguments, generator=torch.Generator().manual_seed(job.seed))
    forget_encoders(pipe)
    loaded = time.perf_counter() - started
    pipe.set_progress_bar_config(disable=job.counts_steps or not ranks.is_main)
    if ranks.is_main:
        print(_summary(args, job), flush=True)
    with Progress(job.steps, ranks) as progress:
        made = job.make(pipe, progress, ranks)
        per_step = progress.finish() if job.counts_steps else None
    bits = digest(made)
    paths = outputs(args, job)
    if ranks.is_main:
        shown = asdict(args) | {"out": str(args.out), "versions": versions(), "pixels": bits, "ms_per_step": per_step}
        for path, one in zip(paths, made, strict=True):
            _write(one, path, args.fps or FPS, shown)
        speed = "" if per_step is None else f"{per_step:.1f} ms a step, "
        seconds = f"{loaded:.1f} s to load, {time.perf_counter() - started:.1f} s in all"
        print(f"{', '.join(map(str, paths))}: {speed}{seconds}, pixels {bits}", flush=True)


def digest(made: list[Any]) -> str:
    """16 hex digits of a hash over all pixels, to compare runs."""
    return hashlib.sha256(b"".join(np.ascontiguousarray(one).tobytes() for one in made)).hexdigest()[:16]


def _mesh(args: Args) -> Mesh | None:
    """The mesh that the flags name, or None where the planner chooses."""
    _, axes = parse_mesh(args.mesh)
    data, cfg, ring = (axes.get(name, 1) for name in ("data", "cfg", "ring"))
    return Mesh.from_env(data, cfg, ring, axes.get("ulysses")) if axes else None


def _summary(args: Args, job: Adapted) -> str:
    """Return the lines that say what runs, and why by diffusers' loop."""
    what, dtype = "videos" if job.video else "pictures", str(job.dtype).removeprefix("torch.")
    lines = [
        f"model     {args.model}",
        f"loop      diffusers': {job.why}",
        *(f"lora      {each}" for each in job.loras),
        f"work      {job.count} {what}, {dtype}, {job.steps} steps of {job.kind.__name__}",
    ]
    return "\n".join(lines)


def _write(one: Any, path: Path, fps: int, parameters: dict[str, Any]) -> None:
    """Write a picture with its parameters, or a video by diffusers' exporter, whole or not at all."""
    if path.suffix == ".png":
        save(one, path, parameters)
        return
    with written(path) as temporary:
        export_to_video(list(one), str(temporary), fps=fps)


@contextmanager
def _one_voice(mesh: Mesh) -> Iterator[None]:
    """Let rank 0 alone show the bars of loading."""
    from transformers.utils import logging as transformers_logging

    told = (diffusers_logging, transformers_logging)
    if not mesh.is_main:
        for log in told:
            log.disable_progress_bar()
    try:
        yield
    finally:
        if not mesh.is_main:
            for log in told:
                log.enable_progress_bar()
