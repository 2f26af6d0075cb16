"""Explanation of a plan: the cost of a step, its bounds, the traffic of each layout, and why the chosen one is fastest.

docs/analysis.md derives these numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from seqpar.planner import costs
from seqpar.planner.predict import Load, Prediction, predict, totals
from seqpar.planner.rates import GIB, Rates
from seqpar.planner.search import Ranking, name_of
from seqpar.types.facts import Layer, Layout, Work

PARTS = ("gemm", "attention", "elementwise", "exchange")


def explain(ranking: Ranking) -> str:
    """The explanation of the chosen layout as text; `ValueError` if no layout fits the memory."""
    layout = ranking.best
    lines = [f"why {name_of(layout)}:", *_costs(ranking), "", *_bounds(ranking)]
    if layout.data * layout.cfg * layout.sequence > 1:
        lines += ["", *_table(ranking), *_reasons(ranking)]
    return "\n".join(lines)


def _costs(ranking: Ranking) -> list[str]:
    work, load = ranking.work, ranking.load
    parts = costs.parts(work, round(load.images * (1 + load.guidance) * load.calls), load.tokens, load.others)
    total = sum(cost.flops for cost in parts.values())
    lines = [f"{'a step, all ranks together':<28} {'TFLOP':>9} {'share':>6} {'GB':>8} {'FLOP/byte':>10}"]
    for name, cost in parts.items():
        nbytes = cost.elements * load.itemsize
        share = f"{cost.flops / total:6.0%}"
        lines.append(f"{name:<28} {cost.flops / 1e12:9.3g} {share} {nbytes / 1e9:8.3g} {cost.flops / nbytes:10.3g}")
    return lines


def _bounds(ranking: Ranking) -> list[str]:
    work, load, layout, rates = ranking.work, ranking.load, ranking.best, ranking.rates
    local, others = load.mine(layout)
    rows, least = load.rows(layout) * (local + sum(others)), rates.ridge * load.itemsize / 2
    bound = "arithmetic" if rows >= least else "reading its weights"
    text = f" and {sum(load.others)} of text" if load.others else ""
    flops, time = half_of_flops(work, load.others), half_of_time(work, load, rates)
    return [
        f"A GEMM of fewer than {least:.0f} rows is bound by reading its weights; a rank has {rows} rows: {bound}.",
        f"Attention has half of the FLOPs from {_tokens(flops)} on, and half of the time on one rank from "
        f"{_tokens(time)} on; this run has {load.tokens}{text}.",
    ]


def _tokens(count: int | None) -> str:
    return "more than four million tokens" if count is None else f"{count} tokens"


def first(holds: Callable[[int], bool], most: int = 1 << 22) -> int | None:
    """The least number for which a condition holds that stays true once it is; None if that is above `most`."""
    low, high = 0, 1
    while not holds(high):
        if high >= most:
            return None
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def half_of_flops(work: Work, others: tuple[int, ...] = ()) -> int | None:
    def holds(s: int) -> bool:
        cost = costs.parts(work, 1, s, others)
        return cost["attention"].flops >= cost["GEMMs"].flops

    return first(holds)


def half_of_time(work: Work, load: Load, rates: Rates) -> int | None:
    alone = Layout(1, 1, 1, 1, "ulysses", next(iter(rates.exchange)))

    def holds(s: int) -> bool:
        row = predict(work, replace(load, tokens=s), alone, rates)
        return 2 * row.attention >= row.ms

    return first(holds)


def ways(ranking: Ranking) -> list[Prediction]:
    """The chosen layout and the best one of each other strategy."""
    best: dict[str, Prediction] = {}
    for row in ranking.ranked:
        best.setdefault(row.layout.strategy if row.layout.sequence > 1 else "none", row)
    return [*best.values()]


def _layer(work: Work, load: Load, layout: Layout) -> Layer:
    return costs.layers(work, layout, load.tokens, load.rows(layout), load.others)[0]


def _table(ranking: Ranking) -> list[str]:
    work, load = ranking.work, ranking.load
    head = " ".join(f"{part:>10}" for part in PARTS)
    lines = [f"{'layout':<34} {'MB sent':>9} {'exchanges':>9} {'ms per step':>11} {head} {'GiB/rank':>10}"]
    for row in ways(ranking):
        layout = row.layout
        cost = totals(work, load, layout)
        exchanges = round(load.calls * work.layers * len(_layer(work, load, layout).moves)) + (layout.cfg > 1)
        parts = " ".join(f"{getattr(row, part):10.2f}" for part in PARTS)
        counts = f"{cost.sent / 1e6:9.1f} {exchanges:9}"
        lines.append(f"{name_of(layout):<34} {counts} {row.ms:11.2f} {parts} {row.memory.total / GIB:10.1f}")
    return lines


def _reasons(ranking: Ranking) -> list[str]:
    work, load, layout = ranking.work, ranking.load, ranking.best
    chosen, *others = ways(ranking)
    lines = [""]
    if layout.cfg > 1:
        lines.append("The two branches of guidance run apart, with one small exchange per step.")
    if layout.sequence > 1:
        layer = _layer(work, load, layout)
        hidden = f", hidden behind the GEMMs of {' and '.join(layer.behind)}" if layer.behind else ""
        times = {1: "once", 2: "twice"}.get(len(layer.moves), f"{len(layer.moves)} times")
        lines.append(f"{layout.sequence} ranks shard the tokens of a sequence and exchange {times} per layer{hidden}.")
    lines += [f"{name_of(row.layout)}: {_against(chosen, row)}." for row in others]
    if ranking.too_big:
        lines.append(f"{len(ranking.too_big)} layouts do not fit the memory.")
    return lines


def _against(chosen: Prediction, other: Prediction) -> str:
    more = other.ms - chosen.ms
    apart = {part: getattr(other, part) - getattr(chosen, part) for part in PARTS}
    largest = sorted(apart, key=lambda part: -abs(apart[part]))
    shown = ", ".join(f"{part} {apart[part]:+.2f}" for part in largest if abs(apart[part]) >= 0.005)
    text = f"{more:+.2f} ms ({shown})" if shown else "as fast"
    if more < 0 and other.layout.sequence > 1 and not costs.facts_of(other.layout.strategy).moves_only:
        return f"{text}; it rounds differently from one rank, so it is not chosen automatically"
    return text
