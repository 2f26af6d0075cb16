"""`seqpar verify`: compare every way in which these processes can compute pictures, and fail if one is too wrong."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any

import torch

from seqpar.cli.args import Args, Options, VerifyArgs
from seqpar.cli.job import DTYPES, check, preferences_of
from seqpar.cli.summary import say, versions
from seqpar.mesh import exact
from seqpar.mesh.mesh import Mesh
from seqpar.mesh.watch import Deadlines
from seqpar.pipelines.diffusers import VAE, DiffusersJob, Source
from seqpar.pipelines.find import find
from seqpar.pipelines.load import load
from seqpar.pipelines.own_loop import OwnJob
from seqpar.pipelines.pictures import written
from seqpar.pipelines.protocol import scales
from seqpar.planner.plan import check_names, is_lossy
from seqpar.transformer.budget import check_budget
from seqpar.transformer.parallelize import release
from seqpar.transformer.step_cache import step_cache
from seqpar.verifying.budget import keep_budget
from seqpar.verifying.precision import PROMPTS, measure_precision
from seqpar.verifying.ways import Row, judged, loaded, meshes, table, ways

MADE_BY_PROMPT = ("prompt", "negative_prompt", "output_type", "image", "num_images_per_prompt", "num_videos_per_prompt")
RANDOM = (
    "WARNING: these weights are random: a wrong position changes less with them than with trained ones; run --model "
    "builtin or a checkpoint, too"
)


def run_verify(args: VerifyArgs) -> None:
    """The whole path from flags to the table; FloatingPointError if a way does not hold. Every rank calls it."""
    if args.exact or (args.min_psnr is not None and torch.cuda.is_available()):
        exact.turn_on()  # before anything touches a GPU; a search is then the same on any number of them
    ranks = Mesh.joined(deadlines=Deadlines(args.first_deadline_s, args.deadline_s))
    if _is_lossy(args):
        _run_precision(args, ranks)
        return
    job, dtypes = ranks.on_all_ranks(lambda: (checked(args, ranks), _dtypes(args, ranks.device)))
    preferences, mesh_of, counts = (
        preferences_of(_as_sample(args)),
        meshes(ranks),
        args.counts or range(1, ranks.world.size + 1),
    )
    listed, left_out = ways(ranks, counts, mesh_of, preferences, job.work, job.load)
    head = _head(args, job, ranks, f"{len(listed)} ways on up to {max(1, *counts)}", left_out)
    say(ranks, head)
    rows = list[Row]()
    for dtype in dtypes:
        model, request = loaded(job, dtype, ranks)
        rows += judged(ranks, model, request, listed, mesh_of, preferences.local)
    failures = [f"{row}: {row.finding}" for row in rows if row.finding is not None and not row.skipped]
    if all(row.skipped for row in rows):
        failures.append("nothing was compared")
    verdict = f"{len(failures)} finding(s)" if failures else "every way holds"
    say(ranks, f"\n{table(rows)}\n\nverdict   {verdict}")
    if ranks.is_main:
        _write(args, {"rows": [asdict(row) for row in rows]})
    if failures:
        raise FloatingPointError(f"got {failures[0]} ({verdict} in all; see {args.out})")


def checked(args: VerifyArgs, ranks: Mesh) -> OwnJob:
    """The job that the flags describe; ValueError for any flag that is wrong."""
    world = ranks.world.size
    if args.min_psnr is not None:
        raise ValueError("got --min-psnr without --precision fp8 or --cache, whose error it bounds")
    if any(not 1 <= count <= world for count in args.counts):
        raise ValueError(
            f"got --counts {args.counts}, expected numbers of ranks from 1 to {world}; start more with --ranks"
        )
    job = check(_as_sample(args), ranks)
    if not isinstance(job, OwnJob) or job.source.takes != "classes":
        raise ValueError(
            f"--model {args.model} is not supported: all strategies are compared for models of classes only"
        )
    return job


def _run_precision(args: VerifyArgs, ranks: Mesh) -> None:
    """Measure what 8 bits and a cache change in each image; FloatingPointError if --min-psnr cannot be kept."""

    def checked_pipeline() -> DiffusersJob:
        prompts = args.prompt or (PROMPTS if isinstance(find(args.model), Source) else ())
        job = check(replace(_as_sample(args), prompt=prompts), ranks)
        more = args.image or args.controlnet or args.counts or args.repeat > 1
        if not isinstance(job, DiffusersJob) or job.random is not None or more:
            raise ValueError(
                "errors are measured for pipelines of trained weights that draw from prompts alone, by one layout; "
                "leave --image, --controlnet, --counts and --repeat out"
            )
        if args.min_psnr is not None and (args.lora or args.preset):
            raise ValueError("--min-psnr is searched without LoRAs and presets; leave --lora and --preset out")
        check_budget(args.min_psnr, None, args.precision, step_cache(args.cache))
        return job

    job = ranks.on_all_ranks(checked_pipeline)
    settings = {name: value for name, value in job.arguments.items() if name not in MADE_BY_PROMPT}
    for negative in job.arguments.get("negative_prompt", ())[:1]:  # also an empty one, for true guidance
        settings["negative_prompt"] = negative
    same = ("mesh", "strategy", "local", "attention_steps", "transport", "precision", "cache", "preset")
    names = {name: getattr(args, name) for name in same}
    mesh = None if args.mesh == "auto" else args.mesh
    options = {**names, "mesh": mesh, "vae": VAE[args.vae], "loras": args.lora}
    pipe = load(args.model, dtype=job.request.dtype, fp32_state=True, **options)
    pipe.scheduler = job.scheduler_of(pipe.scheduler)
    prompts = job.arguments["prompt"]
    if args.min_psnr is None:
        results = {"precision": asdict(measure_precision(pipe, prompts, seed=args.seed, **settings))}
    else:
        found = keep_budget(pipe, args.min_psnr, prompts, seed=args.seed, model=args.model, **settings)
        results = {"precision": asdict(found.after), "budget": asdict(found)}
    release(pipe)
    if ranks.is_main:
        _write(args, results)


def _is_lossy(args: VerifyArgs) -> bool:
    check_names(args.strategy, args.local, args.transport)
    return args.precision is not None or args.cache is not None or is_lossy(args.local)


def _as_sample(args: VerifyArgs) -> Args:
    shared = {field.name: getattr(args, field.name) for field in fields(Options)}
    shared["steps"] = args.steps or (None if _is_lossy(args) or args.preset else 3)
    return Args(**{**shared, "cache": args.cache, "out": args.out.with_suffix(".png")})  # which is not made


def _dtypes(args: VerifyArgs, device: torch.device) -> tuple[torch.dtype, ...]:
    if args.dtype != "auto":
        if args.exact and DTYPES[args.dtype].itemsize > 2:
            raise ValueError(f"got --exact with --dtype {args.dtype}, expected bf16 or fp16, which have such kernels")
        return (DTYPES[args.dtype],)
    half = (torch.bfloat16, torch.float16) if device.type == "cuda" else (torch.bfloat16,)
    return half if args.exact else (torch.float32, *half)


def _head(args: VerifyArgs, job: OwnJob, ranks: Mesh, compared: str, notes: Sequence[str]) -> str:
    """The lines that say what is compared with what, and what a reader of the table must know."""
    device = torch.cuda.get_device_name(ranks.device) if ranks.device.type == "cuda" else "CPU"
    known = {
        RANDOM: job.source.blueprint.checkpoint is None,
        "fp16 is slow on CPUs and not compared; --dtype fp16 does so": device == "CPU" and args.dtype == "auto",
        "bits are compared between transports; with --exact (GPUs) also with those of one rank": not args.exact,
    }
    lines = [
        f"model     {args.model}: {job.load.images} pictures, {job.load.tokens} tokens, {_as_sample(args).steps} steps "
        f"of {type(job.scheduler).__name__}, {scales(job)}",
        "reference one rank, fp32 (fp64 for fp32) without TF32, attention by its formula, no graph",
        f"compared  {compared} of {ranks.world.size} x {device}",
    ]
    shown = [*(note for note, holds in known.items() if holds), *notes]
    return "\n".join([*lines, *(f"note      {note}" for note in shown)])


def _write(args: VerifyArgs, results: Mapping[str, Any]) -> None:
    facts = {**asdict(args), "versions": versions(), **results}
    with written(args.out) as path:
        path.write_text(json.dumps(facts, indent=1, default=str), encoding="utf-8")
