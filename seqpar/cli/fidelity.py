"""`seqpar fidelity`: compare every way in which these processes can compute pictures, and fail if one is too wrong."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

import torch

from seqpar.cli.args import Args, FidelityArgs, Options
from seqpar.cli.job import DTYPES, check, scales
from seqpar.cli.plan import wish_of
from seqpar.cli.summary import versions
from seqpar.engine.distributed import plan_of
from seqpar.fidelity.judging import Row, Subject, judge, plant_outliers
from seqpar.fidelity.pictures import WINDOW, load_lpips, why_no_lpips
from seqpar.fidelity.report import failures, table, write
from seqpar.fidelity.ways import Meshes, Way, ways
from seqpar.pipelines._family import Job
from seqpar.planner.plan import work_of
from seqpar.planner.search import Wish
from seqpar.ranks import exact
from seqpar.ranks.deadlines import Deadlines
from seqpar.ranks.mesh import Mesh

RANDOM = (
    "WARNING: these weights are random, and errors of random weights, also of those with planted outliers, are smaller "
    "than those of trained ones: run --model builtin or a checkpoint, too"
)


def run_fidelity(args: FidelityArgs) -> None:
    """The whole path from flags to the table; FloatingPointError if a way does not hold. Every rank calls it."""
    if args.exact:
        exact.turn_on()  # before anything touches a GPU
    ranks = Mesh.joined(deadlines=Deadlines(args.first_deadline_s, args.deadline_s))
    job, dtypes = ranks.together(lambda: (checked(args, ranks), _dtypes(args, ranks.device)))
    wish, meshes, counts = wish_of(as_sample(args)), Meshes(ranks), args.counts or range(1, ranks.world.size + 1)
    tried, notes = ways(counts, meshes, wish, work_of(job.blueprint.config), job.load)
    head = "\n".join(_head(args, job, ranks, tried, [*_notes(args, job, dtypes), *notes]))
    _say(ranks, f"{head}\n")
    rows, skipped = _judged(args, job, meshes, tried, dtypes, wish)
    failed = failures(rows) if any(row.way is not None for row in rows) else ["nothing was compared"]
    verdict = f"{len(failed)} finding(s)" if failed else "every way holds"
    text = "\n".join([table(rows), "", *skipped, *failed, f"verdict   {verdict}"])
    _say(ranks, text)
    if ranks.is_main:
        facts = {**asdict(args), "out": str(args.out), "lpips": str(args.lpips), "versions": versions()}
        write(args.out, f"{head}\n\n{text}", rows, facts)
    if failed:
        raise FloatingPointError(f"got {failed[0]} ({len(failed)} finding(s) in all; see {args.out / 'table.md'})")


def as_sample(args: FidelityArgs) -> Args:
    """Return the flags of the run that is compared."""
    shared = {field.name: getattr(args, field.name) for field in fields(Options)}
    return Args(**{**shared, "out": args.out / "difference.png"})


def checked(args: FidelityArgs, ranks: Mesh) -> Job:
    """Return the job that the flags describe; ValueError for any flag that is wrong."""
    world = ranks.world.size
    if any(not 1 <= count <= world for count in args.counts):
        raise ValueError(
            f"got --counts {args.counts}, expected numbers of ranks from 1 to {world}; start more with --ranks"
        )
    job = check(as_sample(args), ranks)
    if not isinstance(job, Job) or not hasattr(job.pipeline, "request"):
        raise ValueError(
            f"got --model {args.model}, whose family of pipelines cannot be compared yet (it makes no Request)"
        )
    if min(job.pixels) < WINDOW:
        raise ValueError(f"got pictures of {job.pixels} pixels, expected at least {WINDOW} x {WINDOW}; give a --size")
    if args.lpips is not None and not args.lpips.is_file():
        raise ValueError(f"got --lpips {args.lpips}, expected a file with the weights of torchvision's AlexNet")
    return job


def _dtypes(args: FidelityArgs, device: torch.device) -> tuple[torch.dtype, ...]:
    """Return the data types to compare; ValueError for those that exact mode has no kernels for."""
    if args.dtype != "auto":
        if args.exact and DTYPES[args.dtype].itemsize > 2:
            raise ValueError(f"got --exact with --dtype {args.dtype}, expected bf16 or fp16, which have such kernels")
        return (DTYPES[args.dtype],)
    half = (torch.bfloat16, torch.float16) if device.type == "cuda" else (torch.bfloat16,)
    return half if args.exact else (torch.float32, *half)


def _judged(
    args: FidelityArgs, job: Job, meshes: Meshes, tried: tuple[Way, ...], dtypes: tuple[torch.dtype, ...], wish: Wish
) -> tuple[list[Row], list[str]]:
    """Judge the weights as they are and, unless the flags say otherwise, with planted outliers."""
    ranks, dtype = meshes.ranks, _reference(args, meshes.ranks.device)
    alone = Mesh.single(ranks.device)
    plan = plan_of(job.blueprint.config, job.blueprint.meta(), torch.bfloat16 if args.exact else dtype, alone, Wish())
    pipeline: Any = ranks.together(lambda: job.pipeline.load(**{**job.loading, "dtype": dtype}, mesh=alone, plan=plan))
    request = pipeline.request(**job.settings)
    file = None if why_no_lpips(args.lpips) else args.lpips
    lpips = None if file is None else ranks.together(lambda: load_lpips(file))
    name = "random" if job.blueprint.checkpoint is None else "trained"
    rows, notes = judge(Subject(name, pipeline, request), tried, dtypes, meshes, wish, lpips)
    if args.outliers:
        plant_outliers(pipeline.dit.model)
        more = judge(Subject(f"{name}, outliers", pipeline, request), tried, dtypes, meshes, wish, lpips)
        rows, notes = rows + more[0], notes + more[1]
    return rows, notes


def _reference(args: FidelityArgs, device: torch.device) -> torch.dtype:
    if args.reference != "auto":
        return DTYPES[args.reference]
    return torch.float32 if device.type == "cuda" else torch.float64


def _head(args: FidelityArgs, job: Job, ranks: Mesh, tried: tuple[Way, ...], notes: list[str]) -> list[str]:
    """Return the lines that say what is compared with what."""
    reference = str(_reference(args, ranks.device)).removeprefix("torch.")
    device = torch.cuda.get_device_name(ranks.device) if ranks.device.type == "cuda" else "CPU"
    return [
        f"model     {args.model}: {job.load.images} pictures, {job.load.tokens} tokens, {args.steps} steps of "
        f"{type(job.scheduler).__name__}, {scales(job.guidance)}",
        f"reference one rank, {reference} without TF32, attention by its formula, no graph",
        f"compared  {len(tried)} ways on up to {max(way.ranks for way in tried)} of {ranks.world.size} x {device}",
        *(f"note      {note}" for note in notes),
    ]


def _notes(args: FidelityArgs, job: Job, dtypes: tuple[torch.dtype, ...]) -> list[str]:
    """Return what a reader of the table must know."""
    no_fp16, no_lpips = args.dtype == "auto" and torch.float16 not in dtypes, why_no_lpips(args.lpips)
    every = {
        RANDOM: job.blueprint.checkpoint is None,
        "fp16 is slow on CPUs and not compared; --dtype fp16 does so": no_fp16,
        f"no LPIPS: {no_lpips}": no_lpips is not None,
        "bits are compared between transports; with --exact (GPUs) also with those of one rank": not args.exact,
    }
    return [note for note, holds in every.items() if holds]


def _say(mesh: Mesh, text: str) -> None:
    if mesh.is_main:
        print(text, flush=True)
