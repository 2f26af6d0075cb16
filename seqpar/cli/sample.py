"""Pictures from a diffusion transformer whose tokens are split over all processes.

    torchrun --nproc_per_node=4 launch/sample.py --classes cat rocket 7 --guidance 4 --out pictures.png
    python launch/sample.py                      # one process

GPUs with NCCL where there are any, else CPUs with gloo. Everything is checked before weights load; a mistake is one
message and a non-zero exit on all ranks.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import diffusers
import torch
import tyro

import seqpar
import seqpar.local
import seqpar.transports
from seqpar import exact
from seqpar.cli.exits import guarded
from seqpar.cli.planning import asked, imagined, ours, shared_plan, tables
from seqpar.cli.progress import Progress
from seqpar.kernels import gated_linear
from seqpar.mesh import Mesh, default_dtype
from seqpar.pipelines.class_labels import Files, Pipeline
from seqpar.pipelines.pictures import check_writable, grid, save, to_pil
from seqpar.planner.plan import Plan, parse_mesh
from seqpar.planner.predict import Load
from seqpar.planner.search import Wish
from seqpar.protocols import plugin
from seqpar.sampling.guidance import Guidance, check_layout
from seqpar.sampling.loop import digest, why_not_captured
from seqpar.sampling.steppers import decide

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SHOWN_BY_DEFAULT = 12  # classes, where none are named


@dataclass(frozen=True)
class Args:
    """Pictures from a diffusion transformer whose tokens are split over all processes."""

    model: str = "builtin"
    """"builtin", a diffusers folder, an original .pt file, a hub id, or a preset with random weights (dit-xl/2)."""
    classes: tuple[str, ...] = ()
    """Names or numbers; the first 12 classes where none are given."""
    repeat: int = 1
    """Pictures of each class."""
    steps: int = 25
    """Denoising steps."""
    guidance: float = 4.0
    """Classifier-free guidance; off at 1 and below."""
    guidance_channels: int | None = None
    """Guide only the first channels (original DiT: 3); all where not given, as diffusers does."""
    eta: float | None = None
    """The noise of DDIM and of schedulers like it: 0 is deterministic, 1 is DDPM; the scheduler's default where not
    given (DDIM: 0, TCD: 0.3)."""
    scheduler: str | None = None
    """Any diffusers scheduler by class name; the model's own where not given."""
    seed: int = 0
    """Of the noise: the same pictures on any number of ranks."""
    size: str | None = None
    """Pixels, as 256 or 256x384 (height x width); the size the model was trained for where not given."""
    mesh: str = "auto"
    """"auto" (the first picture soonest), "throughput" (most pictures a second: data is chosen, too), or axes as
    cfg=2,ulysses=2 (data, cfg, ring, ulysses); what is not named is chosen."""
    strategy: str = "auto"
    """How attention sees the whole sequence: ulysses, ring, usp, kv_gather, kv_first. A named one gets all ranks."""
    local: Annotated[str, tyro.conf.arg(name="local-attention", aliases=["--local"])] = "auto"
    """One device's attention: flash, sdpa, reference. (torchrun on Python 3.11 takes --local for its own.)"""
    transport: str = "auto"
    """How blocks travel between ranks: peer (into each other's memory, on one machine) or collective (NCCL, gloo);
    where auto, peer between GPUs that reach each other."""
    exact: bool = False
    """The same latents, bit by bit, on any number of GPUs, at any size; a little slower (seqpar/exact.py)."""
    dtype: Literal["auto", "fp64", "fp32", "bf16", "fp16"] = "auto"
    """Of weights and activations; bf16 on GPUs and fp32 on CPUs where auto."""
    out: Path = Path("seqpar.png")
    """The picture; its metadata holds every parameter."""
    dry_run: tuple[int, ...] | None = None
    """Only print what each layout would take, best first, and load no weights: for the processes there are, or for
    each number given, as --dry-run 1 2 4 8."""


def main() -> None:
    """Parse and run; a mistake is one message and a non-zero exit everywhere."""
    guarded(lambda rank: run(tyro.cli(Args, description=__doc__, console_outputs=rank == 0)))


