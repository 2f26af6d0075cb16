"""Seconds from a prompt to a PNG with FLUX.1, by part: our own loop, the adapter, and diffusers' pipeline.

    for n in 1 2; do torchrun --nproc_per_node=$n launch/bench.py pipeline --model flux.1-dev --out lines.jsonl; done

All parts have their released sizes and random weights (`launch/baselines/flux_pipeline.py`), so no checkpoint is
needed. Every row makes a first picture (compilation, captures), and then pictures in turn with the other rows
(A B C A B C). Encoders and decoder stay on the GPU in all rows. The slowest rank counts. Our rows write the PNG as our
command does, diffusers' rows as users of diffusers do, by `image.save`; each line names its writer.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from launch.baselines.flux_pipeline import SCHEDULER, Sizes, pipeline
from launch.baselines.transformers import Graphed, compile_blocks, device_mesh, engine, parallels, shared_copy
from launch.benches.calls import REFUSALS
from launch.benches.released import RELEASED, Released
from launch.benches.timing import append, attempt, command, environment, slowest
from seqpar import mesh as meshes
from seqpar.mesh import Mesh

PARTS = ("encode", "steps", "decode", "png")
GUIDANCE = 3.5
Line = dict[str, Any]


@dataclass(frozen=True)
class Pipeline:
    """Time whole pictures, from a prompt to a PNG."""

    model: str = "flux.1-dev"
    """The pipeline; its weights are random."""
    steps: int = 28
    """Number of denoising steps."""
    size: int = 1024
    """Height and width of the picture in pixels."""
    strategy: str = "auto"
    """Strategy of our rows."""
    transport: str = "auto"
    """Transport of our rows."""
    only: tuple[str, ...] = ()
    """Time only rows whose name contains one of these words (own, adapter, diffusers, Ulysses, graph ...)."""
    rounds: int = 3
    """Number of pictures of each row after its first."""
    minutes: float = 9.0
    """Nothing new is started after this time."""
    out: Path | None = None
    """Append JSON lines here."""


@dataclass(frozen=True)
class Case:
    """What all rows share. released: the transformer; sizes: the other parts."""

    args: Pipeline
    released: Released
    mesh: Mesh
    dtype: torch.dtype
    sizes: Sizes = field(default_factory=Sizes)

    @property
    def chosen(self) -> Mesh | None:
        """Return the mesh of our rows; None leaves it to the planner, whose choice a mesh's axes restrict."""
        return None if self.args.strategy == "auto" else self.mesh

    @cached_property
    def pipe(self) -> Any:
        """Return diffusers' pipeline; rows share its encoders and decoder."""
        return pipeline(self.released.build(self.dtype, self.mesh.device), self.dtype, self.mesh.device, self.sizes)

    def around(self, transformer: Any) -> Any:
        """Return diffusers' pipeline with the same parts around another transformer; `parallelize` changes decoders."""
        others = {"transformer": transformer, "vae": shared_copy(self.pipe.vae)}
        made = type(self.pipe)(**{**self.pipe.components, **others})
        made.set_progress_bar_config(disable=True)
        return made


@dataclass(frozen=True)
class Row:
    """A way to make a picture of a prompt; it returns ms by part, and the picture's latents."""

    kind: str
    name: str
    ready: Callable[[], AbstractContextManager[Callable[[str], tuple[dict[str, float], Tensor]]]]

    @property
    def writer(self) -> str:
        """Return what writes the PNG."""
        return "image.save" if self.kind == "peer" else "seqpar"


