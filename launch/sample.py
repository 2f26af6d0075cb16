"""Pictures from a diffusion transformer whose tokens are split over all processes.

    torchrun --nproc_per_node=4 launch/sample.py --classes cat rocket 7 --guidance 4 --out pictures.png
    python launch/sample.py                      # one process

GPUs with NCCL where there are any, else CPUs with gloo. Everything is checked before weights load; a mistake is one
message and a non-zero exit on all ranks.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from tqdm import tqdm

from seqpar import mesh as meshes
from seqpar.mesh import AXES, Mesh
from seqpar.pictures import check_writable, grid, save, to_pil
from seqpar.pipeline import Files, Pipeline
from seqpar.plan import choose_mesh
from seqpar.sampling import digest, steps_locally
from seqpar.trajectory import Guidance, check_layout

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SHOWN_BY_DEFAULT = 12  # classes, where none are named
GRACE_S = 5.0  # how long other ranks leave rank 0 to say what is wrong


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
    eta: float = 0.0
    """DDIM's noise: 0 is deterministic, 1 is DDPM."""
    scheduler: str | None = None
    """Any diffusers scheduler by class name; the model's own where not given."""
    seed: int = 0
    """Of the noise: the same pictures on any number of ranks."""
    size: str | None = None
    """Pixels, as 256 or 256x384 (height x width); the size the model was trained for where not given."""
    mesh: str = "auto"
    """Axes, as cfg=2,ulysses=2 (data, cfg, ring, ulysses); what is not named is chosen."""
    strategy: str = "auto"
    """How attention sees the whole sequence: ulysses, ring, usp, kv_gather."""
    local: Annotated[str, tyro.conf.arg(name="local-attention", aliases=["--local"])] = "auto"
    """One device's attention: flash, sdpa, reference. (torchrun on Python 3.11 takes --local for its own.)"""
    dtype: Literal["auto", "fp64", "fp32", "bf16", "fp16"] = "auto"
    """Of weights and activations; bf16 on GPUs and fp32 on CPUs where auto."""
    out: Path = Path("seqpar.png")
    """The picture; its metadata holds every parameter."""


def main() -> None:
    """Parse, run, and turn mistakes into one message and a non-zero exit everywhere."""
    rank = int(os.environ.get("RANK", "0"))
    try:
        args = tyro.cli(Args, description=__doc__, console_outputs=rank == 0)
        run(args)
    except SystemExit as stop:
        _leave(rank, None, stop.code)
    except (ValueError, OSError, torch.OutOfMemoryError) as error:
        _leave(rank, f"error: {error}", 1)
    finally:
        meshes.close()


def run(args: Args) -> None:
    """The whole path, from flags to a file."""
    guidance = Guidance(args.guidance, args.guidance_channels)
    mesh = Mesh.from_env(**mesh_axes(args, guidance.on))
    files, classes, size = mesh.together(lambda: check(args, mesh, guidance))
    dtype = DTYPES.get(args.dtype, torch.bfloat16 if mesh.device.type == "cuda" else torch.float32)
    started = time.perf_counter()
    pipeline = Pipeline.load(files, mesh, dtype, args.strategy, args.local)
    loaded = time.perf_counter() - started
    _say(mesh, summary(args, pipeline, len(classes), dtype, size))
    progress = Progress(args.steps, mesh)
    latents = pipeline.latents(classes, steps=args.steps, guidance=guidance, seed=args.seed, size=size, eta=args.eta,
                               scheduler=args.scheduler, on_step=progress)  # fmt: skip
    per_step = progress.finish()
    images = pipeline.decode(latents)
    if mesh.is_main:
        labels = [files.class_name(number) for number in files.class_ids(classes)]
        chosen = {"strategy": pipeline.dit.strategy.name, "local": pipeline.dit.local.name, "mesh": mesh.sizes}
        parameters = asdict(args) | {"out": str(args.out), "classes": classes, "chosen": chosen}
        parameters |= {"ms_per_step": per_step, "latents": digest(latents)}
        save(grid(to_pil(images), labels), args.out, parameters)
    _say(mesh, f"{args.out}: {len(classes)} pictures, {per_step:.1f} ms a step, {loaded:.1f} s to load, "
               f"{time.perf_counter() - started:.1f} s in all, latents {digest(latents)}")  # fmt: skip


