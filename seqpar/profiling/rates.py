"""What a rank computes and moves in a step, by the planner's formulas, and the rates that this machine reaches at best.

The modulation's products and what a pipeline does around its transformer are in no formula, so that their time lowers
the rates that are shown.
"""

from __future__ import annotations

from dataclasses import dataclass

from seqpar.planner import analysis
from seqpar.planner.costs import attention_calls, busiest, layers, merge_bytes
from seqpar.planner.predict import STATE, Load
from seqpar.planner.search import Ranking
from seqpar.profiling.columns import Columns
from seqpar.types.facts import Blocks, Cost, Layer, Layout, Work, core


@dataclass(frozen=True)
class Rate:
    """The work of a column in a step of one rank. amount: GFLOP or MB. ceiling: per second, in the unit."""

    column: str
    amount: float
    ceiling: float
    unit: str

    @property
    def least_ms(self) -> float:
        """Return the ms that the work takes at the ceiling."""
        return self.amount / self.ceiling

    def achieved(self, columns: Columns) -> float | None:
        """Return the rate of a step in the unit, None where the column is empty. Hidden exchanges count as well."""
        spent = columns.exposed + columns.hidden if self.column == "exchange" else getattr(columns, self.column)
        return self.amount / spent if spent and self.amount else None


def rates(ranking: Ranking, load: Load, layout: Layout) -> tuple[Rate, ...]:
    """Return the work of the busiest rank of a layout, beside the rates of large products, calls, copies and sends."""
    work, known = ranking.work, ranking.rates
    b, (mine, others) = load.rows(layout), load.mine(layout)
    every = layers(work, layout, load.tokens, b, load.others)
    nearest = min(known.attention, key=lambda dim: abs(dim - work.head_dim))
    found = [
        Rate(
            "products",
            analysis.parts(work, b, mine, others)["matrix products"].flops / 1e9,
            known.gemm[-1][1],
            "TFLOP/s",
        ),
        Rate(
            "attention",
            _attention(work, every[0], b, mine) / 1e9,
            max(y for _, y in known.attention[nearest]),
            "TFLOP/s",
        ),
        Rate("elementwise", _passes(work, load, layout, every[0]) / 1e6, known.copy * 1e3, "GB/s"),
    ]
    if layout.sequence * layout.cfg > 1:
        sent = work.layers * sum(busiest(every)) * b * work.head_dim * load.itemsize
        swapped = b * mine * load.latent * STATE * (layout.cfg > 1)
        found.append(Rate("exchange", (sent + swapped) / 1e6, analysis.measured(known, layout.transport).links, "GB/s"))
    return tuple(found)


def _attention(work: Work, layer: Layer, b: int, mine: int) -> int:
    """Return the FLOPs of all calls of attention, cross-attention too."""
    crosses = [
        core(b, mine, kind.cross.keys, work.heads, work.head_dim) * kind.count for kind in work.blocks if kind.cross
    ]
    return work.layers * sum(call.flops for call in attention_calls(work, layer, b)) + sum(crosses, Cost(0, 0)).flops


def _passes(work: Work, load: Load, layout: Layout, layer: Layer) -> int:
    """Return the bytes that elementwise kernels read and write, those of the strategy too."""
    b, (mine, others) = load.rows(layout), load.mine(layout)
    moved = sum(values for values, _ in layer.passes) * b * work.head_dim * load.itemsize
    merged = merge_bytes(work, layer, b, load.itemsize)[0]

    def own(kind: Blocks) -> int:
        return sum(kind.passes) * sum(kind.rows(mine, others)) * b * load.itemsize

    return sum(kind.count * (own(kind) + moved + merged) for kind in work.blocks)
