"""Checked flags: everything that can be wrong with them is found here, before any weight is read; and plans.

Numbers are bounded before anything of their size is made, so that no flag makes this check itself long or large.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

import torch
from PIL import Image

from seqpar.cli.args import Args, DryRun, Options, PlanArgs
from seqpar.loading.folder import open_controlnet
from seqpar.loading.lora import parse as parse_lora
from seqpar.loading.names import controlnet_of, is_path, published_of, resolve
from seqpar.mesh.mesh import Axis, Mesh, default_dtype
from seqpar.pipelines.find import find, published
from seqpar.pipelines.image_files import Picture, decoded_mask, read
from seqpar.pipelines.pictures import check_encoder, check_writable, numbered, shared
from seqpar.pipelines.planning import EDITED
from seqpar.pipelines.protocol import GenerationRequest, Job, Source, as_text, inputs_of, scales
from seqpar.planner.explain import explain
from seqpar.planner.plan import check_names, is_lossy, parse_mesh, rank, transport_between
from seqpar.planner.predict import EIGHT_SPEED
from seqpar.planner.rates import Card, Machine, card_of, here, imagined, ranks_of_a_host
from seqpar.planner.search import Preferences
from seqpar.transformer.attention8 import check_steps
from seqpar.types.arguments import check_whole
from seqpar.types.guidance import check_layout
from seqpar.vae.strips import spread_of


def check_decoding(job: Job, mesh: Mesh) -> None:
    """Raise ValueError if the decoded pictures of a run, which every rank holds, exceed the memory of its device."""
    height, width = job.pixels or (1, 1)
    gpu, here = mesh.device.type == "cuda", min(mesh.world.size, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    nbytes = job.load.images * 3 * height * width * torch.float32.itemsize * (1 if gpu else here)
    if gpu:
        memory = torch.cuda.get_device_properties(mesh.device).total_memory
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if nbytes > memory:
        raise ValueError(
            f"got {job.load.images} pictures of {height}x{width} pixels, which take {nbytes / 2**30:.1f} GiB once they "
            f"are decoded, expected at most {memory / 2**30:.1f} GiB; use a smaller --size or --repeat, and run again"
        )


RANGES = {  # of flags that are numbers; most stand for an amount of work or memory
    "steps": (1, 100_000),
    "repeat": (1, 65_536),
    "frames": (1, 100_000),
    "fps": (1, 1000),
    "seed": (0, 2**63 - 1),
}
MOST_PICTURES = 65_536  # in one run; the next --seed makes others
MOST_INPUTS = 16  # files of --image
MOST_SCALE = 10  # of a ControlNet
LEAST_STRENGTH = 0.001  # which makes a step of any number of them
MOST_SIDE = 131_072  # pixels of a --size
MOST_PLANNED = (512, 1024)  # GPUs of one plan, and of all plans of a command: time grows with the square of a number
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def checked(args: Args, mesh: Mesh) -> Job:
    """The job that the flags describe; the same ValueError on every rank for what is wrong. Every rank calls it.

    Rank 0 looks for the model first, so that the hub is asked once for a name that it does not know.
    """
    mesh.on_all_ranks(lambda: check_flags(args))
    pictures = shared(lambda: pictures_of(args), mesh)
    path = None
    if mesh.world.size > 1 and (args.dry_run is None or published_of(args.model) is None):
        path, why = _resolved(args.model) if mesh.is_main else (None, None)
        why = mesh.share(why, str | None)
        if why is not None:
            raise ValueError(why)
    if mesh.world.size > 1 and args.controlnet is not None and not is_path(args.controlnet):
        # other ranks then find what rank 0 has downloaded
        mesh.on_rank_0(lambda: _with_controlnet(_source(args, path), args).takes, str)
    return mesh.on_all_ranks(lambda: check(args, mesh, path, pictures))


def named(args: Args) -> Args:
    """The flags with the built-in model that they mean: the one of texts where they name a prompt and no classes."""
    means_text = args.model == "builtin" and args.prompt and not args.classes
    return replace(args, model="builtin-text") if means_text else args


def _resolved(name: str) -> tuple[Path | None, str | None]:
    """The path of this name, and why there is none; neither for random weights."""
    try:
        return resolve(name), None
    except (ValueError, OSError) as error:
        return None, str(error)


def pictures_of(args: Args) -> list[Picture]:
    """The input images, the one that a ControlNet follows, and the mask; ValueError for files that are none."""
    pictures = [*map(read, args.image)]
    if args.control_image is not None:
        pictures.append(read(args.control_image, "--control-image"))
    if args.mask is not None:
        mask, (height, width) = read(args.mask, "--mask", partial(decoded_mask, white=True)), pictures[0].size
        if mask.size != (height, width):
            size = "x".join(map(str, mask.size))
            raise ValueError(f"got --mask {args.mask} of {size} pixels, expected the image's {height}x{width}")
        pictures.append(mask)
    return pictures


def check_flags(args: Args) -> None:
    """Raise ValueError for flags that are wrong whatever the model is."""
    _check_ranges(args)
    _check_inputs(args)
    check_names(args.strategy, args.local, args.transport)
    check_steps(args.attention_steps, is_lossy(args.local), args.min_psnr)
    parse_size(args.size)
    tuple(map(parse_lora, args.lora))
    for name in ("steps", "scheduler", "respacing", "min_psnr") if args.preset is not None else ():
        if (value := getattr(args, name)) is not None:
            raise ValueError(
                f"got --{name.replace('_', '-')} {value} with --preset {args.preset}; leave one of them out"
            )
    if args.verify and (args.precision is not None or is_lossy(args.local)):
        flag = f"--local-attention {args.local}" if args.precision is None else f"--precision {args.precision}"
        raise ValueError(f"got --verify with {flag}, whose error it would report as a fault; use one of them")


def check(args: Args, mesh: Mesh, path: Path | None = None, pictures: Sequence[Picture] | None = None) -> Job:
    """The job that the flags describe; `ValueError` for any flag that is wrong. Reads headers of files, no weights.

    path: what the model's name stands for, if that is known. pictures: those of `pictures_of`; None reads them here.
    """
    check_flags(args)
    source = _with_controlnet(_source(args, path), args)
    request = request_of(args, mesh, pictures_of(args) if pictures is None else pictures)
    job = source.check(request if args.dry_run is None else _completed(request, source))
    if args.dry_run is None:
        if job.video:
            check_encoder()
        *others, last = outputs(args, job)
        check_writable(last, ".mp4" if job.video else ".png", others)
    aim, axes = parse_mesh(args.mesh)
    if (args.dry_run is not None or aim != "latency") and job.why_not_planned is not None:
        what = "no plan" if args.dry_run is not None else f"--mesh {args.mesh} is not possible"
        raise ValueError(f"{what}: {job.why_not_planned}")
    check_layout(axes.get("data", 1), axes.get("cfg", 1), job.load.images, job.guidance, job.channels)
    return job


def outputs(args: Args, job: Job) -> list[Path]:
    """The files to write, the one with the longest name last; the default name ends in .mp4 for a video."""
    default = job.video and args.out == Args.out
    return numbered(args.out.with_suffix(".mp4") if default else args.out, 1 if job.labels else job.load.images)


def request_of(args: Args, mesh: Mesh, pictures: Sequence[Picture] = ()) -> GenerationRequest:
    """The pictures that the flags ask for; `ValueError` for a --size that is none and a precision that cannot be here.

    pictures: those of `pictures_of`.
    """
    # a plan for a number of GPUs takes a GPU's data type, also on a machine without one
    device = torch.device("cuda") if args.dry_run else mesh.device
    same = ("model", "precision", "min_psnr", "cache", "park", "classes", "repeat", "preset", "guidance")
    more = ("true_guidance", "guidance_channels", "eta", "respacing", "scheduler", "seed", "frames", "fps", "strength")
    request = GenerationRequest(
        **{name: getattr(args, name) for name in (*same, *more, *(() if args.steps is None else ("steps",)))},
        dtype=DTYPES.get(args.dtype, default_dtype(device)),
        prompts=args.prompt,
        negative=args.negative_prompt,
        size=parse_size(args.size),
        loras=tuple(map(parse_lora, args.lora)),
        **inputs_of(pictures, args.controlnet, args.control_scale),
        attention_steps=args.attention_steps,
        planned=args.dry_run is not None,
    )
    _check_precision(args, request, device)
    return request


def _check_precision(args: Args, request: GenerationRequest, device: torch.device) -> None:
    card = _card(args)
    request.check_precision(device if card is None else torch.device("meta"))
    if card is not None and request.dtype != torch.bfloat16:
        request.refuse(f"weights are {as_text(request.dtype)}, expected bfloat16", precision=request.precision)
    if card is not None and not card.eight:
        request.refuse(f"{card.device} has no products of e4m3", precision=request.precision)


def parse_size(text: str | None) -> tuple[int, int] | None:
    """(height, width) from "256" or "256x384"; `ValueError` for other texts."""
    if text is None:
        return None
    sides = text.lower().split("x")
    if len(sides) > 2 or not all(side.isdecimal() for side in sides):
        raise ValueError(f"got --size {text}, expected pixels like 256 or 256x384 (height x width)")
    if any(len(side) > len(str(MOST_SIDE)) or not 1 <= int(side) <= MOST_SIDE for side in sides):
        raise ValueError(f"got --size {text}, expected 1 to {MOST_SIDE} pixels along a side")
    return int(sides[0]), int(sides[-1])


def _check_ranges(args: Args) -> None:
    _check_counts(args.dry_run or ())
    for name, (least, most) in RANGES.items():
        if (value := getattr(args, name)) is not None:
            check_whole(f"--{name}", value, least, most)
    if args.strength is not None and not LEAST_STRENGTH <= args.strength <= 1:
        raise ValueError(f"got --strength {args.strength}, expected {LEAST_STRENGTH} to 1")
    named = max(len(args.classes), len(args.prompt), 1)
    if args.repeat * named > MOST_PICTURES:
        raise ValueError(
            f"got {named} x --repeat {args.repeat} pictures, expected at most {MOST_PICTURES} in a run; make others by "
            f"runs with another --seed"
        )
    if args.vae == "strips" and args.exact:
        raise ValueError("got --vae strips with --exact, expected pictures: strips round sums in another order")


def _check_inputs(args: Args) -> None:
    if len(args.image) > MOST_INPUTS:
        raise ValueError(f"got --image with {len(args.image)} pictures, expected at most {MOST_INPUTS}")
    if args.mask is not None and len(args.image) != 1:
        raise ValueError(f"got --mask {args.mask} with {len(args.image)} pictures; add one --image, which it repaints")
    if (args.controlnet is None) != (args.control_image is None):
        missing = "--controlnet" if args.controlnet is None else "--control-image"
        raise ValueError(f"--controlnet and --control-image need each other; add {missing}")
    if args.control_scale is None:
        return
    if args.controlnet is None:
        raise ValueError(f"got --control-scale {args.control_scale:g} without --controlnet; add one, or leave it out")
    if not 0 <= args.control_scale <= MOST_SCALE:
        raise ValueError(f"got --control-scale {args.control_scale:g}, expected 0 to {MOST_SCALE}")


def _check_counts(counts: Sequence[int]) -> None:
    most, total = MOST_PLANNED
    for count in counts:
        check_whole("GPUs to plan for", count, 1, most)
    if sum(counts) > total:
        raise ValueError(f"got plans for {sum(counts)} GPUs together, expected at most {total}")


# Plans -----------------------------------------------------------------------------------------------------------


def as_dry_run(args: PlanArgs) -> DryRun:
    """The dry run that prints this plan: for the given numbers of GPUs, or for all of this machine, or for one card."""
    every = (torch.cuda.device_count(),) if torch.cuda.is_available() else ()
    gpus = args.gpus or (every if args.card is None else (1,))
    same = {field.name: getattr(args, field.name) for field in fields(Options)}
    return DryRun(**same, park=args.park, card=args.card, dry_run=gpus)


def _card(args: Args) -> Card | None:
    return card_of(args.card) if isinstance(args, DryRun) and args.card is not None else None


def _source(args: Args, path: Path | None) -> Source:
    """The source of the model: of a plan also what its family's file says of a published one."""
    known = published_of(args.model) if args.dry_run is not None and path is None else None
    return find(args.model if path is None else str(path)) if known is None else published(*known)


