"""Time of a denoising step on every layout of the running processes, and a digest of its latents.

    torchrun --nproc_per_node=4 launch/bench.py steps --model dit-xl/2 --tokens 1024 4096 16384 --out lines.jsonl

One JSON line a row: {"bench": "steps", "case": {...}, "gpus": N, "ms": {"median", "min", "max"}, "digest": ...}. The
digest is that of the latents after 25 steps from one seed: equal digests mean equal bits, also between runs with
different numbers of processes. Each round times every layout once (A B C A B C), so that drifting clocks affect all
layouts equally; the slowest rank counts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from diffusers.schedulers.scheduling_ddim import DDIMScheduler

from launch.benches.timing import append, command, environment, spread
from seqpar import exact
from seqpar import mesh as meshes
from seqpar.engine.distributed import DistributedDiT
from seqpar.mesh import Mesh, default_dtype
from seqpar.pipelines.class_labels import DDIM_DEFAULT
from seqpar.planner.costs import strategies
from seqpar.protocols import SequenceModel
from seqpar.sampling.guidance import Guidance
from seqpar.sampling.loop import digest, draw_noise, sample
from seqpar.weights.find import locate

GUIDANCE = Guidance(4.0)
DIGEST_STEPS = 25


@dataclass(frozen=True)
class Steps:
    """Time a denoising step on every layout of the running processes."""

    model: str = "dit-xl/2"
    """A preset (random weights) or a checkpoint."""
    tokens: tuple[int, ...] = (1024, 4096, 16384)
    """Square token counts."""
    steps: int = 10
    """Number of timed steps in a round."""
    rounds: int = 3
    """Number of rounds; medians are over rounds."""
    layouts: tuple[str, ...] = ()
    """Layouts to time, as strategy:cfg:ring (ulysses:2:1); all that fit if none are given."""
    local: str = "auto"
    """Implementation of attention on one device."""
    transport: str = "auto"
    """Transport of the exchanges between ranks."""
    graph: bool = True
    """Replay the step as a CUDA graph if that is possible."""
    exact: bool = False
    """Time the exact mode (seqpar/exact.py), in which the bits of a batch row depend on that row alone."""
    out: Path | None = None
    """Append JSON lines here."""


@dataclass(frozen=True)
class Layout:
    """A strategy and the axes it runs on."""

    strategy: str
    cfg: int
    ring: int
    ulysses: int
    data: int = 1

    @property
    def name(self) -> str:
        """The layout in the form that --layouts takes."""
        return f"{self.strategy}:{self.cfg}:{self.ring}"

    def __str__(self) -> str:
        pictures = f"data{self.data} " if self.data > 1 else ""
        return f"{self.strategy} {pictures}cfg{self.cfg} ring{self.ring} ulysses{self.ulysses}"


def main(args: Steps) -> None:
    """Measure all cases, print a table on rank 0, append the lines."""
    if args.exact:
        exact.turn_on()
    _, world = meshes.join()
    check(args, world)
    device = meshes.pick_device(world)
    dtype = default_dtype(device)
    model = locate(args.model).build(dtype, device)
    for tokens in args.tokens:
        lines = measure(args, model, tokens, world, device)
        if not dist.is_initialized() or meshes.join()[0] == 0:
            report(lines, args.out)  # at once, so that an interrupted run keeps its lines


def check(args: Steps, world: int) -> None:
    """Raise `ValueError` for flags that cannot be measured, before any weight is read."""
    check_squares(args.tokens)
    if args.steps < 1 or args.rounds < 1:
        raise ValueError(f"got --steps {args.steps} --rounds {args.rounds}, expected at least 1 of each")
    layouts(args, world)


def check_squares(counts: Sequence[int]) -> None:
    """Raise `ValueError` for a token count that is not a square number."""
    for tokens in counts:
        side = isqrt(max(0, tokens))
        if tokens < 1 or side**2 != tokens:
            near = f"{side**2} or {(side + 1) ** 2}" if side else "1"
            raise ValueError(f"got --tokens {tokens}, expected squares: {near}")


def measure(args: Steps, model: SequenceModel, tokens: int, world: int, device: torch.device) -> list[dict[str, Any]]:
    """Return one JSON line for each layout at one token count."""
    side = isqrt(tokens) * model.config.patch_size
    runs = {layout: Run(args, model, layout, side, device) for layout in layouts(args, world)}
    digests = {layout: run.digest() for layout, run in runs.items()}
    times: dict[Layout, list[float]] = {layout: [] for layout in runs}
    for _ in range(args.rounds):
        for layout, run in runs.items():
            times[layout].append(run.time(args.steps))
    return [line(args, tokens, world, layout, run.dit, times[layout], digests[layout]) for layout, run in runs.items()]


def line(
    args: Steps, tokens: int, world: int, layout: Layout, dit: DistributedDiT, times: list[float], bits: str
) -> dict[str, Any]:
    """Return the JSON line of one layout."""
    case = {"model": args.model, "tokens": tokens, "layout": str(layout), "local": dit.local.name, "graph": args.graph}
    case |= {"transport": dit.transport.name, "exact": args.exact}
    case |= {"guidance": "axis" if layout.cfg == 2 else "batched", "dtype": str(dit.dtype).removeprefix("torch.")}
    return {
        "bench": "steps",
        "case": case,
        "gpus": world,
        "ms": spread(times),
        "digest": bits,
        "command": command(),
        "env": environment(dit.device),
    }


def layouts(args: Steps, world: int) -> list[Layout]:
    """Return the layouts that the flags ask for (see `fitting`)."""
    return fitting(args.layouts, world)


def fitting(names: Sequence[str], world: int) -> list[Layout]:
    """Return all layouts of this number of processes, or those named; `ValueError` for a name that does not fit."""
    found = []
    for cfg in (1, 2) if world % 2 == 0 else (1,):
        rest = world // cfg
        for ring in (ring for ring in range(1, rest + 1) if rest % ring == 0):
            found += [Layout(name, cfg, ring, rest // ring) for name in named(ring, rest // ring)]
    known = [layout.name for layout in found]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"got --layouts {' '.join(unknown)}, expected some of {', '.join(known)}")
    return [layout for layout in found if not names or layout.name in names]


def named(ring: int, ulysses: int) -> list[str]:
    """Return the strategies that run on this mesh; a single rank exchanges nothing, so only one is listed for it."""
    return [name for name, facts in strategies().items() if facts.names(ring, ulysses)]


class Run:
    """One layout that is set up and can be timed repeatedly."""

    def __init__(self, args: Steps, model: SequenceModel, layout: Layout, side: int, device: torch.device) -> None:
        self._mesh = Mesh.from_env(cfg=layout.cfg, ring=layout.ring, ulysses=layout.ulysses, device=device)
        self.dit = DistributedDiT(model, self._mesh, layout.strategy, args.local, args.transport)
        self._graph = args.graph
        self._noise = draw_noise((1, model.config.in_channels, side, side), torch.Generator().manual_seed(0))

    def digest(self) -> str:
        """Return the digest of the latents after 25 steps; this run is also the warm-up."""
        return digest(self._sample(DIGEST_STEPS))

    def time(self, steps: int) -> float:
        """Return ms a step of the slowest rank, measured from the end of the second step to the end of the last."""
        marks: list[Any] = []
        self._sample(steps + 2, lambda index: marks.append(mark(self._mesh.device)))
        if self._mesh.device.type == "cuda":
            torch.cuda.synchronize()
            elapsed = marks[1].elapsed_time(marks[-1])
        else:
            elapsed = 1e3 * (marks[-1] - marks[1])
        return max(self._mesh.collect(elapsed / steps, float))

    def _sample(self, steps: int, on_step: Any = lambda index: None) -> torch.Tensor:
        scheduler = DDIMScheduler.from_config(DDIM_DEFAULT)
        labels = {"class_labels": torch.zeros(1, dtype=torch.int64)}
        return sample(
            self.dit, scheduler, self._noise, labels, steps=steps, guidance=GUIDANCE, on_step=on_step, graph=self._graph
        )


def mark(device: torch.device) -> Any:
    """Return a point in time: an event on the GPU's stream, or the time of the host's clock."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def report(lines: list[dict[str, Any]], out: Path | None) -> None:
    """Print the table and append the JSON lines to the file."""
    for line in lines:
        case, ms = line["case"], line["ms"]
        print(
            f"{case['tokens']:>6} tokens  {line['gpus']} x  {case['layout']:<32} {case['local']:<6} "
            f"{ms['median']:9.2f} ms  ({ms['min']:.2f} - {ms['max']:.2f})  {line['digest']}"
        )
    append(lines, out)
