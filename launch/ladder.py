"""From the plain model to the engine, one rung at a time, on one GPU; beside torch.compile and three yardsticks.

Rungs: the published arithmetic, eager -> modulation hoisted -> our kernels, eager -> the same as one CUDA graph. Beside
them the plain model in a graph, under torch.compile, and both. Yardsticks of the same run: the *ceiling* (the same
matrix products by cuBLAS and the same attention, alone in a graph), the *roofline* (FLOPs at 790 TFLOP/s or weights at
4.3 TB/s, whichever takes longer), and achieved TFLOP/s, SM clock and joules a step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import isqrt
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.transformers.dit_transformer_2d import DiTTransformer2DModel
from diffusers.schedulers.scheduling_ddim import DDIMScheduler
from torch import Tensor, nn

from launch.plain_large_dit import PlainLargeDiT
from launch.rungs import RUNGS, forward
from launch.steps import check_squares
from launch.timing import Sensors, append, command, environment, graphed, in_turn, spread, timed
from seqpar.distributed import DistributedDiT
from seqpar.mesh import Mesh
from seqpar.models import large_dit
from seqpar.models._find import locate, randomise
from seqpar.pipeline import DDIM_DEFAULT
from seqpar.plan import load_local
from seqpar.sampling import Order, Run, draw_noise
from seqpar.trajectory import Guidance

GUIDANCE = Guidance(4.0)
MATRIX_FLOPS, MEMORY_BYTES = 790e12, 4.3e12  # a second; measured on an H200
BF16 = torch.bfloat16
ENGINE = "engine: kernels + graph"


@dataclass(frozen=True)
class Ladder:
    """Climb from the plain model to the engine on one GPU."""

    model: str = "large-dit-7b"
    """A preset: large-dit-3b, large-dit-7b, dit-xl/2 ..."""
    tokens: tuple[int, ...] = (256,)
    """Square token counts."""
    compiled: bool = True
    """Also the plain model under torch.compile (minutes of compilation)."""
    rounds: int = 5
    """Rounds in turn."""
    seconds: float = 0.5
    """How long one way runs in a round."""
    out: Path | None = None
    """Append JSON lines here."""


def main(args: Ladder) -> None:
    """Measure, print a table, append the lines."""
    check_squares(args.tokens)
    for tokens in args.tokens:
        lines = measure(args, tokens)
        for line in lines:
            print(row(line), flush=True)
        append(lines, args.out)
        torch._dynamo.reset()
        torch.cuda.empty_cache()


def measure(args: Ladder, tokens: int) -> list[dict[str, Any]]:
    """One line for each way of computing a step."""
    torch.manual_seed(0)
    device = torch.device("cuda")
    model = locate(args.model).build(BF16, device)
    dit = DistributedDiT(model, Mesh.single(device))
    ways = all_ways(dit, isqrt(tokens) * model.config.patch_size, args.compiled)
    repeat = max(2, int(args.seconds * 1e3 / timed(ways["ceiling"], 3)))
    with torch.inference_mode():
        times = in_turn(ways, args.rounds, repeat)
    with Sensors() as sensors:
        timed(ways[ENGINE], max(4, int(2000 / min(times["ceiling"]))))
    clock, watts = sensors.medians()
    lines = described(args, dit, tokens, times)
    for line in lines:
        if line["case"]["way"] == ENGINE:
            line |= {"sm_mhz": clock, "joules": watts * line["ms"]["median"] * 1e-3}
    return lines


def all_ways(dit: DistributedDiT, side: int, compiled: bool) -> dict[str, Callable[[], object]]:
    """Every way of computing a step, and the ceiling."""
    model, plain = dit.model, plain_step(dit.model, side)
    ways = {**rungs(model, side, dit.local.name), **ours(dit, side)}
    ways |= {"plain eager": plain, "plain graph": graphed(plain)}
    if compiled:
        faster = torch.compile(plain, dynamic=False)
        ways |= {"plain compiled": faster, "plain compiled + graph": graphed(faster)}
    return ways | {"ceiling": graphed(ceiling(model, side, dit.local.name))}


def described(args: Ladder, dit: DistributedDiT, tokens: int, times: dict[str, list[float]]) -> list[dict[str, Any]]:
    """A line for each way: its times beside the yardsticks."""
    flops, weights = work(dit.config, tokens)
    case = {"model": args.model, "tokens": tokens, "layout": "one GPU", "guidance": "batched"}
    case |= {"local": dit.local.name, "dtype": "bfloat16"}
    yardsticks = {"ceiling_ms": spread(times["ceiling"])["median"],
                  "roofline_ms": 1e3 * max(flops / MATRIX_FLOPS, weights / MEMORY_BYTES)}  # fmt: skip
    made = {"gpus": 1, **yardsticks, "command": command(), "env": environment(dit.device)}
    return [
        {"bench": "ladder", "case": case | {"way": way}, "ms": (ms := spread(values)), **made,
         "tflops": flops / ms["median"] / 1e9}
        for way, values in times.items()
    ]  # fmt: skip


def ours(dit: DistributedDiT, side: int) -> dict[str, Callable[[], object]]:
    """The engine's step: kernels, eager and as a graph."""
    return {"engine: kernels, eager": engine(dit, side, False), ENGINE: engine(dit, side, True)}