@dataclass(frozen=True)
class Job:
    """What the flags come to: `classes` as named, `pictures` the class number of each picture."""

    files: Files
    classes: tuple[str, ...]
    pictures: list[int]
    size: tuple[int, int] | None
    guidance: Guidance
    scheduler: Any
    dtype: torch.dtype

    @property
    def evaluations(self) -> int:
        """How often the model is called: once a step, about twice for schedulers like Heun's."""
        return len(self.scheduler.timesteps)

    @property
    def latent_size(self) -> tuple[int, int]:
        """(height, width)."""
        return self.files.latent_size(self.size)

    @property
    def tokens(self) -> int:
        """Of one picture."""
        return self.latent_size[0] * self.latent_size[1] // self.files.blueprint.config.patch_size**2

    @property
    def load(self) -> Load:
        """What the planner must know."""
        return self.files.load_of(self.pictures, self.guidance, self.evaluations, self.dtype, self.size)


def run(args: Args) -> None:
    """The whole path, from flags to a file."""
    guidance = Guidance(args.guidance, args.guidance_channels)
    if args.exact and args.dry_run is None:
        exact.turn_on()  # before anything touches a GPU
    ranks = Mesh.joined()
    job = ranks.together(lambda: check(args, ranks, guidance))
    if args.dry_run is not None:
        _say(ranks, ranks.share(ranks.together(lambda: dry_run(args, job, ranks))))
        return
    plan = shared_plan(job.load, job.files.blueprint, ranks, wish_of(args), job.dtype)
    started = time.perf_counter()
    pipeline = Pipeline.load(job.files, None, job.dtype, plan=plan)
    mesh = pipeline.dit.mesh
    loaded = time.perf_counter() - started
    _say(mesh, summary(args, pipeline, job, plan))
    with pipeline, Progress(job.evaluations, mesh) as progress:
        latents = pipeline.latents(job.pictures, steps=args.steps, guidance=guidance, seed=args.seed, size=job.size,
                                   eta=args.eta, scheduler=job.scheduler, on_step=progress)  # fmt: skip
        per_step = progress.finish()
    images = pipeline.decode(latents)
    bits = digest(latents)
    if mesh.is_main:
        labels = [job.files.class_name(number) for number in job.pictures]
        told = parameters(args, pipeline, job) | {"ms_per_step": per_step, "latents": bits}
        save(grid(to_pil(images), labels), args.out, told)
    speed = "a step not measured (one alone is warm-up)" if per_step is None else f"{per_step:.1f} ms a step"
    _say(mesh, f"{args.out}: {len(images)} pictures, {speed}, {loaded:.1f} s to load, "
               f"{time.perf_counter() - started:.1f} s in all, latents {bits}")  # fmt: skip


def check(args: Args, mesh: Mesh, guidance: Guidance) -> Job:
    """Everything that can be wrong with the flags, before any weight is read."""
    _check_ranges(args, guidance)
    if args.dry_run is None:
        check_writable(args.out)
    for name, package, kind in ((args.transport, seqpar.transports, "transport"),
                                (args.local, seqpar.local, "local attention")):  # fmt: skip
        if name != "auto":
            plugin(package, name, kind)
    files = Files.locate(args.model)
    classes = args.classes or tuple(map(str, sorted(files.labels)[:SHOWN_BY_DEFAULT])) or ("0",)
    pictures = [number for number in files.class_ids(classes) for _ in range(args.repeat)]
    gpu = torch.device("cuda") if args.dry_run else mesh.device  # --dry-run 4 imagines GPUs where there are none
    dtype = DTYPES.get(args.dtype, default_dtype(gpu))
    scheduler = files.schedule(args.scheduler, args.steps, args.eta)
    _, axes = parse_mesh(args.mesh)
    data, cfg = axes.get("data", 1), axes.get("cfg", 1)
    check_layout(data, cfg, len(pictures), guidance, files.blueprint.config.in_channels)
    job = Job(files, classes, pictures, parse_size(args.size), guidance, scheduler, dtype)
    _ = job.tokens  # a size that is none is found here, where it is an error of all ranks at once
    return job


def _check_ranges(args: Args, guidance: Guidance) -> None:
    if any(count < 1 for count in args.dry_run or ()):
        raise ValueError(f"got --dry-run {args.dry_run}, expected numbers of processes, from 1")
    if args.steps < 1 or args.repeat < 1:
        raise ValueError(f"got --steps {args.steps} --repeat {args.repeat}, expected at least 1 of each")
    if not 0 <= args.seed < 2**63:
        raise ValueError(f"got --seed {args.seed}, expected 0 to 2**63 - 1")
    if args.guidance_channels is not None and not guidance.on:
        raise ValueError(
            f"got --guidance-channels {args.guidance_channels} with --guidance {args.guidance:g}, expected guidance "
            f"over 1: without it there is nothing to guide"
        )


