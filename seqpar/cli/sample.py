"""One run of `seqpar sample` on this rank: check, plan, load, generate, write."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from seqpar.cli.args import Args, ProfileArgs
from seqpar.cli.exits import stoppable
from seqpar.cli.job import check_decoding, checked, dry_run, named, outputs, parse_size, preferences_of
from seqpar.cli.summary import Bar, Progress, listed, measured, parameters, say, summary
from seqpar.mesh import exact
from seqpar.mesh.mesh import Mesh
from seqpar.mesh.watch import Deadlines
from seqpar.pipelines.pictures import check_writable, grid, save, save_video
from seqpar.pipelines.protocol import Events, Job, Model, Result
from seqpar.planner.plan import Plan, make
from seqpar.types.arguments import check_whole

MOST_STEPS = 100  # measured in a profile: a trace of more is too long to open
OnStep = Callable[[int], None]


def run(args: Args, hosts: int = 1, explained: bool = False) -> None:
    """The whole path from flags to files, or to a dry run's tables (`hosts`, `explained`). Collective."""
    if args.exact and args.dry_run is None:
        exact.turn_on()  # before anything touches a GPU
    ranks = Mesh.joined(deadlines=Deadlines(args.first_deadline_s, args.deadline_s))

    # check and plan: no weights are read
    args = named(args)
    job = checked(args, ranks)
    if args.dry_run is not None:
        say(ranks, ranks.share(ranks.on_all_ranks(lambda: dry_run(args, job, ranks, hosts, explained)), str))
        return
    plan = make(job.work, job.load, job.request.dtype, ranks, preferences_of(args))
    ranks.on_all_ranks(lambda: (check_profile(args, job, ranks), check_decoding(job, ranks)))

    # load: prompts are encoded first
    started = time.perf_counter()
    with Bar(job.texts, "prompt", ranks, "encoding") as encoded:
        model = job.load_model(ranks, plan, vae=args.vae, on_encode=encoded.add)
    loaded = time.perf_counter() - started
    with model:
        say(ranks, summary(args, model, job))
        if args.verify:
            from seqpar.verifying.verify import EVALUATIONS, verify

            target, arguments = model.verified(job, EVALUATIONS)
            verify(target, **arguments)

        # generate and write
        result, per_step = _generate(args, plan, model, job, ranks)
        paths, digest = outputs(args, job), result.digest()
        if ranks.is_main:
            facts = {"made": _size(args, result.images[0]), "ms_per_step": per_step, result.digest_of: digest}
            if result.computed is not None:
                facts["steps_computed"] = [*result.computed]
            _write(paths, job, result, parameters(args, model, job) | facts)
    speed = measured(per_step, loaded, time.perf_counter() - started)
    if result.computed is not None:
        speed = "steps computed {} of {}, {}".format(*result.computed, speed)
    count = f"{job.load.images} {'videos' if job.video else 'pictures'}"
    say(ranks, f"{listed(paths)}: {count}, {speed}, {result.digest_of} {digest}")


def _generate(args: Args, plan: Plan, model: Model, job: Job, ranks: Mesh) -> tuple[Result, float | None]:
    """The result, and ms per step if the pipeline reports its steps; rank 0 shows bars."""
    unit, request = "video" if job.video else "picture", job.request
    more = request.mask is not None or request.control is not None  # of which pipelines encode what they like
    with (
        Bar(None if more else len(request.images), "picture", ranks, "encoding") as encoding,
        Progress(job.steps, ranks) as progress,
        Bar(job.load.images, unit, ranks, "decoding") as decoding,
        profiled(args, plan, ranks, progress) as on_step,
        stoppable(args, ranks) as boundary,
    ):

        def step(index: int) -> None:
            encoding.close()
            on_step(index)

        def decode(done: int, total: int) -> None:
            if not done:  # all steps are queued
                progress.finish()
                progress.close()
            if total:
                decoding.add(done, total)

        result = model.generate(job, Events(step, boundary, encoding.add, decode))
        return result, progress.finish() if job.why_no_steps is None else None


def _write(paths: Sequence[Path], job: Job, result: Result, facts: dict[str, Any]) -> None:
    images: list[Any] = result.images if job.labels is None else [grid(result.images, job.labels)]
    sounds: Sequence[Any] = result.sounds or [None] * len(images)
    for path, image, sound in zip(paths, images, sounds, strict=True):
        if job.video:
            save_video(image, path, job.fps, facts, sound)
        else:
            save(image, path, facts)


def _size(args: Args, image: Any) -> dict[str, int]:
    """The size of an image or video; prints a line if it is not the one that was asked for."""
    *frames, rows, columns, _ = np.asarray(image).shape
    size = {"height": rows, "width": columns} | ({"frames": frames[0]} if frames else {})
    asked: dict[str, int] = dict(zip(("height", "width"), parse_size(args.size) or (), strict=False))
    if args.frames:
        asked["frames"] = args.frames
    if any(size[name] != count for name, count in asked.items()):
        shown = ", ".join(f"{count} {name}" for name, count in size.items())
        print(f"seqpar: output size differs from the request: {shown}", flush=True)
    return size


# Profiles: other runs import nothing of them ------------------------------------------------------------------------


def check_profile(args: Args, job: Job, ranks: Mesh) -> None:
    if not isinstance(args, ProfileArgs):
        return
    from seqpar.profiling.record import steps_before, steps_needed, too_few

    check_whole("--profile-steps", args.profile_steps, 1, MOST_STEPS)
    check_writable(args.profile_out / "profile.txt", ".txt")
    if ranks.device.type == "cpu" and args.transport == "peer":
        raise ValueError(
            "got --transport peer on CPUs, expected another one for a profile: there ranks wait in many small "
            "operations, which cannot be separated from work; leave it out"
        )
    if job.why_no_steps is not None:
        raise ValueError(f"no profile is possible: {job.why_no_steps}")
    before = steps_before(ranks)
    if job.steps < steps_needed(args.profile_steps, before):
        raise ValueError(f"{too_few(job.steps, args.profile_steps, before)}; change --steps or --profile-steps")


@contextmanager
def profiled(args: Args, plan: Plan, ranks: Mesh, on_step: OnStep) -> Iterator[OnStep]:
    """Yield what a run calls after each step; of a profile rank 0 prints the table in the end."""
    if not isinstance(args, ProfileArgs):
        yield on_step
        return
    from seqpar.profiling.profile import finished
    from seqpar.profiling.record import StepRecorder
    from seqpar.profiling.report import report

    with StepRecorder(ranks, args.profile_steps) as recorder:

        def both(index: int) -> None:
            on_step(index)
            recorder(index)

        yield both
    load = plan.ranking.load if args.cache is None else None  # steps that leave blocks out have other rates
    profile = finished(recorder, ranks, plan, load, args.profile_out)
    if ranks.is_main:
        print(f"{report(profile)}\nprofile   {args.profile_out}: traces for ui.perfetto.dev, table", flush=True)
