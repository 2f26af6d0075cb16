"""`seqpar profile`: a run of `seqpar sample` whose steps are recorded; other runs know nothing of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from seqpar.cli.args import Args, ProfileArgs
from seqpar.mesh.mesh import Mesh
from seqpar.pipelines.pictures import check_writable
from seqpar.pipelines.protocol import Job
from seqpar.planner.plan import Plan
from seqpar.types.arguments import check_whole

MOST_STEPS = 100  # measured: a trace of more is too long to open
OnStep = Callable[[int], None]


def check_profile(args: Args, job: Job, ranks: Mesh) -> None:
    """Raise ValueError for a profile that cannot be made, before any weight is read."""
    if not isinstance(args, ProfileArgs):
        return
    from seqpar.profiling.record import steps_before, steps_needed, too_few

    check_whole("--profile-steps", args.profile_steps, 1, MOST_STEPS)
    if args.profile_out.exists() and not args.profile_out.is_dir():
        raise ValueError(f"got --profile-out {args.profile_out}, which is a file, expected a folder to write to")
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
    profile = finished(recorder, ranks, plan, plan.ranking.load, args.profile_out)
    if ranks.is_main:
        print(f"{report(profile)}\nprofile   {args.profile_out}: traces for ui.perfetto.dev, table", flush=True)
