"""ms a step on one GPU from the plain model to the engine, one fusion at a time, beside torch.compile and yardsticks.

The rungs are the published arithmetic in eager mode, then modulation hoisted out of the step, then our kernels in eager
mode, then the same kernels in one CUDA graph. Beside them run the plain model in a graph, under torch.compile, and with
both. The yardsticks of the same run are the *ceiling* (the same matrix products by cuBLAS and the same attention, alone
in a graph), the *roofline* (FLOPs at 790 TFLOP/s or weights at
4.3 TB/s, whichever takes longer), and achieved TFLOP/s, TB/s of weights, SM clock and joules a step.

The plain model repeats its modulation in each of 25 steps; the engine computes a table of it before the first step. So
whole runs are timed too, in wall-clock time, with all graphs captured before.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import isqrt
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from diffusers.schedulers.scheduling_ddim import DDIMScheduler
from torch import Tensor

from launch.baselines.plain import moved, plain_model, predict
from launch.baselines.rungs import RUNGS, Inputs, Rung, forward
from launch.benches.ceiling import Share, ceiling, flops_and_weights, roofline, share
from launch.benches.steps import check_squares
from launch.benches.timing import (
    Sensors,
    append,
    by_rounds,
    command,
    environment,
    graphed,
    in_turn,
    spread,
    timed,
    walled,
)
from seqpar.engine.distributed import DistributedDiT
from seqpar.mesh import Mesh
from seqpar.pipelines.class_labels import DDIM_DEFAULT
from seqpar.planner.plan import load_local, work_of
from seqpar.sampling.guidance import Guidance
from seqpar.sampling.loop import Sampler, draw_noise
from seqpar.sampling.request import Request
from seqpar.sampling.run import begin
from seqpar.weights.find import locate

GUIDANCE = Guidance(4.0)
BF16 = torch.bfloat16
ENGINE = "engine: kernels + graph"
PLAIN = ("plain eager", "plain graph", "plain compiled", "plain compiled + graph")
RUN_STEPS = 25
Way = Callable[[], object]


@dataclass(frozen=True)
class Ladder:
    """Time a step from the plain model to the engine, one fusion at a time, on one GPU."""

    model: str = "large-dit-7b"
    """A preset: large-dit-3b, large-dit-7b, dit-xl/2 ..."""
    tokens: tuple[int, ...] = (256,)
    """Square token counts."""
    compiled: bool = True
    """Also time the plain model under torch.compile (minutes of compilation)."""
    rounds: int = 5
    """Number of rounds; each round times every way once."""
    seconds: float = 0.5
    """Seconds that one way runs in a round."""
    runs: int = 5
    """Number of whole runs of 25 steps of the plain ways and of the engine; 0 times none."""
    out: Path | None = None
    """Append JSON lines here."""


def main(args: Ladder) -> None:
    """Measure, print a table, append the lines."""
    check_squares(args.tokens)
    for tokens in args.tokens:
        lines = measure(args, tokens, torch.device("cuda"))
        for line in lines:
            print(row(line), flush=True)
        append(lines, args.out)
        torch._dynamo.reset()
        torch.cuda.empty_cache()


def measure(args: Ladder, tokens: int, device: torch.device) -> list[dict[str, Any]]:
    """One line for each way of computing a step."""
    torch.manual_seed(0)
    model = locate(args.model).build(BF16, device)
    dit = DistributedDiT(model, Mesh.single(device))
    side = isqrt(tokens) * model.config.patch_size
    ways = all_ways(dit, side, args.compiled)
    repeat = max(2, int(args.seconds * 1e3 / timed(ways["ceiling"], 3)))
    with torch.inference_mode():
        times = in_turn(ways, args.rounds, repeat)
    told = sensed(ways[ENGINE], max(4, int(2000 / min(times["ceiling"]))))
    lines = described(args, dit, tokens, times)
    whole = by_rounds(whole_runs(dit, side, ways), args.runs, walled) if args.runs else {}
    for line in lines:
        way = line["case"]["way"]
        if way == ENGINE and told is not None:
            line |= {"sm_mhz": told[0], "joules": told[1] * line["ms"]["median"] * 1e-3}
        if way in whole:
            line["run_ms"] = spread(whole[way]) | {"mean": fmean(whole[way]), "steps": RUN_STEPS}
    return lines


def all_ways(dit: DistributedDiT, side: int, compiled: bool) -> dict[str, Way]:
    """Every way of computing a step, and the ceiling."""
    model, step = dit.model, plain_step(dit.model, side)
    plain = torch.inference_mode()(step)
    ways = {**rungs(model, side, dit.local.name), **ours(dit, side)}
    ways |= dict(zip(PLAIN[:2], (plain, graphed(plain)), strict=True))
    if compiled:
        faster = compiled_step(step)
        faster()  # compile before the graph's warm-up: compiling tunes and loads on a stream of its own
        ways |= dict(zip(PLAIN[2:], (faster, graphed(faster)), strict=True))
    return ways | {
        "ceiling": graphed(ceiling(work_of(model.config), whole(dit, side), dit.local.name, dit.dtype, dit.device))
    }


def compiled_step(step: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """The step compiled for its one shape, without inductor's own CUDA graphs: `graphed` adds one if it is timed.

    Inference mode wraps the compiled function: it is part of the guards, so a call in another mode would compile again,
    which no capture survives.
    """
    return torch.inference_mode()(torch.compile(step, dynamic=False, options={"triton.cudagraphs": False}))


def whole_runs(dit: DistributedDiT, side: int, ways: Mapping[str, Way]) -> dict[str, Way]:
    """Whole runs: 25 steps of each plain way, and ours from noise to latents by a `Sampler`; graphs exist before."""

    def repeated(way: Way) -> None:
        for _ in range(RUN_STEPS):
            way()

    plain: dict[str, Way] = {name: partial(repeated, ways[name]) for name in PLAIN if name in ways}
    (noise, labels), sampler = start_of_run(dit, side), Sampler(dit)
    return plain | {
        ENGINE: lambda: sampler(
            DDIMScheduler.from_config(DDIM_DEFAULT), noise, labels, steps=RUN_STEPS, guidance=GUIDANCE
        )
    }


def sensed(work: Way, repeat: int) -> tuple[float, float] | None:
    """SM clock (MHz) and power (W) while work runs; None if nvidia-smi gives no readings."""
    try:
        with Sensors() as sensors:
            timed(work, repeat)
        return sensors.medians()
    except OSError as error:
        print(f"no clock and no joules: {error}")
        return None


def described(args: Ladder, dit: DistributedDiT, tokens: int, times: dict[str, list[float]]) -> list[dict[str, Any]]:
    """A line for each way: its times beside the yardsticks."""
    flops, weights = flops_and_weights(work_of(dit.config), tokens)
    case = {"model": args.model, "tokens": tokens, "layout": "one GPU", "guidance": "batched"}
    case |= {"local": dit.local.name, "dtype": "bfloat16"}
    yardsticks = {"ceiling_ms": spread(times["ceiling"])["median"], "roofline_ms": roofline(flops, weights)}
    made = {"gpus": 1, **yardsticks, "command": command(), "env": environment(dit.device)}
    return [
        {
            "bench": "ladder",
            "case": case | {"way": way},
            "ms": (ms := spread(values)),
            **made,
            "tflops": flops / ms["median"] / 1e9,
            "tb_per_s": weights / ms["median"] / 1e9,
        }
        for way, values in times.items()
    ]


def ours(dit: DistributedDiT, side: int) -> dict[str, Way]:
    """The engine's step, in eager mode and as a CUDA graph."""
    return {"engine: kernels, eager": engine(dit, side, False), ENGINE: engine(dit, side, True)}


