"""Seconds from a prompt to a PNG with FLUX.1 or Qwen-Image, by part: `parallelize` beside diffusers' own engine.

    torchrun --nproc_per_node=2 launch/bench.py pipeline --model qwen-image --out lines.jsonl

All parts have their released sizes and random weights (`launch/baselines/*_pipeline.py`), so that no checkpoint is
needed; on a machine without GPUs they are tiny. Encoders and decoder stay on the GPU in all rows. Our rows write the
PNG as our command does, diffusers' as its users do, by `image.save`. The reference is diffusers' fastest row.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import IO, Any, Literal

import torch
from torch import Tensor

import seqpar
from launch.baselines.folders import PARTS
from launch.baselines.released import RELEASED, Released
from launch.baselines.transformers import Graphed, compile_blocks, device_mesh, engine, engine_name, shared_copy
from launch.benches.rows import Flags, Line, Reference, Row, Timed, measure
from seqpar.mesh.boundary import StepBoundary
from seqpar.mesh.mesh import Mesh, default_dtype
from seqpar.pipelines.pictures import write_png
from seqpar.transformer.parallelize import keep_fp32, passing

# the parts besides a transformer, how a prompt becomes the arguments of a call, and latents a picture
FP32 = "fused blocks, fp32 state"  # as `seqpar sample`
BOUNDARY = f"{FP32}, step boundary"  # as `seqpar serve`
WAYS = (FP32, BOUNDARY, "fused blocks", "generic")
LAUNCHES = ("compiled blocks + graph", "compiled blocks", "eager")
Writer = Callable[[Any, IO[bytes]], object]


@dataclass(frozen=True)
class Pipeline(Flags):
    """Time whole pictures, from a prompt to a PNG."""

    model: Literal["flux.1-dev", "qwen-image"] = "flux.1-dev"
    """The pipeline's model; Qwen-Image computes both branches of guidance at each step."""
    steps: int | None = None
    """Number of denoising steps; None: 28 of FLUX.1, 50 of Qwen-Image."""
    size: int = 1024
    """Height and width of the picture in pixels."""
    strategy: str = "auto"
    """Strategy of our rows."""
    transport: str = "auto"
    """Transport of our rows."""


@dataclass(frozen=True)
class Case:
    """What all rows share. released: the transformer; parts: the module of the others; sizes: theirs."""

    args: Pipeline
    released: Released
    mesh: Mesh
    dtype: torch.dtype
    parts: Any
    sizes: Any

    @cached_property
    def pipe(self) -> Any:
        """Return diffusers' pipeline, whose parts and weights all rows share: a second Qwen-Image fits on few GPUs.

        Our blocks move weights beside each other, which later rows leave where they are: no graph of a row reads
        memory that another one has freed.
        """
        transformer: Any = self.released.build(self.dtype, self.mesh.device)
        seqpar.release(seqpar.parallelize(transformer, self.mesh))
        return self.parts.pipeline(transformer, self.dtype, self.mesh.device, self.sizes)

    @property
    def steps(self) -> int:
        """Return the number of denoising steps."""
        return self.parts.STEPS if self.args.steps is None else self.args.steps

    @cached_property
    def ranks(self) -> Any:
        """Return diffusers' mesh of all ranks."""
        return device_mesh(self.mesh)

    @property
    def engine(self) -> str:
        """Return the name of diffusers' engine."""
        counts = (self.released.tokens, *self.released.others, self.released.config["num_attention_heads"])
        return engine_name(self.mesh.world.size, counts)

    @cached_property
    def first(self) -> list[Tensor]:
        """Return the latents of the first row that made a picture, with which others are compared."""
        return []

    def around(self, transformer: Any) -> Any:
        """Return diffusers' pipeline with the same parts around another transformer; `parallelize` changes decoders."""
        others = {"transformer": transformer, "vae": shared_copy(self.pipe.vae)}
        made = type(self.pipe)(**{**self.pipe.components, **others})
        made.set_progress_bar_config(disable=True)
        return made