def check(args: Args, mesh: Mesh, guidance: Guidance) -> tuple[Files, list[str], tuple[int, int] | None]:
    """Everything that can be wrong with the flags, before any weight is read."""
    if args.steps < 1 or args.repeat < 1:
        raise ValueError(f"got --steps {args.steps} --repeat {args.repeat}, expected at least 1 of each")
    check_writable(args.out)
    files = Files.locate(args.model)
    classes = args.classes or tuple(map(str, sorted(set(files.labels.values()))[:SHOWN_BY_DEFAULT])) or ("0",)
    files.class_ids(classes)
    size = parse_size(args.size)
    height, width = files.latent_size(size)
    tokens = height * width // files.blueprint.config.patch_size**2
    if tokens < mesh.sequence.size:
        raise ValueError(
            f"got {tokens} tokens for {mesh.sequence.size} ranks, expected one a rank; use a larger --size"
        )
    repeated = [label for label in classes for _ in range(args.repeat)]
    check_layout(mesh, len(repeated), guidance, files.blueprint.config.in_channels)
    scheduler = files.scheduler(args.scheduler)
    if args.steps > scheduler.config.num_train_timesteps:
        raise ValueError(f"got --steps {args.steps}, expected at most {scheduler.config.num_train_timesteps}")
    return files, repeated, size


def mesh_axes(args: Args, guidance: bool) -> dict[str, Any]:
    """`Mesh.from_env`'s arguments for --mesh and --strategy."""
    if args.mesh == "auto":
        return choose_mesh(int(os.environ.get("WORLD_SIZE", "1")), args.strategy, guidance)
    axes: dict[str, int] = {}
    for part in args.mesh.split(","):
        name, _, size = part.partition("=")
        if name not in AXES or not size.isdecimal():
            raise ValueError(f"got --mesh {args.mesh}, expected axes like cfg=2,ulysses=2 of {', '.join(AXES)}")
        axes[name] = int(size)
    return {"guidance": guidance, **axes}


def parse_size(text: str | None) -> tuple[int, int] | None:
    """(height, width) from "256" or "256x384"."""
    if text is None:
        return None
    sides = text.lower().split("x")
    if len(sides) > 2 or not all(side.isdecimal() for side in sides):
        raise ValueError(f"got --size {text}, expected pixels like 256 or 256x384 (height x width)")
    return int(sides[0]), int(sides[-1])


def summary(args: Args, pipeline: Pipeline, images: int, dtype: torch.dtype, size: tuple[int, int] | None) -> str:
    """What runs, where, and why, in a few lines."""
    dit, mesh = pipeline.dit, pipeline.dit.mesh
    height, width = pipeline.files.latent_size(size)
    tokens = height * width // dit.config.patch_size**2
    device = torch.cuda.get_device_name(mesh.device) if mesh.device.type == "cuda" else "CPU"
    backend = "one process" if mesh.world.size == 1 else "NCCL" if mesh.device.type == "cuda" else "gloo"
    scheduler = pipeline.files.scheduler(args.scheduler)
    steps = "on local tokens" if steps_locally(scheduler) else "on the gathered prediction: not DDIM"
    lines = [
        f"mesh      {mesh} ({mesh.world.size} x {device}, {backend})",
        f"strategy  {dit.strategy}",
        f"local     {dit.local}",
        f"work      {images} pictures, {tokens} tokens, {str(dtype).removeprefix('torch.')}, {args.steps} steps of "
        f"{type(scheduler).__name__} {steps}, guidance {args.guidance:g}",
    ]
    if pipeline.vae is None:
        lines.append("decoder   none comes with this model: pictures show the first three latent channels")
    return "\n".join(lines)


class Progress:
    """A bar on rank 0 that follows the device without making it wait: it polls events, and waits only at the end."""

    def __init__(self, steps: int, mesh: Mesh) -> None:
        self._bar = tqdm(total=steps, unit="step", disable=not mesh.is_main)
        self._cuda = mesh.device.type == "cuda"
        self._times: list[float] = []
        self._events: list[torch.cuda.Event] = []
        self._open: deque[torch.cuda.Event] = deque()

    def __call__(self, index: int) -> None:
        """A step has been queued (GPU) or done (CPU)."""
        if not self._cuda:
            self._times.append(time.perf_counter())
            self._bar.update()
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append(event)
        self._open.append(event)
        while self._open and self._open[0].query():
            self._open.popleft()
            self._bar.update()

    def finish(self) -> float:
        """Wait for the rest; ms per step, the first one (warm-up) left out where there are more."""
        while self._open:
            self._open.popleft().synchronize()
            self._bar.update()
        self._bar.close()
        if self._cuda:
            return self._events[0].elapsed_time(self._events[-1]) / max(1, len(self._events) - 1)
        return 1e3 * (self._times[-1] - self._times[0]) / max(1, len(self._times) - 1)


def _say(mesh: Mesh, text: str) -> None:
    if mesh.is_main:
        print(text, flush=True)


def _leave(rank: int, message: str | None, code: int | str | None) -> None:
    """Exit; rank 0 speaks first. Others speak only where rank 0 had nothing to say and still runs."""
    if not code:
        return
    if rank > 0:
        time.sleep(GRACE_S)
        message = message and f"rank {rank}: {message}"
    if message:
        print(message, file=sys.stderr, flush=True)
    # not sys.exit: a process group whose other ranks wait in a collective would hold the exit up
    os._exit(code if isinstance(code, int) else 1)


if __name__ == "__main__":
    main()
