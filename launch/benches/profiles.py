"""Where the time of a step goes, and the kernels that lose most, for models of our own loop and of `parallelize`.

    torchrun --nproc_per_node=2 launch/bench.py profiles --model flux.1-dev qwen-image large-dit-7b --folder profiles

Models have their released sizes and random weights, and the layout that the planner chooses; a model with guidance
computes both branches in a step. `--folder` gets the tables of all models (profiles.txt), their numbers
(profiles.json), and for each model the merged trace (for ui.perfetto.dev).
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from math import isqrt
from pathlib import Path
from typing import Any

import torch
from diffusers.schedulers.scheduling_ddim import DDIMScheduler

import seqpar
from launch.baselines.released import RELEASED
from launch.benches import calls
from launch.benches.rows import free
from launch.benches.steps import GUIDANCE
from seqpar.loop.distributed import DistributedDiT
from seqpar.loop.loop import Sampler, draw_noise
from seqpar.mesh.mesh import Mesh, default_dtype
from seqpar.pipelines.classes import DDIM_DEFAULT, Files
from seqpar.planner.plan import Plan, make
from seqpar.planner.predict import Load
from seqpar.planner.search import Preferences
from seqpar.profiling.profile import profile
from seqpar.profiling.record import MEASURED, steps_before, steps_needed
from seqpar.profiling.report import facts, report
from seqpar.profiling.result import Profile


@dataclass(frozen=True)
class Profiles:
    """Profile the steps of models with random weights on the running processes."""

    model: tuple[str, ...] = ("flux.1-dev", "qwen-image", "large-dit-7b")
    """Models of `calls` (on a machine without GPUs with few blocks and heads), or presets of models of classes."""
    tokens: int = 4096
    """Tokens of models of classes; others have their own number."""
    steps: int = MEASURED
    """Number of steps to measure."""
    cfg: bool = True
    """Whether ranks may compute the two branches of guidance at once."""
    folder: Path = Path("profiles")
    """Folder of tables, numbers and traces."""


@dataclass(frozen=True)
class Ready:
    """A model that is set up. run: makes a number of steps, and calls a function of their index after each."""

    plan: Plan
    load: Load
    run: Callable[[int, Callable[[int], None]], object]


def main(args: Profiles) -> None:
    """Profile all models; rank 0 writes the files and prints ms and losses."""
    mesh = Mesh.joined()
    mesh.on_all_ranks(lambda: check(args))
    numbers, texts, short = dict[str, Any](), list[str](), list[str]()
    for name in args.model:
        with (released if name in RELEASED else ours)(args, name, mesh) as ready, tempfile.TemporaryDirectory() as made:
            result = _profiled(args, ready, mesh, made)
            if mesh.is_main:
                args.folder.mkdir(parents=True, exist_ok=True)
                trace = args.folder / f"{name.replace('/', '-')}-trace.json.gz"
                shutil.copyfile(Path(made, "trace.json.gz"), trace)
        blocks = [{block: asdict(each) for block, each in result.blocks(rank).items()} for rank in result.ranks]
        numbers[name], text = {**facts(result), "blocks_ms": blocks}, report(result)
        texts.append(f"{name}: {ready.plan}\n{text}\n")
        short.append(f"{name}: {result.mean(0).wall:.3f} ms a step, {ready.plan.layout} by {ready.plan.strategy.name}")
        short += text.partition("time per step:\n")[2].splitlines()
        del ready
        free(mesh.device)
    if mesh.is_main:
        (args.folder / "profiles.txt").write_text("\n".join(texts), encoding="utf-8")
        (args.folder / "profiles.json").write_text(json.dumps(numbers), encoding="utf-8")
        print("\n".join(["", *short]), flush=True)


def check(args: Profiles) -> None:
    """Raise `ValueError` for what cannot be profiled, before any weight is made."""
    if args.steps < 1 or args.tokens < 1 or isqrt(args.tokens) ** 2 != args.tokens:
        raise ValueError(f"got --steps {args.steps} --tokens {args.tokens}, expected at least 1, and a square")
    for name in args.model:
        if name not in RELEASED:
            Files.locate(name)


def _profiled(args: Profiles, ready: Ready, mesh: Mesh, folder: str) -> Profile:
    count = steps_needed(args.steps, steps_before(mesh))
    every = {"plan": ready.plan, "load": ready.load, "steps": args.steps, "mesh": mesh}
    return profile(lambda on_step: ready.run(count, on_step), folder, **every)


@contextmanager
def ours(args: Profiles, name: str, mesh: Mesh) -> Iterator[Ready]:
    """Set up a model of classes and our loop."""
    dtype = default_dtype(mesh.device)
    model = Files.locate(name).blueprint.build(dtype, mesh.device)
    first = DistributedDiT(model, Mesh.single(mesh.device)).plan.ranking
    load = replace(first.load, tokens=args.tokens, guidance=True, labels=2)
    wish = Preferences() if args.cfg else Preferences(axes={"cfg": 1})
    dit = DistributedDiT(model, plan=make(first.work, load, dtype, mesh, wish))
    side = isqrt(args.tokens) * model.config.patch_size
    noise = draw_noise((1, model.config.in_channels, side, side), torch.Generator().manual_seed(0))
    prompt: Any = {"class_labels": torch.zeros(1, dtype=torch.int64)}
    with Sampler(dit) as sampler:

        def run(count: int, on_step: Callable[[int], None]) -> None:
            scheduler = DDIMScheduler.from_config(DDIM_DEFAULT)
            sampler(scheduler, noise, prompt, steps=count, guidance=GUIDANCE, on_step=on_step)

        yield Ready(dit.plan, load, run)
    dit.release()


@contextmanager
def released(args: Profiles, name: str, mesh: Mesh) -> Iterator[Ready]:
    """Set up a released transformer by `parallelize`."""
    known = RELEASED[name] if mesh.device.type == "cuda" else RELEASED[name].small()
    case = calls.Case(calls.Calls(model=name), known, mesh, default_dtype(mesh.device))
    module: Any = case.theirs
    seqpar.parallelize(module, cfg=args.cfg)
    plan: Plan = module.forward.state.plan
    load = replace(plan.ranking.load, tokens=known.tokens, others=known.others)
    branches = calls.BRANCHES[: 1 + load.guidance]

    @torch.no_grad()
    def run(count: int, on_step: Callable[[int], None]) -> None:
        for index in range(count):
            calls.step_of(module, case, branches)
            on_step(index)

    try:
        yield Ready(plan, load, run)
    finally:
        seqpar.release(module)
