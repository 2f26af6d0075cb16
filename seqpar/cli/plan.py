"""`seqpar plan`: predicted time and memory of every layout. A dry run of `seqpar sample` prints the same."""

from __future__ import annotations

from dataclasses import fields
from functools import partial

import torch

from seqpar.cli import decoding
from seqpar.cli.args import Args, Options, PlanArgs
from seqpar.cli.job import scales
from seqpar.cli.planning import asked, imagined, ours, tables
from seqpar.pipelines._family import Job
from seqpar.planner.search import Wish
from seqpar.ranks.mesh import Mesh


def as_dry_run(args: PlanArgs) -> Args:
    """The dry run that prints this plan: for the given numbers of GPUs, or for all GPUs of this machine."""
    here = (torch.cuda.device_count(),) if torch.cuda.is_available() else ()
    return Args(**{field.name: getattr(args, field.name) for field in fields(Options)}, dry_run=args.gpus or here)


def wish_of(args: Args) -> Wish:
    """The choices that the flags leave to the planner, and those that they make."""
    return asked(args.mesh, args.strategy, args.exact, args.local, args.transport)


def dry_run(args: Args, job: Job, ranks: Mesh) -> str:
    """The tables that a plan prints: one a number of GPUs, or one for the processes that run."""
    load, model = job.load, job.blueprint
    head = f"{args.model}: {load.images} picture(s) of {load.tokens} tokens, {scales(job.guidance)}, {job.dtype}"
    machines = [imagined(ranks.device, count, args.transport) for count in args.dry_run or ()]
    machines = machines or [ours(ranks, args.transport)]
    shown = tables(load, model, machines, wish_of(args), job.dtype, partial(decoding.line, args, job))
    return f"{head.replace('torch.', '')}\n\n{shown}"
