"""`seqpar plan`: predicted time and memory of every layout. A dry run of `seqpar sample` prints the same."""

from __future__ import annotations

from dataclasses import fields

import torch

from seqpar.cli.args import Args, Options, PlanArgs
from seqpar.cli.job import decoding_line
from seqpar.mesh.mesh import Mesh
from seqpar.pipelines.protocol import Job, scales
from seqpar.planner.explain import explain
from seqpar.planner.machine import Machine, here, imagined, ranks_of_a_host
from seqpar.planner.plan import parse_mesh, rank, transport_between
from seqpar.planner.search import Preferences
from seqpar.types.arguments import check_whole


def as_dry_run(args: PlanArgs) -> Args:
    """The dry run that prints this plan: for the given numbers of GPUs, or for all GPUs of this machine."""
    all_gpus = (torch.cuda.device_count(),) if torch.cuda.is_available() else ()
    return Args(**{field.name: getattr(args, field.name) for field in fields(Options)}, dry_run=args.gpus or all_gpus)


def preferences_of(args: Args) -> Preferences:
    """The choices that the flags leave to the planner, and those that they make."""
    aim, axes = parse_mesh(args.mesh)
    return Preferences(aim, axes, args.strategy, args.exact, args.local, args.transport)


def dry_run(args: Args, job: Job, ranks: Mesh, hosts: int = 1, explained: bool = False) -> str:
    """The tables that a plan prints: one a number of GPUs, or one for the processes that run.

    ValueError if no layout fits a single machine; beside other tables the reason stands in the table's place.
    hosts: on how many machines the GPUs of the flags are. explained: whether each table is followed by why its first
    layout wins.
    """
    check_whole("--hosts", hosts, 1, 512)
    if hosts > 1 and not args.dry_run:
        raise ValueError(f"--hosts {hosts} needs the number of all their GPUs; add --gpus, such as --gpus {8 * hosts}")
    load = job.load
    head = f"{args.model}: {load.images} picture(s) of {load.tokens} tokens, {scales(job)}, {job.request.dtype}"
    machines = [imagined(ranks.device, count, args.transport, hosts) for count in args.dry_run or ()]
    tables = []
    for machine in machines or [_running(ranks, args.transport)]:
        try:
            tables.append(_table(args, job, machine, explained))
        except ValueError as error:
            if len(machines) < 2:
                raise
            tables.append(f"{machine}: {error}")
    return "\n\n".join([head.replace("torch.", ""), *tables])


def _running(ranks: Mesh, transport: str) -> Machine:
    """Describe the machine of these processes. Every rank must call this at the same time."""
    name = transport_between(ranks.world, ranks.device).name if transport == "auto" else transport
    return here(ranks.device, ranks.world.size, name, ranks_of_a_host(ranks))


def _table(args: Args, job: Job, machine: Machine, explained: bool) -> str:
    """Return the plan for a machine, all layouts, a step's costs, how pictures are decoded, and why if asked."""
    ranking = rank(job.work, job.load, machine, preferences_of(args), job.request.dtype)
    lines = [f"{machine}: {ranking}", ranking.table()]
    lines += filter(None, [decoding_line(args, job, ranking, machine)])
    return "\n".join([*lines, *(["", explain(ranking)] if explained and ranking.ranked else [])])