class Clock:
    """Takes the time of parts on this rank; every part ends when all ranks have ended it."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh, self.ms = mesh, {}
        self._before = self._now()

    def _now(self) -> float:
        if self._mesh.device.type == "cuda":
            torch.cuda.synchronize()
        self._mesh.collect(None)
        return time.perf_counter()

    def ends(self, part: str) -> None:
        """Note the ms since the last part ended."""
        now = self._now()
        self.ms[part] = 1e3 * (now - self._before)
        self._before = now


def main(args: Pipeline) -> None:
    """Measure all rows and print a table on rank 0."""
    if args.model != "flux.1-dev":
        raise ValueError(f"got --model {args.model}, expected flux.1-dev: no other pipeline is made here yet")
    _, world = meshes.join()
    device = meshes.pick_device(world)
    side = args.size // 16
    released = RELEASED[args.model].sized(side * side, None)
    case = Case(args, released, Mesh.from_env(cfg=1, device=device), meshes.default_dtype(device))
    rows = [*own(case), *adapters(case), *theirs(case)]
    measure(case, [row for row in rows if any(word in row.name for word in args.only or ("",))])


def measure(case: Case, rows: Sequence[Row]) -> list[Line]:
    """Make first pictures of all rows, then rounds of pictures; append and print a line for each row."""
    mesh, until = case.mesh, time.monotonic() + 60 * case.args.minutes
    makers: dict[str, Callable[[str], tuple[dict[str, float], Tensor]]] = {}
    lines: dict[str, Line] = {row.name: {"refused": "left out: --minutes are over"} for row in rows}
    times: dict[str, list[dict[str, float]]] = {row.name: [] for row in rows}
    latents: dict[str, Tensor] = {}
    with ExitStack() as stack:
        for row in rows:
            if mesh.share(time.monotonic() > until):
                break
            begun = time.perf_counter()
            maker, why = attempt(lambda row=row: _first(stack, row), mesh, *REFUSALS)
            if maker is None:
                lines[row.name] = {"refused": why}
            else:
                makers[row.name], lines[row.name] = maker, {"first_s": time.perf_counter() - begun}
            if mesh.is_main:
                print(f"{row.name}: {why or f'first picture after {time.perf_counter() - begun:.1f} s'}", flush=True)
        for index in range(case.args.rounds):
            for name, maker in makers.items():
                if not mesh.share(time.monotonic() > until):
                    ms, latents[name] = maker(f"{index} houses by the sea")
                    times[name].append(ms)
    made = [_line(case, row, lines[row.name], times[row.name], latents) for row in rows]
    if mesh.is_main:
        append(made, case.args.out)
        print("\n".join(map(shown, made)), flush=True)
    return made


def _first(stack: ExitStack, row: Row) -> Callable[[str], tuple[dict[str, float], Tensor]]:
    """Set a row up, and make its first picture."""
    maker = stack.enter_context(row.ready())
    maker("a first picture")
    return maker


def _line(case: Case, row: Row, made: Line, times: Sequence[dict[str, float]], latents: dict[str, Tensor]) -> Line:
    """Return the JSON line of a row: ms of the whole picture, and of each part."""
    args, mesh = case.args, case.mesh
    about = {"model": args.model, "steps": args.steps, "size": args.size, "kind": row.kind, "way": row.name}
    about |= {"strategy": args.strategy, "png": row.writer}
    line: Line = {"bench": "pipeline", "case": about, "gpus": mesh.world.size, "ms": None, **made}
    if times:
        parts = {part: [ms[part] for ms in times] for part in PARTS} | {"all": [sum(ms.values()) for ms in times]}
        found = slowest(parts, mesh)
        line |= {"ms": found.pop("all"), "parts_ms": found, "ms_a_step": found["steps"]["median"] / args.steps}
        line.pop("refused", None)
    first = next((x for name, x in latents.items() if name.startswith("diffusers")), None)
    if first is not None and row.name in latents:
        line["difference"] = float((latents[row.name].double() - first.double()).norm() / first.double().norm())
    return line | {"command": command(), "env": environment(mesh.device)}


def shown(line: Line) -> str:
    """Return one line of the table."""
    name, ms = line["case"]["way"], line["ms"]
    if ms is None:
        return f"{name:<48} {line.get('refused', 'left out: --minutes are over')}"
    parts = ", ".join(f"{part} {1e-3 * each['median']:.3f}" for part, each in line["parts_ms"].items())
    told = f"{name:<48} {1e-3 * ms['median']:7.3f} s ({1e-3 * ms['min']:.3f} - {1e-3 * ms['max']:.3f}): {parts}"
    told += f" by {line['case']['png']}; {line['ms_a_step']:.1f} ms a step; first picture after {line['first_s']:.1f} s"
    return told + (f"; latents differ by {line['difference']:.1e}" if "difference" in line else "")


# Rows -------------------------------------------------------------------------------------------------------------


def own(case: Case) -> Iterator[Row]:
    """Yield our own loop."""
    yield Row("ours", "own loop", partial(_own, case))


@contextmanager
def _own(case: Case) -> Iterator[Callable[[str], tuple[dict[str, float], Tensor]]]:
    from seqpar.distributed import DistributedDiT
    from seqpar.pipelines import flux
    from seqpar.pipelines._flux_text import Texts
    from seqpar.pipelines._pictures import write_png
    from seqpar.sampling.guidance import Guidance
    from seqpar.weights.find import from_diffusers

    args, pipe, mesh = case.args, case.pipe, case.mesh
    scheduling = {"_class_name": "FlowMatchEulerDiscreteScheduler", **SCHEDULER}
    blueprint = from_diffusers(pipe.transformer)
    files = flux.Files(blueprint, None, pipe.vae.config, scheduling, case.released.text)
    model = blueprint.build(case.dtype, mesh.device)
    dit = DistributedDiT(model, case.chosen, args.strategy, transport=args.transport)
    if mesh.is_main:
        print(f"own loop: {dit.plan}, transport {dit.transport}", flush=True)
    texts = Texts(pipe, blueprint.config, case.released.text, mesh, case.dtype)

    def picture(prompt: str) -> tuple[dict[str, float], Tensor]:
        clock = Clock(mesh)
        texts.encode([prompt])
        clock.ends("encode")
        embedded = Guidance(1.0, embedded=GUIDANCE) if blueprint.config.guidance_embeds else Guidance(1.0)
        latents = maker.latents([prompt], steps=args.steps, guidance=embedded, size=(args.size, args.size))
        clock.ends("steps")
        images = flux.to_pil(maker.decode(latents))
        clock.ends("decode")
        if mesh.is_main:
            write_png(images[0], io.BytesIO())
        clock.ends("png")
        return clock.ms, latents

    with flux.Pipeline(dit, files, pipe.vae, texts) as maker:
        yield picture


def adapters(case: Case) -> Iterator[Row]:
    """Yield diffusers' pipeline after `parallelize`, with our model and with diffusers' modules inside."""
    for native in (True, False):
        yield Row("ours", f"adapter, {'native' if native else 'generic'}", partial(_adapter, case, native))


@contextmanager
def _adapter(case: Case, native: bool) -> Iterator[Callable[[str], tuple[dict[str, float], Tensor]]]:
    from seqpar.adapter.parallelize import parallelize, release
    from seqpar.pipelines._pictures import write_png

    # weights of its own, because ours join those of diffusers in place, and other rows' graphs read them
    pipe = case.around(deepcopy(case.pipe.transformer))
    parallelize(pipe, case.chosen, strategy=case.args.strategy, transport=case.args.transport, native=native)
    try:
        yield partial(_their_picture, case, pipe, write_png)
    finally:
        release(pipe)


def theirs(case: Case) -> Iterator[Row]:
    """Yield diffusers' pipeline with its own engine: compiled blocks in a CUDA graph, compiled blocks, eager."""
    on_gpu, counts = case.mesh.device.type == "cuda", (case.released.tokens, *case.released.others)
    for parallel in parallels(case.mesh.world.size, counts, case.released.work.heads)[:1]:
        for launch in ("compiled blocks + graph", "compiled blocks", "eager") if on_gpu else ("eager",):
            yield Row("peer", f"{parallel.name}, {launch}", partial(_theirs, case, parallel, launch))


