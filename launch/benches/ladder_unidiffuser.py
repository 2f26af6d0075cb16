"""UniDiffuser from diffusers' fp32 pipeline to the engine, one optimisation at a time: a step, and a picture by part.

    for n in 1 2; do torchrun --nproc_per_node=$n launch/bench.py ladder-uni-diffuser --out lines.jsonl; done

The rungs on one GPU are diffusers' pipeline in fp32, in half precision, its model with both guidance branches in one
batch, the same in a CUDA graph, and our own loop: fused kernels, the whole step in one graph. On two GPUs our loop
splits the branches (cfg=2) or the tokens (ulysses=2). A step is timed alone, beside its *ceiling* (the same matrix
products by cuBLAS and the same attention in one graph), and a picture from prompt to PNG by part. Weights are random at
the released sizes (`launch/baselines/unidiffuser_pipeline.py`). The slowest rank counts.
"""

from __future__ import annotations

import io
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from launch.baselines.transformers import Graphed
from launch.baselines.unidiffuser_pipeline import SCHEDULER, Sizes, branches, in_dtype, merged, pipeline
from launch.benches.ceiling import ceiling, flops_and_weights, roofline, share
from launch.benches.pictures import Clock
from launch.benches.split import split_of
from launch.benches.timing import append, command, elapsed, environment, graphed, slowest
from seqpar import mesh as meshes
from seqpar.distributed import DistributedDiT
from seqpar.mesh import Mesh
from seqpar.pipelines import unidiffuser
from seqpar.pipelines._pictures import to_pil, write_png
from seqpar.planner.plan import work_of
from seqpar.sampling.guidance import Guidance
from seqpar.sampling.request import Request
from seqpar.sampling.run import Run, begin
from seqpar.weights.find import from_diffusers

PARTS = ("encode", "steps", "decode", "png")
GUIDANCE = 8.0
OURS = "ours: kernels + graph"
Line = dict[str, Any]
Way = Callable[[], object]
Picture = Callable[[str], tuple[dict[str, float], Tensor]]


@dataclass(frozen=True)
class LadderUniDiffuser:
    """Time UniDiffuser from diffusers' fp32 pipeline to our loop: a step, and whole pictures of 512 x 512 pixels."""

    steps: int = 50
    """Number of denoising steps."""
    rounds: int = 3
    """Number of rounds; each round times every way once."""
    repeat: int = 50
    """Number of steps that one way runs in a round; diffusers' ways run a tenth of it."""
    transport: str = "auto"
    """Transport of our rows on several GPUs."""
    seconds: float = 150.0
    """No round is started after this time."""
    out: Path | None = None
    """Append JSON lines here."""


@dataclass(frozen=True)
class Case:
    """What all ways share."""

    args: LadderUniDiffuser
    device: torch.device
    dtype: torch.dtype
    sizes: Sizes = field(default_factory=Sizes)
    begun: float = field(default_factory=time.monotonic)

    @cached_property
    def wide(self) -> Any:
        """Return diffusers' pipeline in fp32."""
        return pipeline(self.sizes, self.device)

    @cached_property
    def half(self) -> Any:
        """Return diffusers' pipeline in half precision (fp32 on a CPU); our rows share its encoder and decoder."""
        return in_dtype(self.wide, self.dtype)

    @property
    def late(self) -> bool:
        """Return whether the time is over."""
        return time.monotonic() - self.begun > self.args.seconds


def main(args: LadderUniDiffuser) -> None:
    """Measure steps and pictures, print a table on rank 0, append the lines."""
    _, world = meshes.join()
    device = meshes.pick_device(world)
    measure(Case(args, device, meshes.default_dtype(device)))


@torch.no_grad()
def measure(case: Case) -> list[Line]:
    """Return, print and append the lines of all ways."""
    world = Mesh.joined(case.device)
    found = [Engine(case, mesh, strategy) for mesh, strategy in _layouts(world)]
    lines = [*steps(case, world, found), *pictures(case, world, found)]
    for engine in found:
        engine.dit.release()
    lines = [{"bench": "ladder_unidiffuser", **line, **_about(case, world)} for line in lines]
    if world.is_main:
        append(lines, case.args.out)
        print("\n".join(map(shown, lines)), flush=True)
    return lines