def main(args: Pipeline) -> None:
    """Measure all rows; rank 0 prints and appends the lines."""
    args.check()
    if args.steps is not None and args.steps < 1:
        raise ValueError(f"got --steps {args.steps}, expected at least 1")
    device = Mesh.joined().device
    known, parts, on_gpu = RELEASED[args.model], PARTS[args.model], device.type == "cuda"
    tokens = (args.size // 16) ** 2
    released = known.sized(tokens, None) if on_gpu else known.small().sized(tokens, None)
    mesh, sizes = Mesh.from_env(cfg=1, device=device), parts.Sizes() if on_gpu else parts.SMALL
    case = Case(args, released, mesh, default_dtype(device), parts, sizes)
    about = {"model": released.name, "steps": case.steps, "size": args.size, "strategy": args.strategy}
    measure("pipeline", about, [*ours(case), *theirs(case)], case.mesh, args)


def ours(case: Case) -> Iterator[Row]:
    """Yield diffusers' pipeline after `parallelize`, with our blocks, also as `seqpar sample` runs it, and without."""
    for way in WAYS:
        yield Row("ours", f"parallelize, {way}", partial(_ours, case, way), _reference(case), {"png": "seqpar"})


@contextmanager
def _ours(case: Case, way: str) -> Iterator[Timed]:
    pipe, args = case.around(shared_copy(case.pipe.transformer)), case.args
    mesh = None if args.strategy == "auto" else case.mesh  # a mesh's axes would restrict the planner's choice
    seqpar.parallelize(pipe, mesh, strategy=args.strategy, transport=args.transport, native=way != "generic")
    if way in (FP32, BOUNDARY):
        keep_fp32(pipe)
    boundary = passing(pipe, StepBoundary(case.mesh, lambda: None)) if way == BOUNDARY else nullcontext()
    try:
        with boundary:
            yield _timed(case, pipe, write_png)
    finally:
        seqpar.release(pipe)


def theirs(case: Case) -> Iterator[Row]:
    """Yield diffusers' pipeline with its own engine; on CPUs eager alone."""
    for launch in LAUNCHES if case.mesh.device.type == "cuda" else LAUNCHES[-1:]:
        name = f"{case.engine}, {launch}"
        yield Row("peer", name, partial(_theirs, case, launch), _reference(case), {"png": "image.save"})


def _reference(case: Case) -> Reference | None:
    """Return diffusers' fastest row; on several CPUs it has none, because its context parallelism needs GPUs."""
    on_gpu = case.mesh.device.type == "cuda"
    if not on_gpu and case.mesh.world.size > 1:
        return None
    launch = LAUNCHES[0] if on_gpu else LAUNCHES[-1]
    return Reference(f"{case.engine}, {launch}", partial(_theirs, case, launch))


@contextmanager
def _theirs(case: Case, launch: str) -> Iterator[Timed]:
    twin = engine(case.pipe.transformer, case.engine, case.ranks, case.mesh.device, case.dtype)
    if "compiled" in launch:
        compile_blocks(twin)
    if "graph" in launch:
        twin.forward = Graphed(twin.forward)
    yield _timed(case, case.around(twin), lambda image, file: image.save(file, format="PNG"))


def _timed(case: Case, pipe: Any, write: Writer) -> Timed:
    """Return a row that makes pictures; its line has the median ms of each part, and how far its latents are."""
    every: list[dict[str, float]] = []
    latents: list[Tensor] = []

    def ms(calls: int) -> float:
        whole = 0.0
        for _ in range(calls):
            parts, made = picture(case, pipe, write, f"{len(every)} houses by the sea")
            every.append(parts)
            latents[len(latents) :] = [made] if not latents else []
            whole += sum(parts.values())
        return whole / calls

    def facts() -> Line:
        timed = every[2:]  # those of the rounds
        case.first[len(case.first) :] = latents if not case.first else []
        parts = {part: sorted(each[part] for each in timed)[len(timed) // 2] for part in timed[0]}
        away = float((latents[0].double() - case.first[0].double()).norm() / case.first[0].double().norm())
        return {"parts_ms": parts, "ms_a_step": parts["steps"] / case.steps, "difference": away}

    return Timed(ms, facts)


class Clock:
    """Takes the time of parts on this rank; every part ends when all ranks have ended it."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh, self.ms = mesh, {}
        self._before = self._now()

    def _now(self) -> float:
        if self._mesh.device.type == "cuda":
            torch.cuda.synchronize()
        self._mesh.collect(None, None)
        return time.perf_counter()

    def ends(self, part: str) -> None:
        """Note the ms since the last part ended."""
        now = self._now()
        self.ms[part] = 1e3 * (now - self._before)
        self._before = now


@torch.no_grad()
def picture(case: Case, pipe: Any, write: Writer, prompt: str) -> tuple[dict[str, float], Tensor]:
    """Make a picture with diffusers' pipeline; return ms by part, and its latents."""
    size, clock = case.args.size, Clock(case.mesh)
    arguments = case.parts.encoded(pipe, prompt, case.released.text)
    clock.ends("encode")
    packed = pipe(
        **arguments,
        height=size,
        width=size,
        num_inference_steps=case.steps,
        generator=torch.Generator().manual_seed(0),
        output_type="latent",
    ).images
    clock.ends("steps")
    decoded, latents = case.parts.decoded(pipe, packed, size)
    (image,) = pipe.image_processor.postprocess(decoded, output_type="pil")
    clock.ends("decode")
    if case.mesh.is_main:
        write(image, io.BytesIO())
    clock.ends("png")
    return clock.ms, latents