def rungs(model: Any, side: int, local: str) -> dict[str, Way]:
    """A step of each rung between plain and engine; guidance and DDIM are plain torch, as in the plain model's step."""
    config, device = model.config, model.x_embedder.weight.device
    x = torch.randn(1, (side // config.patch_size) ** 2, model.x_embedder.in_features, device=device)
    t, y = torch.full((2,), 480, device=device), torch.tensor([1, config.num_classes], device=device)
    with torch.inference_mode():
        table, positions, core = model.modulate(t, class_labels=y), model.positions(side, side), load_local(local)

    def step(rung: Rung) -> Tensor:
        out = forward(model, rung, Inputs(torch.cat((x, x)), positions, t, y, table), core)
        return moved(x, out[..., : x.shape[-1]], GUIDANCE.scale)

    return {rung.name: torch.inference_mode()(partial(step, rung)) for rung in RUNGS}


def engine(dit: DistributedDiT, side: int, graph: bool) -> Way:
    """The first step of a run of 25 steps, repeated."""
    noise, labels = start_of_run(dit, side)
    run = begin(dit, Request(DDIMScheduler.from_config(DDIM_DEFAULT), noise, labels, RUN_STEPS, GUIDANCE))
    if graph:
        with torch.inference_mode():
            run.capture()
    done = itertools.count()

    def step() -> None:
        if next(done) % RUN_STEPS == 0:  # restart now and then: a state that overflowed would run faster
            run.rewind()
        run.step()

    return torch.inference_mode()(step)


def whole(dit: DistributedDiT, side: int) -> Share:
    """The work of a step of one GPU."""
    return share(work_of(dit.config), (side // dit.config.patch_size) ** 2, dit.strategy.name, dit.mesh)


def start_of_run(dit: DistributedDiT, side: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Noise (1, C, h, w) and the label of one image."""
    noise = draw_noise((1, dit.config.in_channels, side, side), torch.Generator().manual_seed(0))
    return noise, {"class_labels": torch.zeros(1, dtype=torch.int64)}


def plain_step(model: Any, side: int) -> Callable[[], Tensor]:
    """The published model's step in plain torch: two branches in one batch, adaLN in every step, guidance, DDIM."""
    weight, config = model.x_embedder.weight, model.config
    plain = plain_model(config, side, weight.dtype, weight.device)
    x = torch.randn(1, config.in_channels, side, side, device=weight.device)
    t, y = torch.full((2,), 480, device=weight.device), torch.tensor([1, config.num_classes], device=weight.device)

    def step() -> Tensor:
        out = predict(plain, torch.cat((x, x)), t, y)
        return moved(x, out[:, : config.in_channels], GUIDANCE.scale)

    return step


def row(line: dict[str, Any]) -> str:
    """One line of the table."""
    case, ms = line["case"], line["ms"]
    whole = f"  {RUN_STEPS} steps {line['run_ms']['mean']:.1f} ms" if "run_ms" in line else ""
    return (
        f"{case['model']:<14} {case['tokens']:>6} tokens  {case['way']:<26} "
        f"{ms['median']:9.3f} ms ({ms['min']:.3f} - {ms['max']:.3f})  "
        f"{ms['median'] / line['ceiling_ms']:6.3f} x ceiling  {line['tflops']:6.0f} TFLOP/s  "
        f"roofline {line['roofline_ms']:.2f} ms{whole}"
    )
