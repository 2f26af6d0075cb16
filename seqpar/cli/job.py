"""Checked flags: everything that can be wrong with them is found here, before any weight is read."""

from __future__ import annotations

from pathlib import Path

import torch

import seqpar.attention
import seqpar.local
import seqpar.transports
from seqpar.cli.args import Args
from seqpar.mesh import Mesh, default_dtype
from seqpar.pipelines._family import Job, Order, family_of
from seqpar.pipelines._pictures import check_writable
from seqpar.pipelines.adapted import Adapted
from seqpar.planner.plan import parse_mesh
from seqpar.protocols import plugin
from seqpar.sampling.guidance import Guidance, check_layout

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def check(args: Args, mesh: Mesh) -> Job | Adapted:
    """The job that the flags describe; `ValueError` for any flag that is wrong. Reads headers of files, no weights."""
    _check_ranges(args)
    _check_names(args)
    family, path = family_of(args.model, args.heads)
    order = order_of(args, mesh)
    if "class_labels" not in (family.PROMPT or ()):
        order.refuse("expected none: it is for models that make pictures of classes", respacing=order.respacing)
    job: Job | Adapted = family.check(order, path)
    if args.dry_run is None:
        video = isinstance(job, Adapted) and job.video
        check_writable(output(args, video), ".mp4" if video else ".png")
    aim, axes = parse_mesh(args.mesh)
    _check_heads(args, job)
    if isinstance(job, Adapted):
        if args.dry_run is not None or aim != "latency":
            flag = "a plan" if args.dry_run is not None else f"--mesh {args.mesh}"
            raise ValueError(f"got {flag} with {job.kind.__name__}, expected neither a plan nor throughput: {job.why}")
        return job
    data, cfg = axes.get("data", 1), axes.get("cfg", 1)
    check_layout(data, cfg, job.load.images, job.guidance, job.blueprint.config.in_channels)
    return job


def output(args: Args, video: bool) -> Path:
    """The file to write; the default name ends in .mp4 for a video."""
    return args.out.with_suffix(".mp4") if video and args.out == Args.out else args.out


def order_of(args: Args, mesh: Mesh) -> Order:
    """The pictures that the flags ask for; `ValueError` for a --size that is none."""
    # a plan for a number of GPUs takes a GPU's data type, also on a machine without one
    device = torch.device("cuda") if args.dry_run else mesh.device
    same = ("model", "classes", "repeat", "steps", "guidance", "true_guidance", "guidance_channels", "eta")
    more = ("respacing", "scheduler", "seed", "frames", "fps", "heads")
    return Order(
        **{name: getattr(args, name) for name in (*same, *more)},
        dtype=DTYPES.get(args.dtype, default_dtype(device)),
        prompts=args.prompt,
        negative=args.negative_prompt,
        size=parse_size(args.size),
    )


def parse_size(text: str | None) -> tuple[int, int] | None:
    """(height, width) from "256" or "256x384"; `ValueError` for other texts."""
    if text is None:
        return None
    sides = text.lower().split("x")
    if len(sides) > 2 or not all(side.isdecimal() for side in sides):
        raise ValueError(f"got --size {text}, expected pixels like 256 or 256x384 (height x width)")
    return int(sides[0]), int(sides[-1])


def scales(guidance: Guidance) -> str:
    """The guidance of a run as text: the scale that the model takes as an input, and that of two branches."""
    if guidance.embedded is None:
        return f"guidance {guidance.scale:g}"
    beside = f", classifier-free guidance {guidance.scale:g}" if guidance.on else ""
    return f"guidance {guidance.embedded:g} as an input{beside}"


def _check_heads(args: Args, job: Job | Adapted) -> None:
    """Raise where the files say the number of heads themselves, and another one."""
    if args.heads is None:
        return
    known = None if isinstance(job, Adapted) else job.blueprint.config.num_attention_heads
    if args.heads != known:
        raise ValueError(f"got --heads {args.heads} with --model {args.model}, expected none: its files say the number")


def _check_ranges(args: Args) -> None:
    if any(count < 1 for count in args.dry_run or ()):
        raise ValueError(f"got --dry-run {args.dry_run}, expected numbers of processes, from 1")
    if args.heads is not None and args.heads < 1:
        raise ValueError(f"got --heads {args.heads}, expected at least 1")
    if args.steps < 1 or args.repeat < 1:
        raise ValueError(f"got --steps {args.steps} --repeat {args.repeat}, expected at least 1 of each")
    if args.vae == "strips" and args.exact:
        raise ValueError("got --vae strips with --exact, expected pictures: strips round sums in another order")
    if not 0 <= args.seed < 2**63:
        raise ValueError(f"got --seed {args.seed}, expected 0 to 2**63 - 1")


def _check_names(args: Args) -> None:
    """Raise where a transport, a strategy or a local attention does not exist."""
    if args.strategy != "auto":
        plugin(seqpar.attention, args.strategy, "strategy")
    if args.transport != "auto":
        plugin(seqpar.transports, args.transport, "transport")
    if args.local != "auto":
        plugin(seqpar.local, args.local, "local attention")