@contextmanager
def _theirs(case: Case, parallel: Any, launch: str) -> Iterator[Callable[[str], tuple[dict[str, float], Tensor]]]:
    ranks = device_mesh(parallel, case.mesh)
    twin = engine(case.pipe.transformer, parallel, ranks, case.mesh.device)
    if "compiled" in launch:
        compile_blocks(twin)
    if "graph" in launch:
        twin.forward = Graphed(twin.forward)
    yield partial(_their_picture, case, case.around(twin), lambda image, file: image.save(file, format="PNG"))


@torch.no_grad()
def _their_picture(
    case: Case, pipe: Any, write: Callable[[Any, IO[bytes]], object], prompt: str
) -> tuple[dict[str, float], Tensor]:
    """Make a picture with diffusers' pipeline; return ms by part, and its latents as (N, C, h, w)."""
    args, device, clock = case.args, case.mesh.device, Clock(case.mesh)
    text, pooled, _ = pipe.encode_prompt(prompt, None, device=device, max_sequence_length=case.released.text)
    clock.ends("encode")
    packed = pipe(
        prompt_embeds=text,
        pooled_prompt_embeds=pooled,
        height=args.size,
        width=args.size,
        num_inference_steps=args.steps,
        guidance_scale=GUIDANCE,
        generator=torch.Generator().manual_seed(0),
        output_type="latent",
    ).images
    clock.ends("steps")
    latents = pipe._unpack_latents(packed, args.size, args.size, pipe.vae_scale_factor)
    config = pipe.vae.config
    decoded = pipe.vae.decode(latents / config.scaling_factor + config.shift_factor, return_dict=False)[0]
    (image,) = pipe.image_processor.postprocess(decoded, output_type="pil")
    clock.ends("decode")
    if case.mesh.is_main:
        write(image, io.BytesIO())
    clock.ends("png")
    return clock.ms, latents