def _layouts(world: Mesh) -> Iterator[tuple[Mesh, str]]:
    """Yield the mesh and the strategy of each of our rows."""
    if world.world.size == 1:
        yield Mesh.single(world.device), "ulysses"
        return
    count = world.world.size
    if count % 2 == 0:
        yield Mesh.from_env(cfg=2, ulysses=count // 2, device=world.device), "ulysses"
    yield Mesh.from_env(cfg=1, ulysses=count, device=world.device), "ulysses"


def _about(case: Case, world: Mesh) -> Line:
    return {"gpus": world.world.size, "command": command(), "env": environment(case.device)}


# Our own loop -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Engine:
    """Our model on one mesh."""

    case: Case
    mesh: Mesh
    strategy: str

    @property
    def name(self) -> str:
        """Return the name of the row."""
        sizes = ", ".join(f"{axis}={size}" for axis, size in self.mesh.sizes.items() if size > 1)
        return OURS + (f", {sizes}" if sizes else "")

    @cached_property
    def dit(self) -> DistributedDiT:
        """Return the sharded model, with a copy of diffusers' weights."""
        model = from_diffusers(self.case.half.unet).build(self.case.dtype, self.case.device)
        alone = self.mesh.sequence.size * self.mesh.cfg.size == 1
        transport = "auto" if alone else self.case.args.transport
        return DistributedDiT(model, self.mesh, self.strategy, transport=transport)

    @cached_property
    def maker(self) -> unidiffuser.Pipeline:
        """Return our pipeline around the model, with diffusers' encoder and decoder."""
        pipe = self.case.half
        scheduling = {"_class_name": "DPMSolverMultistepScheduler", **SCHEDULER}
        files = unidiffuser.Files(from_diffusers(pipe.unet), pipe, pipe.vae.config, scheduling)
        texts = unidiffuser.Pipeline.texts_of(files, self.mesh, self.case.dtype)
        return unidiffuser.Pipeline(self.dit, files, pipe.vae, texts)

    def run(self) -> Run:
        """Return a run from noise, without a graph."""
        config, count, steps = self.dit.config, 1, self.case.args.steps
        drawn = torch.Generator().manual_seed(0)
        size = (config.sample_size, config.sample_size)
        image = torch.randn(count, config.in_channels, *size, generator=drawn)
        clip = torch.randn(count, 1, config.clip_width, generator=drawn)
        texts = (torch.randn(steps, count, config.text_tokens, config.text_width, generator=drawn) for _ in range(2))
        text, negative = ({"text": each} for each in texts)
        prompt = {name: torch.full((count,), int(name == "data_type")) for name in self.dit.model.PROMPT}
        scheduler, guidance = self.maker.files.scheduler(None), Guidance(GUIDANCE)
        given = {"image": image, "clip": clip}
        return begin(self.dit, Request(scheduler, given, prompt, steps, guidance, drawn=text, negative_drawn=negative))

    def step(self, graph: bool) -> tuple[Way, Run]:
        """Return a function that runs a step, and its run."""
        run, done = self.run(), itertools.count()
        if graph:
            run.capture()

        def step() -> None:
            if next(done) % self.case.args.steps == 0:
                run.rewind()
            run.step()

        return step, run

    def picture(self, prompt: str) -> tuple[dict[str, float], Tensor]:
        """Make a picture; return ms by part, and its latents."""
        clock, made = Clock(self.mesh), self.maker
        made.texts.encode([prompt])
        clock.ends("encode")
        latents = made.latents([prompt], steps=self.case.args.steps, guidance=Guidance(GUIDANCE))
        clock.ends("steps")
        images = made.decode(latents)
        clock.ends("decode")
        if self.mesh.is_main:
            write_png(to_pil(images)[0], io.BytesIO())
        clock.ends("png")
        return clock.ms, latents


# Steps ------------------------------------------------------------------------------------------------------------


def steps(case: Case, world: Mesh, engines: list[Engine]) -> list[Line]:
    """Return a line for each way to compute a step: both branches; ours with guidance and the scheduler's update."""
    ways: dict[str, Way] = {}
    runs: list[Run] = []
    on_gpu = case.device.type == "cuda"
    if world.world.size == 1:
        ways |= _their_steps(case)
        ways["ours: kernels, eager"] = engines[0].step(False)[0]
    for engine in engines:
        work, config, name = work_of(engine.dit.config), engine.dit.config, engine.name
        tokens = (config.sample_size // config.patch_size) ** 2
        if on_gpu:
            ways[name], run = engine.step(True)
            runs.append(run)
        elif world.world.size > 1:
            ways[name] = engine.step(False)[0]
        mine = share(work, tokens, engine.strategy, engine.mesh, others=work.joined)
        alone = ceiling(work, mine, engine.dit.local.name, case.dtype, case.device)
        ways[f"ceiling of {name}"] = graphed(alone) if on_gpu else alone
    times = _timed(case, world, ways)
    traced = {engine.name: split_of(ways[engine.name], 20) for engine in engines} if on_gpu else {}
    for run in runs:
        run.release()
    return [_step_line(name, ms, times, traced, engines[0]) for name, ms in times.items()]


def _step_line(
    name: str, ms: Mapping[str, float], times: Mapping[str, Any], traced: Mapping[str, Any], engine: Engine
) -> Line:
    """Return the line of a way to compute a step, beside the ceiling and the roofline."""
    bound = times.get(f"ceiling of {name}") or times.get(f"ceiling of {OURS}")
    work, config = work_of(engine.dit.config), engine.dit.config
    flops, weights = flops_and_weights(work, (config.sample_size // config.patch_size) ** 2, others=work.joined)
    line: Line = {"case": {"what": "step", "way": name}, "ms": dict(ms), "roofline_ms": roofline(flops, weights)}
    line |= {"ceiling_ms": bound["median"]} if bound else {}
    return line | ({"split_ms": traced[name]} if traced.get(name) else {})


def _their_steps(case: Case) -> dict[str, Way]:
    """Return diffusers' two calls of a step in fp32 and in half precision, and its merged call, also in a graph."""
    made: dict[str, Way] = {}
    for pipe, precision in ((case.wide, "fp32"), (case.half, "half precision")):
        given = _arguments(case, pipe)
        halves = [{name: x.chunk(2)[index] for name, x in given.items()} for index in range(2)]
        made[f"diffusers, {precision}"] = partial(_calls, pipe.unet, halves)
    merged_call = partial(_calls, case.half.unet, [_arguments(case, case.half)])
    made["diffusers, branches merged"] = merged_call
    if case.device.type == "cuda":
        made["diffusers, branches merged, graph"] = graphed(merged_call)
    return made


def _calls(unet: Any, arguments: list[dict[str, Tensor]]) -> list[Any]:
    return [unet(**given) for given in arguments]


def _arguments(case: Case, pipe: Any) -> dict[str, Tensor]:
    """Return random arguments of diffusers' model for both branches."""
    config, drawn, dtype = pipe.unet.config, torch.Generator().manual_seed(0), pipe.unet.dtype

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=drawn).to(case.device, dtype)

    parts = random(1, config.in_channels, config.sample_size, config.sample_size), random(1, 1, config.clip_img_dim)
    text = random(2, config.num_text_tokens, config.text_dim)
    return branches(parts, text, torch.full((1,), 500, device=case.device), 1)


def _timed(case: Case, world: Mesh, ways: Mapping[str, Way]) -> dict[str, dict[str, float]]:
    """Return the ms of each way over rounds in turn; eager ways run fewer times."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(case.args.rounds):
        for name, way in ways.items():
            repeat = case.args.repeat if name.startswith(("ours", "ceiling")) else max(1, case.args.repeat // 10)
            times[name].append(elapsed(way, repeat, case.device))
    return slowest(times, world)


# Pictures ---------------------------------------------------------------------------------------------------------


def pictures(case: Case, world: Mesh, engines: list[Engine]) -> list[Line]:
    """Return a line for each way to make a picture: ms of the whole, and by part."""
    makers = (_their_makers(case, world) if world.world.size == 1 else {}) | {
        each.name: each.picture for each in engines
    }
    first = {name: _seconds(partial(maker, "a first picture")) for name, maker in makers.items()}
    times: dict[str, list[dict[str, float]]] = {name: [] for name in makers}
    latents: dict[str, Tensor] = {}
    for index in range(case.args.rounds):
        for name, maker in makers.items():
            if index == 0 or not world.share(case.late, bool):
                ms, made = maker(_prompt(index))
                times[name].append(ms)
                latents.setdefault(name, made)  # all ways have made the picture of the first round
    for engine in engines:
        engine.maker.release()
    # noise is drawn in the dtype of the model, and bf16 draws other numbers than fp32 from one seed
    truth = latents.get("diffusers, half precision", next(iter(latents.values())))
    if world.world.size > 1:
        truth = _theirs(case, world, merged(case.half), _prompt(0))[1]
    return [
        _picture_line(case, world, name, times[name], {"first_s": first[name], "difference": _far(x, truth)})
        for name, x in latents.items()
    ]


def _their_makers(case: Case, world: Mesh) -> dict[str, Picture]:
    """Return diffusers' pipelines."""
    pipes = {"fp32": case.wide, "half precision": case.half, "branches merged": merged(case.half)}
    if case.device.type == "cuda":
        pipes["branches merged, graph"] = merged(case.half, Graphed(case.half.unet.forward))
    return {f"diffusers, {name}": partial(_theirs, case, world, pipe) for name, pipe in pipes.items()}


def _prompt(index: int) -> str:
    """Return the text of a round's picture; every round has its own, because ours keep the last text's tokens."""
    return f"{index} houses by the sea"


def _picture_line(case: Case, world: Mesh, name: str, times: list[dict[str, float]], more: Line) -> Line:
    parts = {part: [ms[part] for ms in times] for part in PARTS} | {"all": [sum(ms.values()) for ms in times]}
    found = slowest(parts, world)
    line: Line = {"case": {"what": "picture", "way": name, "steps": case.args.steps}, "ms": found.pop("all")}
    return line | {"parts_ms": found, "ms_a_step": found["steps"]["median"] / case.args.steps, **more}


def _seconds(work: Way) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def _far(x: Tensor, truth: Tensor) -> float:
    """Return the relative distance of latents to diffusers': in fp32 on one GPU, in half precision on several."""
    return float((x.double().cpu() - truth.double().cpu()).norm() / truth.double().cpu().norm())


def _theirs(case: Case, world: Mesh, pipe: Any, prompt: str) -> tuple[dict[str, float], Tensor]:
    """Make a picture with diffusers' pipeline; return ms by part, and its latents.

    The clock is read when the pipeline has encoded its prompt, and before and after it decodes.
    """
    clock, kept = Clock(world), dict[str, Tensor]()
    encode, decode = type(pipe).encode_prompt, type(pipe.vae).decode

    def encoded(*given: Any, **named: Any) -> Any:
        made = encode(pipe, *given, **named)
        clock.ends("encode")
        return made

    def decoded(latents: Tensor, **named: Any) -> Any:
        kept["latents"] = latents * pipe.vae.config.scaling_factor
        clock.ends("steps")
        made = decode(pipe.vae, latents, **named)
        clock.ends("decode")
        return made

    pipe.encode_prompt, pipe.vae.decode = encoded, decoded
    try:
        settings = {"num_inference_steps": case.args.steps, "guidance_scale": GUIDANCE}
        made = pipe(prompt=prompt, generator=torch.Generator().manual_seed(0), **settings)
    finally:
        del pipe.encode_prompt, pipe.vae.decode
    made.images[0].save(io.BytesIO(), format="PNG")
    clock.ends("png")
    return clock.ms, kept["latents"]


def shown(line: Line) -> str:
    """Return one line of the table."""
    case, ms = line["case"], line["ms"]
    told = f"{case['what']:<8}{case['way']:<48}{ms['median']:10.3f} ms ({ms['min']:.3f} - {ms['max']:.3f})"
    if case["what"] == "step":
        told += f"  {ms['median'] / line['ceiling_ms']:.3f} x ceiling" if "ceiling_ms" in line else ""
        split = line.get("split_ms") or {}
        return told + "".join(f", {kind} {each:.2f}" for kind, each in split.items())
    told += ": " + ", ".join(f"{part} {each['median']:.1f}" for part, each in line["parts_ms"].items())
    return told + f"; {line['ms_a_step']:.2f} ms a step; latents differ by {line['difference']:.1e}"