def wish_of(args: Args) -> Wish:
    """What the planner may choose."""
    return asked(args.mesh, args.strategy, args.exact, args.local, args.transport)


def dry_run(args: Args, job: Job, ranks: Mesh) -> str:
    """The tables that --dry-run prints."""
    load, model = job.load, job.files.blueprint
    head = f"{args.model}: {load.images} picture(s) of {load.tokens} tokens, guidance {args.guidance:g}, {job.dtype}"
    machines = [imagined(ranks.device, count, args.transport) for count in args.dry_run or ()]
    machines = machines or [ours(ranks, args.transport)]
    shown = tables(load, model, machines, wish_of(args), job.dtype)
    return f"{head.replace('torch.', '')}\n\n{shown}"


def parse_size(text: str | None) -> tuple[int, int] | None:
    """(height, width) from "256" or "256x384"."""
    if text is None:
        return None
    sides = text.lower().split("x")
    if len(sides) > 2 or not all(side.isdecimal() for side in sides):
        raise ValueError(f"got --size {text}, expected pixels like 256 or 256x384 (height x width)")
    return int(sides[0]), int(sides[-1])


def summary(args: Args, pipeline: Pipeline, job: Job, plan: Plan) -> str:
    """What runs, where, and why, in a few lines."""
    dit, mesh = pipeline.dit, pipeline.dit.mesh
    backend = "one process" if mesh.world.size == 1 else "NCCL" if mesh.device.type == "cuda" else "gloo"
    decision = decide(job.scheduler, {"eta": args.eta})
    why = "as asked" if args.strategy != "auto" else "planned" if mesh.sequence.size > 1 else "one rank a sequence"
    lines = [
        f"plan      {plan}",
        f"mesh      {mesh} ({mesh.world.size} x {_device(mesh)}, {backend})",
        f"strategy  {dit.strategy.name} ({why})",
        f"transport {dit.transport}",
        f"local     {dit.local}{', exact mode' if exact.is_on() else ''}",
        f"work      {len(job.pictures)} pictures, {job.tokens} tokens, {str(job.dtype).removeprefix('torch.')}, "
        f"{args.steps} steps of {type(job.scheduler).__name__} {decision}, guidance {args.guidance:g}",
    ]
    if job.evaluations != args.steps:
        lines[-1] += f"; the scheduler calls the model {job.evaluations} times"
    whole = mesh.sequence.size == mesh.world.size > mesh.cfg.size == 1
    if job.guidance.on and whole and args.strategy != "auto" and "cfg" not in args.mesh:
        lines.append("branches  both on all ranks, so that the named strategy has them all; --mesh cfg=2 parts them")
    if mesh.device.type == "cuda" and hasattr(dit.config, "feed_forward"):
        missing = gated_linear.why_not()
        how = "in its product (quack) where that was faster" if missing is None else f"a kernel after cuBLAS: {missing}"
        lines.append(f"SwiGLU    {how}")
    reason = why_not_captured(dit, decision)
    lines.append(f"graph     {'a step is one CUDA graph' if reason is None else f'none: {reason}'}")
    if pipeline.vae is None:
        lines.append("decoder   none comes with this model: pictures show the first three latent channels")
    return "\n".join(lines)


def parameters(args: Args, pipeline: Pipeline, job: Job) -> dict[str, Any]:
    """The flags as given, "chosen": what they came to, "versions": of what ran."""
    dit, mesh = pipeline.dit, pipeline.dit.mesh
    height, width = (side * job.files.factor for side in job.latent_size)
    chosen = {"strategy": dit.strategy.name, "local": dit.local.name, "transport": dit.transport.name,
              "mesh": mesh.sizes, "world": mesh.world.size,
              "device": _device(mesh), "dtype": next(name for name, dtype in DTYPES.items() if dtype == job.dtype),
              "size": f"{height}x{width}", "scheduler": type(job.scheduler).__name__,
              "classes": list(job.classes)}  # fmt: skip
    versions = {module.__name__: module.__version__ for module in (torch, diffusers, seqpar)}
    return asdict(args) | {"out": str(args.out), "chosen": chosen, "versions": versions}


def _device(mesh: Mesh) -> str:
    return torch.cuda.get_device_name(mesh.device) if mesh.device.type == "cuda" else "CPU"


def _say(mesh: Mesh, text: str) -> None:
    if mesh.is_main:
        print(text, flush=True)


if __name__ == "__main__":
    main()
