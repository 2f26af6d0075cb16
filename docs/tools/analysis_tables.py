"""Writes the tables of docs/analysis.md, from `seqpar.planner` and from the result lines in docs/benchmarks.

python -m docs.tools.analysis_tables --write
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from docs.tools import analysis as a
from docs.tools import analysis_points as points
from seqpar.planner import explain
from seqpar.planner.predict import GIB, predict
from seqpar.planner.rates import H200
from seqpar.types.facts import Cost, Layout, core, linear

PAGE = Path(__file__).parents[1] / "analysis.md"
# the worked shape: 16 frames of 32 x 32 patches, a text of T5
B, T, P, D, Z, C, E = 1, 16, 1024, 1536, 24, 512, 4096
S = T * P
N, TOKENS = 4, 4096  # the worked traffic: Large-DiT-7B, one guided picture of 1024 x 1024
MEASURED = a.measured(H200, "peer")
GPUS = (*a.PUBLISHED, MEASURED)
MODELS = tuple(points.MODELS)


@dataclass(frozen=True)
class Operation:
    """An operation with its formulas as text, and its cost at the worked shape as the planner counts it."""

    name: str
    flops: str
    elements: str
    cost: Cost


@dataclass(frozen=True)
class Traffic:
    """A kind of parallelism: what a rank sends in a layer as text, exchanges of a layer, and elements in the code."""

    name: str
    sent: str
    exchanges: str
    elements: int


def operations(b: int, t: int, p: int, d: int, z: int, c: int, e: int) -> tuple[Operation, ...]:
    """Return the rows of the first table; tests compute their formulas at other shapes."""
    s = t * p
    on_chip = a.self_attention(b, s, d, z)
    # scores in memory: a product writes them, softmax reads and writes them, a product reads them
    off_chip = on_chip + Cost(0, 4 * b * z * s * s)
    cross = linear(b * s, d, d) + linear(b * c, e, 2 * d) + core(b, s, c, z, d // z) + linear(b * s, d, d)
    return (
        Operation("MLP, 4 d inside", "16 b s d²", "10 b s d + 8 d²", a.mlp(b * s, d)),
        Operation("self-attention", "8 b s d² + 4 b s² d", "10 b s d + 4 d²", on_chip),
        Operation("the same, scores in memory", "8 b s d² + 4 b s² d", "10 b s d + 4 d² + 4 b z s²", off_chip),
        Operation(
            "cross-attention", "4 b s d² + 4 b c e d + 4 b s c d", "6 b s d + b c e + 4 b c d + 2 d² + 2 d e", cross
        ),
        Operation(
            "spatial attention", "8 b T P d² + 4 b T P² d", "10 b T P d + 4 d²", a.self_attention(b * t, p, d, z)
        ),
        Operation(
            "temporal attention", "8 b T P d² + 4 b T² P d", "10 b T P d + 4 d²", a.self_attention(b * p, t, d, z)
        ),
        Operation("the same, without its projections", "4 b T² P d", "4 b T P d", core(b * p, t, t, z, d // z)),
    )


def traffic(b: int, s: int, ranks: int) -> tuple[Traffic, ...]:
    """Return the rows of the second table for Large-DiT-7B; tests compute their formulas for other numbers of GPUs."""
    work = points.run_of(MODELS[0])[0]

    def sent(strategy: str) -> int:
        return a.sequence_sent(strategy, work, s, b, ranks)

    return (
        Traffic("tensor", "4 b s d (N - 1) / N", "4", a.tensor_sent(b, s, work.width, ranks)),
        Traffic("pipeline, once per step", "b s d", "none", a.pipeline_sent(b, s, work.width)),
        Traffic("ring", "2 b s d (N - 1) / N", "N - 1", sent("ring")),
        Traffic("gather (`kv_gather`, `kv_first`)", "2 b s d (N - 1) / N", "1", sent("kv_gather")),
        Traffic("Ulysses", "4 b s d (N - 1) / N²", "2", sent("ulysses")),
    )


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *([str(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def count(value: int | None) -> str:
    return "never" if value is None else f"{value:,}"


def operations_table() -> str:
    rows = []
    for row in operations(B, T, P, D, Z, C, E):
        per_byte = row.cost.flops / (2 * row.cost.elements)
        bound = "arithmetic" if per_byte >= MEASURED.ridge else "memory"
        worked = number(row.cost.flops / 1e9), f"{number(row.cost.elements * 2 / 1e6)}", number(per_byte), bound
        rows.append((row.name, f"`{row.flops}`", f"`{row.elements}`", *worked))
    return table(("", "FLOPs", "elements", "GFLOP", "MB", "FLOP/byte", "bound on an H200 by"), rows)


def gpu_table() -> str:
    work = points.run_of(MODELS[0])[0]

    def ring(gpu: a.Gpu) -> float:
        return a.ring_hides(work, H200, gpu) if gpu is MEASURED else gpu.tflops * 1e3 / gpu.links

    lines = (
        ("bf16 products, TFLOP/s", *(number(gpu.tflops) for gpu in GPUS)),
        ("memory, TB/s", *(number(gpu.tbs) for gpu in GPUS)),
        ("to other GPUs, GB/s each way", *(number(gpu.links) for gpu in GPUS)),
        ("FLOPs a byte where the bounds meet, R / M", *(number(gpu.ridge) for gpu in GPUS)),
        ("rows from which arithmetic bounds a product", *(number(gpu.ridge) for gpu in GPUS)),
        ("tokens from which it bounds attention on chip, 2 R / M", *(number(2 * gpu.ridge) for gpu in GPUS)),
        ("tokens a GPU from which a ring's transfers fit behind attention", *(f"{ring(gpu):,.0f}" for gpu in GPUS)),
    )
    return table(("", *(gpu.name.removeprefix("NVIDIA ") for gpu in GPUS)), lines)


def half_table() -> str:
    rows = []
    for model in MODELS:
        work, load = points.run_of(model)
        flops = explain.half_of_flops(work, load.others)
        rows.append((model, work.width, work.head_dim, count(flops), count(explain.half_of_time(work, load, H200))))
    return table(("model", "width", "head dim", "half of the FLOPs from", "half of the time on one H200 from"), rows)


def shares_table() -> str:
    rows = []
    for x in sorted(points.measured_shares(), key=lambda x: (x.model, x.tokens, x.gpus)):
        work, load = points.run_of(x.model)
        cfg = x.gpus if load.guidance else 1
        row = predict(work, replace(load, tokens=x.tokens), Layout(1, cfg, 1, 1, "ulysses", "peer"), H200)
        rows.append((x.model, x.tokens, x.gpus, f"{x.value:.0%}", f"{row.attention / row.ms:.0%}", f"`{x.file}`"))
    return table(("model", "tokens", "GPUs", "measured", "predicted", "line of"), rows)


def traffic_table() -> str:
    work, load = points.run_of(MODELS[0])
    every = {ranks: traffic(2, TOKENS, ranks) for ranks in (2, N, 8)}
    rows = []
    for index, row in enumerate(every[N]):
        times = 1 if row.exchanges == "none" else work.layers
        worked = (f"{every[ranks][index].elements * times * load.itemsize / 1e6:,.0f}" for ranks in every)
        rows.append((row.name, f"`{row.sent}`", row.exchanges, *worked))
    return table(("", "elements per layer", "exchanges per layer", *(f"MB per step, N = {n}" for n in every)), rows)


def memory_table() -> str:
    """Return how many tokens fit on some H100s and H200s, by the planner's lower bound."""
    rows = []
    for model in MODELS:
        work, load = points.run_of(model)
        for gpu in a.PUBLISHED[1:]:
            gib = (H200.memory or 0) if gpu.name == "H200" else gpu.gb  # GiB that CUDA reports, 80 of an H100
            fits = (count(a.most_tokens(work, load, ranks, gib)) for ranks in (1, 2, 4, 8))
            rows.append((model, f"{load.parameters * 2 / GIB:.1f} GiB", gpu.name, *fits))
    return table(("model", "weights in bf16", "GPU", "1", "2", "4", "8"), rows)


def times_table() -> str:
    rows = [
        (x.model, x.tokens, x.gpus, f"{x.value:.4g}", f"{points.planned_ms(x):.4g}", f"`{x.file}`")
        for x in points.measured_times()
    ]
    return table(("model", "tokens", "H200s", "fastest measured, ms", "planned, predicted", "line of"), rows)


TABLES = {
    "operations": operations_table,
    "gpus": gpu_table,
    "half": half_table,
    "shares": shares_table,
    "traffic": traffic_table,
    "memory": memory_table,
    "times": times_table,
}


def page() -> str:
    """The page with its tables as they are now; each follows its name in a comment."""
    text = PAGE.read_text(encoding="utf-8")
    return re.sub(
        r"<!-- table (\w+) -->\n\n(\|.*\n)+", lambda old: f"<!-- table {old[1]} -->\n\n{TABLES[old[1]]()}\n", text
    )


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(page(), encoding="utf-8")
    print(page())