def _with_controlnet(source: Source, args: Args) -> Source:
    """The source with the flags' ControlNet. Its weights are downloaded after it is known to fit, and for no plan."""
    if (name := args.controlnet) is None:
        return source
    described = open_controlnet(controlnet_of(name, weights=False), weights=False)
    planned = source.having({name: described}, all_fit=True)
    if args.dry_run is not None:
        return planned
    return source.having({name: open_controlnet(controlnet_of(name))}, all_fit=True)


def _completed(request: GenerationRequest, source: Source) -> GenerationRequest:
    """The request of a plan with the prompt and the image that it lacks, of which the size alone matters."""
    if source.takes != "prompts":
        return request
    request = replace(request, prompts=request.prompts or ("",))
    blank = Picture("a picture", Image.new("RGB", EDITED))
    return replace(request, images=(blank,)) if source.needs_image and not request.images else request


def preferences_of(args: Args) -> Preferences:
    aim, axes = parse_mesh(args.mesh)
    return Preferences(aim, axes, args.strategy, args.exact, args.local, args.transport)


def dry_run(args: Args, job: Job, ranks: Mesh, hosts: int = 1, explained: bool = False) -> str:
    """The tables of a plan: one per number of GPUs, or one for the running processes. Collective.

    ValueError if no layout fits a single machine; beside other tables the reason replaces the table. hosts: machines
    that have the GPUs. explained: whether to add why the first layout wins.
    """
    check_whole("--hosts", hosts, 1, 512)
    if hosts > 1 and not args.dry_run:
        raise ValueError(f"--hosts {hosts} needs the number of all their GPUs; add --gpus, such as --gpus {8 * hosts}")
    load = job.load
    what = ("video" if job.video else "image") + ("s" if load.images > 1 else "")
    head = f"{args.model}: {load.images} {what} of {load.tokens} tokens, {scales(job)}, {job.request.dtype}"
    head += "" if load.calls == 1 else f", {load.calls * (1 + load.guidance):g} calls per step"
    head += "" if args.precision is None else f", GEMMs in {args.precision} at {EIGHT_SPEED} times its rate on GPUs"
    card = _card(args)
    machines = [imagined(ranks.device, count, args.transport, hosts, card) for count in args.dry_run or ()]
    if not machines:
        name = args.transport
        name = transport_between(ranks.world, ranks.device).name if name == "auto" else name
        machines = [here(ranks.device, ranks.world.size, name, ranks_of_a_host(ranks))]
    tables = []
    for machine in machines:
        try:
            tables.append(_table(args, job, machine, explained))
        except ValueError as error:
            if len(machines) < 2:
                raise
            tables.append(f"{machine}: {error}")
    return "\n\n".join([head.replace("torch.", ""), *tables])


