"""`seqpar fidelity`: compare every way in which these processes can compute pictures, and fail if one is too wrong."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

import torch
from torch import nn

from seqpar.cli.args import Args, FidelityArgs, Options
from seqpar.cli.job import DTYPES, check, scales
from seqpar.cli.plan import wish_of
from seqpar.cli.summary import versions
from seqpar.engine.distributed import DistributedDiT
from seqpar.fidelity.compare import NOT_FINITE
from seqpar.fidelity.table import Row, judged, plant_outliers, table, write
from seqpar.fidelity.ways import Meshes, Way, ways
from seqpar.pipelines._family import Job
from seqpar.planner.plan import work_of
from seqpar.planner.search import Wish
from seqpar.ranks import exact
from seqpar.ranks.deadlines import Deadlines
from seqpar.ranks.mesh import Mesh
from seqpar.sampling.request import Request

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
    listed, notes = ways(counts, meshes, wish, work_of(job.blueprint.config), job.load)
    head = "\n".join(_head(args, job, ranks, listed, [*_notes(args, job, dtypes), *notes]))
    _say(ranks, f"{head}\n")
    rows, skipped = _judged(args, job, meshes, listed, dtypes, wish)
    failures = [failure for row in rows for failure in row.failures] if rows else ["nothing was compared"]
    verdict = f"{len(failures)} finding(s)" if failures else "every way holds"
    text = "\n".join([table(rows), "", *skipped, *failures, f"verdict   {verdict}"])
    _say(ranks, text)
    if ranks.is_main:
        write(args.out, f"{head}\n\n{text}", rows, {**asdict(args), "out": str(args.out), "versions": versions()})
    if failures:
        raise FloatingPointError(f"got {failures[0]} ({len(failures)} finding(s) in all; see {args.out / 'table.md'})")


def as_sample(args: FidelityArgs) -> Args:
    """Return the flags of the run that is compared."""
    shared = {field.name: getattr(args, field.name) for field in fields(Options)}
    return Args(**{**shared, "out": args.out / "picture.png"})  # which is not made


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
    args: FidelityArgs, job: Job, meshes: Meshes, listed: tuple[Way, ...], dtypes: tuple[torch.dtype, ...], wish: Wish
) -> tuple[list[Row], list[str]]:
    """Judge the weights as they are and, unless the flags say otherwise, with planted outliers; return also notes."""
    rows, notes = list[Row](), list[str]()
    name = "random" if job.blueprint.checkpoint is None else "trained"
    for dtype in dtypes:
        model, request = _loaded(job, dtype, meshes.ranks)
        for weights in (name, f"{name}, outliers")[: 1 + args.outliers]:
            if weights != name:
                plant_outliers(model)
            more = judged(weights, model, request, listed, meshes, wish)
            if any(NOT_FINITE in failure for failure in more[0].failures):
                notes.append(f"not judged, because one rank alone fails in it: {more[0].failures[0]}")
            else:
                rows += more
    return rows, notes


def _loaded(job: Job, dtype: torch.dtype, ranks: Mesh) -> tuple[nn.Module, Request]:
    """Return the model in a data type on this rank alone, and the request of the run that is compared."""
    alone = Mesh.single(ranks.device)
    dit = ranks.together(lambda: DistributedDiT.from_pretrained(job.blueprint, alone, dtype))
    pipeline: Any = job.pipeline(dit, job.loading["files"], None)  # without a decoder: only latents are compared
    return dit.model, pipeline.request(**job.settings)


def _head(args: FidelityArgs, job: Job, ranks: Mesh, listed: tuple[Way, ...], notes: list[str]) -> list[str]:
    """Return the lines that say what is compared with what."""
    device = torch.cuda.get_device_name(ranks.device) if ranks.device.type == "cuda" else "CPU"
    return [
        f"model     {args.model}: {job.load.images} pictures, {job.load.tokens} tokens, {args.steps} steps of "
        f"{type(job.scheduler).__name__}, {scales(job.guidance)}",
        "reference one rank, fp32 (fp64 for fp32) without TF32, attention by its formula, no graph",
        f"compared  {len(listed)} ways on up to {max(way.ranks for way in listed)} of {ranks.world.size} x {device}",
        *(f"note      {note}" for note in notes),
    ]


def _notes(args: FidelityArgs, job: Job, dtypes: tuple[torch.dtype, ...]) -> list[str]:
    """Return what a reader of the table must know."""
    every = {
        RANDOM: job.blueprint.checkpoint is None,
        "fp16 is slow on CPUs and not compared; --dtype fp16 does so": args.dtype == "auto"
        and torch.float16 not in dtypes,
        "bits are compared between transports; with --exact (GPUs) also with those of one rank": not args.exact,
    }
    return [note for note, holds in every.items() if holds]


def _say(mesh: Mesh, text: str) -> None:
    if mesh.is_main:
        print(text, flush=True)
