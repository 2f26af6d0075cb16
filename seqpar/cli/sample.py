"""One run of `seqpar sample` on this rank: check, plan, load, sample, decode, save."""

from __future__ import annotations

import time

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
from seqpar.pipelines.pictures import grid, save, to_pil
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
    else:
        make_pictures(args, job, ranks)


def make_pictures(args: Args, job: Job, ranks: Mesh) -> None:
    """Plan, load, sample, decode and save; rank 0 prints and writes."""
    plan = shared_plan(job.load, job.files.blueprint, ranks, wish_of(args), job.dtype)
    started = time.perf_counter()
    pipeline = Pipeline.load(job.files, None, job.dtype, plan=plan)
    mesh = pipeline.dit.mesh
    loaded = time.perf_counter() - started
    _say(mesh, summary(args, pipeline, job, plan))
    latents, per_step = _sample(args, job, pipeline)
    images, bits = pipeline.decode(latents), digest(latents)
    if mesh.is_main:
        labels = [job.files.class_name(number) for number in job.pictures]
        told = parameters(args, pipeline, job) | {"ms_per_step": per_step, "latents": bits}
        save(grid(to_pil(images), labels), args.out, told)
    speed = "a step not measured (one alone is warm-up)" if per_step is None else f"{per_step:.1f} ms a step"
    seconds = f"{loaded:.1f} s to load, {time.perf_counter() - started:.1f} s in all"
    _say(mesh, f"{args.out}: {len(images)} pictures, {speed}, {seconds}, latents {bits}")


def _sample(args: Args, job: Job, pipeline: Pipeline) -> tuple[Tensor, float | None]:
    """The latents (N, C, h, w), and ms a step (None for a single step). Frees what the pipeline keeps between calls."""
    with pipeline, Progress(job.evaluations, pipeline.dit.mesh) as progress:
        latents = pipeline.latents(
            job.pictures,
            steps=args.steps,
            guidance=job.guidance,
            seed=args.seed,
            size=job.size,
            eta=args.eta,
            scheduler=job.scheduler,
            on_step=progress,
        )
        return latents, progress.finish()


def _say(mesh: Mesh, text: str) -> None:
    if mesh.is_main:
        print(text, flush=True)