def _table(args: Args, job: Job, machine: Machine, explained: bool) -> str:
    ranking = rank(job.work, job.load, machine, preferences_of(args), job.request.dtype)
    lines = [f"{machine}: {ranking}", ranking.table()]
    if not ranking.ranked and args.precision is None:
        lines.append(_in_8_bits(args, job, machine))
    if job.decodes and ranking.ranked:
        world, data = Axis("world", size=machine.count), Axis("data", size=ranking.best.data)
        mode = "pictures" if args.exact and args.vae == "auto" else args.vae
        spread = spread_of(job.load.images, mode, world, data, lambda: None)
        lines.append(f"decoding: {spread}, unless the loaded weights leave too little memory for it")
    return "\n".join([*lines, *(["", explain(ranking)] if explained and ranking.ranked else [])])


def _in_8_bits(args: Args, job: Job, machine: Machine) -> str:
    """What --precision fp8 changes in a plan of which nothing fits."""
    request = replace(job.request, precision="fp8")
    try:
        _check_precision(args, request, torch.device("cpu" if machine.device == "CPU" else "cuda"))
        eight = job.source.check(request)
    except ValueError as error:
        return f"not in 8 bits either: {error}"
    ranking = rank(eight.work, eight.load, machine, preferences_of(args), request.dtype)
    return f"with --precision fp8: {ranking}"
