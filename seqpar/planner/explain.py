"""Explains a plan: what a step costs, what bounds it, what each way of splitting it sends, and why the chosen one wins.

docs/analysis.md derives the numbers that are printed here for one model.
"""

from __future__ import annotations

from dataclasses import dataclass

from seqpar.planner import analysis
from seqpar.planner.costs import facts_of, layers, totals
from seqpar.planner.predict import GIB, Load, Prediction
from seqpar.planner.search import Ranking
from seqpar.types.facts import Layer, Layout, Work

PARTS = ("gemm", "attention", "elementwise", "exchange")


@dataclass(frozen=True)
class Way:
    """A way to split a step, with the bytes that the busiest rank sends in its layers, and its number of exchanges."""

    name: str
    row: Prediction
    sent: int
    exchanges: int


def explain(ranking: Ranking) -> str:
    """Return the explanation of the chosen layout as text; `ValueError` if no layout fits the memory."""
    lines = [f"why {_name(ranking.best)}:", *_costs(ranking), "", *_bounds(ranking)]
    if _ranks(ranking.best) > 1:
        lines += ["", *_ways(ranking), *_reasons(ranking)]
    return "\n".join(lines)


def _ranks(layout: Layout) -> int:
    return layout.data * layout.cfg * layout.sequence


def _name(layout: Layout) -> str:
    return f"{layout} by {layout.strategy}" if layout.sequence > 1 else str(layout)


def _costs(ranking: Ranking) -> list[str]:
    work, load = ranking.work, ranking.load
    parts = analysis.parts(work, load.images * (1 + load.guidance), load.tokens, load.others)
    every = sum(cost.flops for cost in parts.values())
    lines = [f"{'a step, all ranks together':<28} {'TFLOP':>9} {'share':>6} {'GB':>8} {'FLOP/byte':>10}"]
    for name, cost in parts.items():
        gb, intensity = cost.elements * load.itemsize / 1e9, analysis.intensity(cost, load.itemsize)
        share = f"{cost.flops / every:6.0%}"
        lines.append(f"{name:<28} {cost.flops / 1e12:9.3g} {share} {gb:8.3g} {intensity:10.3g}")
    return lines


def _bounds(ranking: Ranking) -> list[str]:
    """Return what bounds the products of a rank, and from how many tokens on attention is half of a step."""
    work, load, layout, rates = ranking.work, ranking.load, ranking.best, ranking.rates
    mine, others = load.mine(layout)
    rows, gpu = load.rows(layout) * (mine + sum(others)), analysis.measured(rates, layout.transport)
    least = analysis.rows_to_compute(gpu, load.itemsize)
    bound = "arithmetic" if rows >= least else "reading its weights"
    beside = f" beside {sum(load.others)} of text" if load.others else ""
    flops, time = analysis.half_of_flops(work, 1, load.others), analysis.half_of_time(work, load, rates)
    return [
        f"A product of fewer than {least:.0f} rows is bound by reading its weights; a rank has {rows} rows: {bound}.",
        f"Attention has half of the FLOPs from {_tokens(flops)} on, and half of the time on one rank from "
        f"{_tokens(time)} on; here there are {load.tokens}{beside}.",
    ]


def _tokens(count: int | None) -> str:
    return "more than four million tokens" if count is None else f"{count} tokens"


def _ways(ranking: Ranking) -> list[str]:
    """Return a table of the chosen layout, the best of each other strategy, and tensor and pipeline parallelism."""
    head = " ".join(f"{part:>10}" for part in PARTS)
    lines = [f"{'split by':<34} {'MB sent':>9} {'exchanges':>9} {'ms a step':>10} {head} {'GiB a rank':>10}"]
    for way in ways(ranking):
        row = way.row
        parts = " ".join(f"{getattr(row, part):10.2f}" for part in PARTS)
        counts = f"{way.sent / 1e6:9.1f} {way.exchanges:9}"
        lines.append(f"{way.name:<34} {counts} {row.ms:10.2f} {parts} {row.memory.total / GIB:10.1f}")
    return lines


def ways(ranking: Ranking) -> list[Way]:
    """Return the ways to split the step: the chosen one, the best of each other strategy, tensor and pipeline."""
    work, load, best = ranking.work, ranking.load, ranking.best
    found, seen = list[Way](), set[str]()
    for row in ranking.ranked:
        strategy = row.layout.strategy if row.layout.sequence > 1 else "none"
        if strategy not in seen:
            seen.add(strategy)
            found.append(_of_layout(work, load, row))
    return [*found, *_others(ranking, _ranks(best), best.transport)]


def _of_layout(work: Work, load: Load, row: Prediction) -> Way:
    layout = row.layout
    cost = totals(work, layout, load.tokens, load.images, load.guidance, load.itemsize, load.others)
    exchanges = work.layers * len(_layer(work, load, layout).moves) + (layout.cfg > 1)
    return Way(_name(layout), row, cost.sent, exchanges)


def _others(ranking: Ranking, ranks: int, transport: str) -> list[Way]:
    work, load, rates = ranking.work, ranking.load, ranking.rates
    b, tokens = load.images * (1 + load.guidance), load.tokens + sum(load.others)
    whole = analysis.tensor_sent(b, tokens, work.width, ranks) * work.layers * load.itemsize
    once = analysis.pipeline_sent(b, tokens, work.width) * load.itemsize
    tensor = analysis.tensor_parallel(work, load, ranks, rates, transport)
    pipeline = analysis.pipeline_parallel(work, load, ranks, rates, transport)
    return [
        Way(f"tensor {ranks} (not in seqpar)", tensor, whole, 4 * work.layers),
        Way(f"pipeline {ranks} (not in seqpar)", pipeline, once, ranks - 1),
    ]


def _layer(work: Work, load: Load, layout: Layout) -> Layer:
    return layers(work, layout, load.tokens, load.rows(layout), load.others)[0]


def _reasons(ranking: Ranking) -> list[str]:
    """Return what makes the chosen layout fast, and what makes each other way slower."""
    work, load, layout = ranking.work, ranking.load, ranking.best
    chosen, *others = ways(ranking)
    lines = [""]
    if layout.cfg > 1:
        lines.append("The two branches of guidance run apart: they meet in one small exchange a step.")
    if layout.sequence > 1:
        layer = _layer(work, load, layout)
        hidden = f", hidden behind the products of {' and '.join(layer.behind)}" if layer.behind else ""
        times = {1: "once", 2: "twice"}.get(len(layer.moves), f"{len(layer.moves)} times")
        ranks = f"{layout.sequence} ranks, which exchange {times} a layer"
        lines.append(f"The tokens of a sequence are split over {ranks}{hidden}.")
    lines += [f"{way.name}: {_against(chosen.row, way.row)}." for way in others]
    if ranking.too_big:
        lines.append(f"{len(ranking.too_big)} layouts do not fit the memory.")
    return lines


def _against(chosen: Prediction, other: Prediction) -> str:
    """Return the difference of two predictions in words, its largest part first."""
    more = other.ms - chosen.ms
    apart = {part: getattr(other, part) - getattr(chosen, part) for part in PARTS}
    largest = sorted(apart, key=lambda part: -abs(apart[part]))
    shown = ", ".join(f"{part} {apart[part]:+.2f}" for part in largest if abs(apart[part]) >= 0.005)
    text = f"{more:+.2f} ms ({shown})" if shown else "as fast"
    in_seqpar = other.layout.sequence > 1
    if more < 0 and in_seqpar and not facts_of(other.layout.strategy).moves_only:
        return f"{text}; it rounds differently from one rank, so it is not chosen automatically"
    return text
