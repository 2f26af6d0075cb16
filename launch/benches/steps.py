"""ms per denoising step of models of classes on every layout of the running processes, beside ceilings.

    torchrun --nproc_per_node=2 launch/bench.py steps --model large-dit-7b --tokens 256 4096 --out lines.jsonl

Our rows sample by our own loop, one picture with guidance; a step is timed from the end of the second one to the end of
the last, and the digest is that of the latents after 25 steps: equal digests are equal bits, also between runs with
different numbers of processes. Their reference is the ceiling of their layout: the matrix products and the attention of
one rank alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from math import isqrt

import torch
from diffusers.schedulers.scheduling_ddim import DDIMScheduler
from torch import Tensor

from launch.benches.ceiling import ceiling, share
from launch.benches.rows import Flags, Line, Reference, Row, Timed, measure
from launch.benches.timing import graphed
from seqpar.loop.distributed import DistributedDiT
from seqpar.loop.interface import SequenceModel
from seqpar.loop.loop import Sampler, digest, draw_noise
from seqpar.mesh import exact
from seqpar.mesh.mesh import Mesh, default_dtype
from seqpar.pipelines.classes import DDIM_DEFAULT, Files
from seqpar.planner.costs import strategies
from seqpar.planner.plan import choose_local, work_of
from seqpar.transformer.calibration import Precision
from seqpar.types.guidance import Guidance

GUIDANCE = Guidance(4.0)
DIGEST_STEPS = 25
MIDDLE = 500.0  # timestep of the call whose error is measured
MOST_STEPS = 200  # of a run


@dataclass(frozen=True)
class Steps(Flags):
    """Time a denoising step on every layout of the running processes, beside its ceiling."""

    model: str = "large-dit-7b"
    """A random model, "builtin" or a checkpoint of a model of classes."""
    tokens: tuple[int, ...] = (256, 4096)
    """Square token counts."""
    layouts: tuple[str, ...] = ()
    """Layouts to time, as strategy:cfg:ring (ulysses:2:1); all that fit if none are given."""
    local: str = "auto"
    """Local attention of our layouts and of ceilings."""
    transport: str = "auto"
    """Transport of the exchanges between ranks."""
    precision: Precision | None = None
    """Also time each layout in this precision, beside the weights' own, with the error of a call."""
    graph: bool = True
    """Replay our step as a CUDA graph if that is possible."""
    exact: bool = False
    """Time the exact mode (seqpar/mesh/exact.py), in which the bits of a batch row depend on that row alone."""


@dataclass(frozen=True)
class Layout:
    """A strategy and the axes it runs on."""

    strategy: str
    cfg: int
    ring: int
    ulysses: int

    @property
    def name(self) -> str:
        return f"{self.strategy}:{self.cfg}:{self.ring}"

    def __str__(self) -> str:
        return f"{self.strategy} cfg{self.cfg} ring{self.ring} ulysses{self.ulysses}"


def main(args: Steps) -> None:
    if args.exact:
        exact.turn_on()
    world = Mesh.joined()
    check(args, world.world.size)
    model = Files.locate(args.model).blueprint.build(default_dtype(world.device), world.device)
    for tokens in args.tokens:
        case = Case(args, model, Mesh.from_env(cfg=1, device=world.device), tokens)
        measure("steps", case.about, ours(case), case.mesh, args)
        torch._dynamo.reset()


def check(args: Steps, world: int) -> None:
    for tokens in args.tokens:
        side = isqrt(max(0, tokens))
        if tokens < 1 or side**2 != tokens:
            near = f"{side**2} or {(side + 1) ** 2}" if side else "1"
            raise ValueError(f"got --tokens {tokens}, expected squares: {near}")
    args.check()
    fitting(args.layouts, world)


