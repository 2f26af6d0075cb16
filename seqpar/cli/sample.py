"""One run of `seqpar sample` on this rank: check, plan, encode, load, sample, decode, save."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from seqpar.cli import job as decoding
from seqpar.cli.args import Args
from seqpar.cli.job import checked, named, outputs
from seqpar.cli.plan import dry_run, preferences_of
from seqpar.cli.profiling import OnStep, check_profile, profiled
from seqpar.cli.stopping import stoppable
from seqpar.cli.summary import Bar, Progress, listed, measured, parameters, summary
from seqpar.loop.loop import digest
from seqpar.mesh import exact
from seqpar.mesh.mesh import Mesh
from seqpar.mesh.watch import Deadlines
from seqpar.pipelines.diffusers import Adapted
from seqpar.pipelines.own_loop import Job
from seqpar.pipelines.pictures import grid, save, to_pil
from seqpar.planner.plan import Plan, make


def run(args: Args, hosts: int = 1, explained: bool = False) -> None:
    """The whole path from flags to a file, or to a dry run's tables (`hosts`, `explained`). Every rank calls it."""
    if args.exact and args.dry_run is None:
        exact.turn_on()  # before anything touches a GPU
    ranks = Mesh.joined(deadlines=Deadlines(args.first_deadline_s, args.deadline_s))
    args = named(args)
    job = checked(args, ranks)
    if args.dry_run is not None:
        _say(ranks, ranks.share(ranks.on_all_ranks(lambda: dry_run(args, job, ranks, hosts, explained)), str))
        return
    plan = make(job.work, job.load, job.dtype, ranks, preferences_of(args))
    ranks.on_all_ranks(lambda: (check_profile(args, job, ranks), decoding.check_decoding(job, ranks)))
    if isinstance(job, Adapted):
        from seqpar.cli.adapted import run_adapted

        run_adapted(args, job, plan, ranks)
        return
    started = time.perf_counter()
    with Bar(len(set(job.loading.get("prompts", ()))), "prompt", ranks, "encoding") as encoded:
        hook = {"on_prompt": encoded} if "prompts" in job.loading else {}
        pipeline = job.pipeline.load(**job.loading, **hook, plan=plan)
    loaded = time.perf_counter() - started
    _introduce(args, pipeline, job, plan)
    with pipeline, Progress(job.evaluations, ranks) as progress, _steps(args, plan, ranks, progress) as on_step:
        latents = pipeline.latents(**job.settings, on_step=on_step)
        per_step = progress.finish()
    bits = digest(latents)
    files = _write(args, job, pipeline, latents, {"ms_per_step": per_step, "latents": bits})
    speed = measured(per_step, loaded, time.perf_counter() - started)
    _say(ranks, f"{files}: {job.load.images} pictures, {speed}, latents {bits}")


@contextmanager
def _steps(args: Args, plan: Plan, ranks: Mesh, progress: OnStep) -> Iterator[OnStep]:
    """Yield what is called after each step: it shows progress, and ends the run after Ctrl-C, or makes a profile."""
    with profiled(args, plan, ranks, progress) as on_step, stoppable(args, ranks) as boundary:

        def both(index: int) -> None:
            on_step(index)
            boundary()

        yield both


def _introduce(args: Args, pipeline: Any, job: Job, plan: Plan) -> None:
    """Choose how pictures are decoded, show what is run, and verify it if asked; see `seqpar.verifying.verify`."""
    pipeline.set_vae(args.vae)
    _say(pipeline.dit.mesh, summary(args, pipeline, job, plan))
    if args.verify:
        from seqpar.verifying.verify import verify

        verify(pipeline, **job.settings)


def _write(args: Args, job: Job, pipeline: Any, latents: Tensor, measured: dict[str, Any]) -> str:
    """Decode on all ranks; rank 0 writes the files, with parameters and measurements in their metadata."""
    mesh: Mesh = pipeline.dit.mesh
    way = pipeline.way(len(latents), job.pixels, args.vae)
    mine = len(latents) if way is None else way.shard(len(latents)).sizes[way.axis.rank]
    with Bar(mine, "picture", mesh, "decoding") as bar:
        images = pipeline.decode(latents, bar)
    paths = outputs(args, job)
    if mesh.is_main:
        shown = parameters(args, pipeline, job) | measured
        pictures = [grid(to_pil(images), job.captions)] if job.sheet else to_pil(images)
        for path, picture in zip(paths, pictures, strict=True):
            save(picture, path, shown)
    return listed(paths)


def _say(mesh: Mesh, text: str) -> None:
    if mesh.is_main:
        print(text, flush=True)
