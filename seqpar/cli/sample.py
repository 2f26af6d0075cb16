"""One run of `seqpar sample` on this rank: check, plan, load, sample, decode, save."""

from __future__ import annotations

import time
from typing import Any

from torch import Tensor

from seqpar import exact
from seqpar.cli.args import Args
from seqpar.cli.job import Job, check
from seqpar.cli.plan import dry_run, wish_of
from seqpar.cli.planning import shared_plan
from seqpar.cli.progress import Progress
from seqpar.cli.summary import parameters, summary
from seqpar.mesh import Mesh
from seqpar.pipelines.class_labels import Pipeline
from seqpar.pipelines._pictures import grid, save, to_pil
from seqpar.sampling.guidance import Guidance
from seqpar.sampling.loop import digest


def run(args: Args) -> None:
    """The whole path from flags to a file, or to the tables of a dry run. Every rank calls it."""
    guidance = Guidance(args.guidance, args.guidance_channels)
    if args.exact and args.dry_run is None:
        exact.turn_on()  # before anything touches a GPU
    ranks = Mesh.joined()
    job = ranks.together(lambda: check(args, ranks, guidance))
    if args.dry_run is not None:
        _say(ranks, ranks.share(ranks.together(lambda: dry_run(args, job, ranks))))
        return
    plan = shared_plan(job.load, job.files.blueprint, ranks, wish_of(args), job.dtype)
    started = time.perf_counter()
    pipeline = Pipeline.load(job.files, None, job.dtype, plan=plan)
    loaded = time.perf_counter() - started
    _say(pipeline.dit.mesh, summary(args, pipeline, job, plan))
    with pipeline, Progress(job.evaluations, pipeline.dit.mesh) as progress:
        latents = pipeline.latents(job.pictures, on_step=progress, **_settings(args, job))
        per_step = progress.finish()
    bits = digest(latents)
    _write(args, job, pipeline, latents, {"ms_per_step": per_step, "latents": bits})
    seconds = f"{loaded:.1f} s to load, {time.perf_counter() - started:.1f} s in all"
    speed = "a step not measured (one alone is warm-up)" if per_step is None else f"{per_step:.1f} ms a step"
    _say(pipeline.dit.mesh, f"{args.out}: {len(job.pictures)} pictures, {speed}, {seconds}, latents {bits}")


def _settings(args: Args, job: Job) -> dict[str, Any]:
    """What the flags say about sampling, as arguments of `Pipeline.latents`."""
    settings = {"steps": args.steps, "seed": args.seed, "eta": args.eta}
    return settings | {"size": job.size, "guidance": job.guidance, "scheduler": job.scheduler}


def _write(args: Args, job: Job, pipeline: Pipeline, latents: Tensor, measured: dict[str, Any]) -> None:
    """Decode on all ranks; rank 0 writes the file, with its parameters and what was measured in its metadata."""
    images = pipeline.decode(latents)
    if pipeline.dit.mesh.is_main:
        labels = [job.files.class_name(number) for number in job.pictures]
        save(grid(to_pil(images), labels), args.out, parameters(args, pipeline, job) | measured)


def _say(mesh: Mesh, text: str) -> None:
    if mesh.is_main:
        print(text, flush=True)