def fitting(names: Sequence[str], world: int) -> list[Layout]:
    """All layouts of this number of processes, or those named; `ValueError` for a name that does not fit.

    A single rank exchanges nothing, so only one strategy is listed for it.
    """
    every = [
        Layout(strategy, cfg, ring, world // cfg // ring)
        for cfg in ((1, 2) if world % 2 == 0 else (1,))
        for ring in range(1, world // cfg + 1)
        if world // cfg % ring == 0
        for strategy, facts in strategies().items()
        if facts.names(ring, world // cfg // ring)
    ]
    known = [layout.name for layout in every]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"got --layouts {' '.join(unknown)}, expected some of {', '.join(known)}")
    return [layout for layout in every if not names or layout.name in names]


@dataclass(frozen=True)
class Case:
    """A model, a number of tokens and the ranks: what all rows share. mesh: all ranks on one sequence."""

    args: Steps
    model: SequenceModel
    mesh: Mesh
    tokens: int

    @property
    def about(self) -> Line:
        about: Line = {"model": self.args.model, "tokens": self.tokens, "exact": self.args.exact}
        return about | {"dtype": str(self.dtype).removeprefix("torch."), "graph": self.args.graph}

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    @property
    def size(self) -> tuple[int, int]:
        return (isqrt(self.tokens) * self.model.config.patch_size,) * 2

    @cached_property
    def local(self) -> str:
        head_dim = self.model.config.attention_head_dim
        return choose_local(self.args.local, self.mesh.device, self.dtype, head_dim).name

    def mesh_of(self, layout: Layout) -> Mesh:
        return Mesh.from_env(1, layout.cfg, layout.ring, layout.ulysses, device=self.mesh.device)

    def ceiling(self, layout: Layout) -> Reference:
        return Reference(f"ceiling of {layout}", partial(_ceiling, self, layout))


def ours(case: Case) -> Iterator[Row]:
    for layout in fitting(case.args.layouts, case.mesh.world.size):
        about = {"layout": str(layout), "local": case.local, "guidance": "axis" if layout.cfg == 2 else "batched"}
        yield Row("ours", str(layout), partial(_ours, case, layout), case.ceiling(layout), about)
        if (eight := case.args.precision) is not None:
            name, about = f"{layout}, {eight}", about | {"precision": eight}
            yield Row("ours", name, partial(_ours, case, layout, eight), case.ceiling(layout), about)


@contextmanager
def _ours(case: Case, layout: Layout, precision: Precision | None = None) -> Iterator[Timed]:
    names = case.mesh_of(layout), layout.strategy, case.args.local, case.args.transport
    dit = DistributedDiT(case.model, *names, precision=precision)
    noise = draw_noise((1, case.model.config.in_channels, *case.size), torch.Generator().manual_seed(0))
    prompt = {"class_labels": torch.zeros(1, dtype=torch.int64)}
    wait = torch.cuda.synchronize if dit.device.type == "cuda" else lambda: None
    with Sampler(dit, graph=case.args.graph) as sampler:

        def run(steps: int, on_step: Callable[[int], None] = lambda index: None) -> Tensor:
            scheduler = DDIMScheduler.from_config(DDIM_DEFAULT)
            return sampler(scheduler, noise, prompt, steps=steps, guidance=GUIDANCE, on_step=on_step)

        def ms(calls: int) -> float:
            moments, steps = list[float](), min(calls, MOST_STEPS)

            def on_step(index: int) -> None:
                if index in (1, steps + 1):
                    wait()
                    moments.append(time.perf_counter())

            run(steps + 2, on_step)
            return 1e3 * (moments[1] - moments[0]) / steps

        facts: Line = {"digest": digest(run(DIGEST_STEPS)), "transport": dit.transport.name}
        if precision is not None:
            plain = DistributedDiT(case.model, *names)
            got, wanted = (each(noise, timestep=MIDDLE, **prompt).sample.double() for each in (dit, plain))
            facts["error"] = float((got - wanted).norm() / wanted.norm())
            plain.release()
        yield Timed(ms, lambda: facts, run)
    dit.release()


@contextmanager
def _ceiling(case: Case, layout: Layout) -> Iterator[Timed]:
    work, device = work_of(case.model.config), case.mesh.device
    mine = share(work, case.tokens, layout.strategy, case.mesh_of(layout))
    step = ceiling(work, mine, case.local, case.dtype, device)
    yield Timed.of(graphed(step) if device.type == "cuda" else step, device)
