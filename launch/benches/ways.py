"""Ways of computing a step that `launch/bench.py scale` times: our layouts, other engines, and our layouts' ceilings.

Each way is set up, used and freed on its own (`Way.ready`), because all of them with their CUDA graphs would not fit in
memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from math import isqrt
from typing import Any

import torch
from diffusers.schedulers.scheduling_ddim import DDIMScheduler
from torch import nn

from launch.baselines.engines import DeviceMeshes, OtherEngine, device_meshes, other_engines, other_step, with_core
from launch.baselines.plain import plain_model
from launch.benches.ceiling import ceiling, share
from launch.benches.steps import GUIDANCE, Layout, named
from launch.benches.timing import attempt, graphed
from seqpar.engine.distributed import DistributedDiT
from seqpar.mesh import Mesh
from seqpar.pipelines.class_labels import DDIM_DEFAULT
from seqpar.planner.plan import choose_local, load_local, work_of
from seqpar.protocols import SequenceModel
from seqpar.sampling.loop import check_finite, digest, draw_noise
from seqpar.sampling.request import Request
from seqpar.sampling.run import Run, begin
from seqpar.transports import _folder

RUN_STEPS = 25


@dataclass(frozen=True)
class Ready:
    """A way that is set up.

    step: computes one step. before, after: are called before and after many steps. bits: returns the digest of the
    first picture's latents; call it once, before any step.
    """

    step: Callable[[], object]
    bits: Callable[[], str | None] = lambda: None
    before: Callable[[], object] = lambda: None
    after: Callable[[], object] = lambda: None


@dataclass(frozen=True)
class Way:
    """A way of computing a step.

    kind: "ours", "peer" (another engine) or "ceiling". weights: bytes of the model's weights. case: the facts about it
    that its JSON line repeats.
    """

    kind: str
    name: str
    ready: Callable[[], AbstractContextManager[Ready]]
    weights: int = 0
    images: int = 1
    case: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Bench:
    """What all token counts share. engines: the model for each layout and transport, or the reason for none."""

    mesh: Mesh
    model: SequenceModel
    plain: nn.Module
    device_meshes: DeviceMeshes
    engines: Mapping[tuple[Layout, str], DistributedDiT | str]
    local: str


def make_bench(model: SequenceModel, chosen: Sequence[Layout], local: str, device: torch.device) -> Bench:
    """Make the meshes, engines and plain model once, because creating communicators is slow."""
    world, config = Mesh.from_env(cfg=1, device=device), model.config
    dtype = next(model.parameters()).dtype
    made: dict[tuple[int, ...], Mesh] = {}
    engines: dict[tuple[Layout, str], DistributedDiT | str] = {}
    for layout in chosen:
        axes = (layout.data, layout.cfg, layout.ring, layout.ulysses)
        mesh = made[axes] = made.get(axes) or Mesh.from_env(*axes, device=device)
        alone = _folder.unasked(mesh.device.type)[-1:]
        for transport in _folder.names() if mesh.sequence.size > 1 else alone:
            build = partial(DistributedDiT, model, mesh, layout.strategy, local, transport)
            engine, why = attempt(build, world, ValueError)
            engines[layout, transport] = str(why) if engine is None else engine
    found = choose_local(local, device, dtype, config.attention_head_dim).name
    plain = plain_model(config, config.sample_size, dtype, device)
    return Bench(world, model, plain, device_meshes(world), engines, found)


def data_layouts(world: int) -> list[Layout]:
    """Return a layout for each number of pictures at once; its cfg axis splits the guidance branches if it can."""
    counts = [count for count in range(2, world + 1) if world % count == 0]
    rests = [(count, world // count) for count in counts]
    axes = [(count, 2 - rest % 2, rest // (2 - rest % 2)) for count, rest in rests]
    return [Layout(named(1, ulysses)[0], cfg, 1, ulysses, count) for count, cfg, ulysses in axes]


def size_of(tokens: int, patch: int) -> tuple[int, int]:
    """Return height and width of the latent with this number of tokens that is closest to a square."""
    rows = next(rows for rows in range(isqrt(tokens), 0, -1) if tokens % rows == 0)
    return rows * patch, tokens // rows * patch


def all_ways(bench: Bench, tokens: int, digest_steps: int, others: bool, compiled: bool) -> list[Way]:
    """Return our ways, their ceilings and other engines; these come last with graphs, whose capture may fail."""
    size = size_of(tokens, bench.model.config.patch_size)
    return [
        *_ours(bench, size, digest_steps),
        *_ceilings(bench, tokens),
        *(_others(bench, tokens, size, compiled) if others else ()),
    ]


def _ours(bench: Bench, size: tuple[int, int], digest_steps: int) -> Iterator[Way]:
    for (layout, transport), dit in bench.engines.items():
        case = {"layout": str(layout), "transport": transport, "guidance": "axis" if layout.cfg == 2 else "batched"}
        ready = (
            partial(_refused, dit) if isinstance(dit, str) else partial(engine, dit, size, layout.data, digest_steps)
        )
        yield Way("ours", f"{layout}, {transport}", ready, _bytes(bench.model), layout.data, case)


def _ceilings(bench: Bench, tokens: int) -> Iterator[Way]:
    done = set()
    for (layout, _), dit in bench.engines.items():
        if layout in done or isinstance(dit, str):
            continue
        done.add(layout)
        ready = partial(_ceiling, bench, tokens, layout.strategy, dit.mesh)
        yield Way("ceiling", f"ceiling of {layout}", ready, _bytes(bench.model), layout.data, {"layout": str(layout)})


def _others(bench: Bench, tokens: int, size: tuple[int, int], compiled: bool) -> Iterator[Way]:
    found = other_engines(
        bench.mesh, bench.device_meshes, tokens, bench.model.config.num_attention_heads, load_local(bench.local)
    )
    modes = [
        (other, blocks) for blocks in (False, True) for other in found if not blocks or (compiled and other.compiles)
    ]
    twins = [(other, blocks, with_core(bench.plain, other.core, blocks)) for other, blocks in modes]
    for graph in (False, True) if bench.mesh.device.type == "cuda" else (False,):
        for other, blocks, twin in twins:
            launch = ("compiled blocks" if blocks else "eager", *(["graph"] if graph else []))
            ready = partial(_other, bench, other, twin, size, graph)
            name = f"{other.name}, {' + '.join(launch)}"
            yield Way("peer", name, ready, _bytes(bench.plain), case={"launch": " + ".join(launch)})


@contextmanager
def engine(dit: DistributedDiT, size: tuple[int, int], images: int, digest_steps: int) -> Iterator[Ready]:
    """Set up a run of 25 steps of our engine, in a CUDA graph on GPUs; picture n has seed n in every layout."""
    shape = (1, dit.config.in_channels, *size)
    noise = torch.cat([draw_noise(shape, torch.Generator().manual_seed(seed)) for seed in range(images)])
    labels = {"class_labels": torch.zeros(images, dtype=torch.int64)}
    scheduler = DDIMScheduler.from_config(DDIM_DEFAULT)
    dit.check_size(*size)
    run = begin(dit, Request(scheduler, noise, labels, RUN_STEPS, GUIDANCE))
    try:
        with torch.no_grad():
            if run.why_no_graph is None:
                run.capture()
        yield Ready(
            torch.no_grad()(run.step),
            torch.no_grad()(partial(_bits, dit, run, digest_steps)),
            run.rewind,
            dit.check_delivered,
        )
    finally:
        run.release()
        dit.release()


def _bits(dit: DistributedDiT, run: Run, steps: int) -> str | None:
    if not steps:
        return None
    for _ in range(steps):
        run.step()
    dit.check_delivered()
    latents = run.latents()
    check_finite(run.first_bad(), run.timesteps)
    return digest(latents[:1])


@contextmanager
def _ceiling(bench: Bench, tokens: int, strategy: str, mesh: Mesh) -> Iterator[Ready]:
    work, dtype = work_of(bench.model.config), next(bench.model.parameters()).dtype
    step = ceiling(work, share(work, tokens, strategy, mesh), bench.local, dtype, mesh.device)
    yield Ready(graphed(step) if mesh.device.type == "cuda" else step)


@contextmanager
def _other(bench: Bench, other: OtherEngine, twin: nn.Module, size: tuple[int, int], graph: bool) -> Iterator[Ready]:
    if other.refusal is not None:
        raise ValueError(other.refusal)
    step = other_step(twin, bench.model, size, bench.mesh, GUIDANCE.scale)
    step()  # compile before the graph's warm-up: compiling tunes and loads on a stream of its own
    yield Ready(graphed(step) if graph else step)


@contextmanager
def _refused(why: str) -> Iterator[Ready]:
    raise ValueError(why)
    yield


def _bytes(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())