def rungs(model: Any, side: int, local: str) -> dict[str, Callable[[], object]]:
    """The rungs between plain and engine, for Large-DiT."""
    if not isinstance(model, large_dit.Model):
        return {}
    tokens = torch.randn(2, (side // model.config.patch_size) ** 2, model.x_embedder.in_features, device="cuda")
    t, y = torch.full((2,), 480, device="cuda"), torch.tensor([1, 1000], device="cuda")
    with torch.inference_mode():
        table, core = model.condition(t, class_labels=y), load_local(local)
    return {
        rung.name: torch.inference_mode()(partial(forward, model, rung, tokens, t, y, table, core)) for rung in RUNGS
    }


def engine(dit: DistributedDiT, side: int, graph: bool) -> Callable[[], object]:
    """A step of a run of 25, again and again."""
    noise = draw_noise((1, dit.config.in_channels, side, side), torch.Generator().manual_seed(0))
    scheduler = DDIMScheduler.from_config(DDIM_DEFAULT)
    run = Run(dit, Order(scheduler, noise, {"class_labels": torch.zeros(1, dtype=torch.int64)}, 25, GUIDANCE))
    with torch.inference_mode():
        next(run.trajectory.chunks())
        if graph:
            run.capture()
    return torch.inference_mode()(lambda: run.step(0))


def plain_step(model: Any, side: int) -> Callable[[], Tensor]:
    """The published model's step: two branches in one batch, guidance, DDIM; plain torch, its own adaLN every step."""
    config, device = model.config, torch.device("cuda")
    large = isinstance(config, large_dit.Config)
    with torch.device("meta"):
        made: nn.Module = PlainLargeDiT(config) if large else DiTTransformer2DModel(
            config.num_attention_heads, config.attention_head_dim, out_channels=config.out_channels,
            num_layers=config.num_layers, sample_size=side, patch_size=config.patch_size)  # fmt: skip
    plain: Any = made
    plain = plain.to(BF16).to_empty(device=device).requires_grad_(False).eval()
    randomise(plain, 0)
    x = torch.randn(1, 4, side, side, device=device)
    t, y = torch.full((2,), 480, device=device), torch.tensor([1, 1000], device=device)
    keep, direction = 0.99, -0.01

    def step() -> Tensor:
        both = torch.cat((x, x)).to(BF16)
        out = plain(both, t, y) if large else plain(both, timestep=t, class_labels=y, return_dict=False)[0]
        c, u = out[:, :4].chunk(2)
        return keep * x + direction * (u + GUIDANCE.scale * (c - u))

    return torch.inference_mode()(step)


def ceiling(model: Any, side: int, local: str) -> Callable[[], object]:
    """The matrix products of all blocks by cuBLAS, and attention, and nothing else: same shapes, random data."""
    config, tokens = model.config, (side // model.config.patch_size) ** 2
    x = torch.randn(2, tokens, config.width, device="cuda").to(BF16)
    attend, head_dim = load_local(local), config.attention_head_dim
    large = isinstance(config, large_dit.Config)
    hidden = config.feed_forward if large else 4 * config.width
    inner = torch.randn(2, tokens, hidden, device="cuda").to(BF16)

    def step() -> Tensor:
        for block in model.blocks:
            q, k, v = F.linear(x, block.qkv.weight).unflatten(-1, (3, -1, head_dim)).unbind(2)
            F.linear(attend(q, k, v)[0].flatten(2), (block.wo if large else block.proj).weight)
            F.linear(x, (block.w13 if large else block.fc1).weight)
            F.linear(inner, (block.w2 if large else block.fc2).weight)
        return F.linear(x, model.final.weight)

    return torch.inference_mode()(step)


def work(config: Any, tokens: int) -> tuple[float, float]:
    """(FLOPs, bytes of weights) of one step with two batch rows: matrix products and attention of all blocks."""
    width = config.width
    large = isinstance(config, large_dit.Config)
    weights = 4 * width**2 + (3 * width * config.feed_forward if large else 8 * width**2)
    products, attention = 2 * 2 * tokens * weights, 2 * 4 * tokens**2 * width
    return config.num_layers * (products + attention), config.num_layers * weights * 2.0


def row(line: dict[str, Any]) -> str:
    """One line of the table."""
    case, ms = line["case"], line["ms"]
    return (
        f"{case['model']:<14} {case['tokens']:>6} tokens  {case['way']:<26} "
        f"{ms['median']:9.3f} ms ({ms['min']:.3f} - {ms['max']:.3f})  "
        f"{ms['median'] / line['ceiling_ms']:6.3f} x ceiling  {line['tflops']:6.0f} TFLOP/s  "
        f"roofline {line['roofline_ms']:.2f} ms"
    )
