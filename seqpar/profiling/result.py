"""`Profile`: where the time of the measured steps went, for every rank, step and block of the model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from seqpar.planner.costs import attention_calls, busiest, layers, merge_bytes, parts
from seqpar.planner.plan import Plan
from seqpar.planner.predict import STATE, Load
from seqpar.planner.search import Ranking
from seqpar.profiling.ranks import KINDS, Columns, columns, mean, shifts, timelines
from seqpar.profiling.trace import RankTrace
from seqpar.types.facts import Blocks, Cost, Layout, core

T = TypeVar("T")


@dataclass(frozen=True)
class Rate:
    """The work of a column in one rank's step. amount: GFLOP or MB. ceiling: the machine's best, per second."""

    column: str
    amount: float
    ceiling: float
    unit: str

    @property
    def least_ms(self) -> float:
        return self.amount / self.ceiling

    def achieved(self, columns: Columns) -> float | None:
        """The rate of a step in the unit, None where the column is empty. Hidden exchanges count, too."""
        spent = columns.exposed + columns.hidden if self.column == "exchange" else getattr(columns, self.column)
        return self.amount / spent if spent and self.amount else None


def rates(ranking: Ranking, load: Load, layout: Layout) -> tuple[Rate, ...]:
    """The work of the busiest rank of a layout, by the planner's formulas, and the best rates of the machine."""
    work, known = ranking.work, ranking.rates
    b, (local, others) = load.rows(layout), load.mine(layout)
    every = layers(work, layout, load.tokens, b, load.others)
    layer = every[0]

    # attention, cross-attention included
    calls = [call.flops for call in attention_calls(work, layer, b)]
    crosses = [
        core(b, local, kind.cross.keys, work.heads, work.head_dim) * kind.count for kind in work.blocks if kind.cross
    ]
    attention = work.layers * sum(calls) + sum(crosses, Cost(0, 0)).flops
    nearest = min(known.attention, key=lambda dim: abs(dim - work.head_dim))

    # bytes that elementwise kernels read and write, those of the strategy included
    moved = sum(values for values, _ in layer.passes) * b * work.head_dim * load.itemsize
    moved += merge_bytes(work, layer, b, load.itemsize)[0]

    def passes(kind: Blocks) -> int:
        return sum(kind.passes) * sum(kind.rows(local, others)) * b * load.itemsize

    elementwise = sum(kind.count * (passes(kind) + moved) for kind in work.blocks)

    products = parts(work, b, local, others)["GEMMs"].flops
    found = [
        Rate("products", products / 1e9, known.gemm[-1][1], "TFLOP/s"),
        Rate("attention", attention / 1e9, max(rate for _, rate in known.attention[nearest]), "TFLOP/s"),
        Rate("elementwise", elementwise / 1e6, known.copy * 1e3, "GB/s"),
    ]
    if layout.sequence * layout.cfg > 1:
        sent = work.layers * sum(busiest(every)) * b * work.head_dim * load.itemsize
        sent += b * local * load.latent * STATE * (layout.cfg > 1)
        found.append(Rate("exchange", sent / 1e6, known.links(layout.transport), "GB/s"))
    return tuple(found)


@dataclass(frozen=True)
class BlockTime:
    rank: int
    step: int
    block: str
    columns: Columns


@dataclass(frozen=True)
class KernelTime:
    """The ms per step in which a kernel ran on a rank. kind: see `seqpar.profiling.ranks.Kind`."""

    rank: int
    name: str
    kind: str
    ms: float


@dataclass(frozen=True)
class Profile:
    """Where the time went.

    rows: every block of every step and rank. kernels: all kernels of all ranks. late: for each rank, rank -> ms per
    step for which it waited for that rank. rates: the work of a rank and the best rates of the machine, known by
    `source`; empty where the work is unknown. graph: whether steps were replayed. clock_us: the largest error between
    the clocks of two ranks. notes: for readers of the report.
    """

    rows: tuple[BlockTime, ...]
    kernels: tuple[KernelTime, ...]
    late: tuple[dict[int, float], ...]
    rates: tuple[Rate, ...]
    source: str
    graph: bool
    clock_us: float
    notes: tuple[str, ...]
    plan: Plan | None = None

    @property
    def ranks(self) -> list[int]:
        return list(range(len(self.late)))

    @property
    def steps(self) -> list[int]:
        return sorted({row.step for row in self.rows})

    def step(self, rank: int, step: int) -> Columns:
        return sum((row.columns for row in self.rows if (row.rank, row.step) == (rank, step)), Columns())

    def mean(self, rank: int) -> Columns:
        return mean([self.step(rank, step) for step in self.steps])

    def blocks(self, rank: int) -> dict[str, Columns]:
        """Block -> the mean of its columns over a rank's steps, in the order in which blocks run."""
        found: dict[str, Columns] = {}
        for row in self.rows:
            if row.rank == rank:
                found[row.block] = found.get(row.block, Columns()) + row.columns
        return {block: total * (1 / len(self.steps)) for block, total in found.items()}


def by_class(blocks: Mapping[str, T]) -> dict[str, list[T]]:
    """Group the values of blocks by class: "19 x FluxTransformerBlock" -> values."""
    found = defaultdict[str, list[T]](list)
    for block, value in blocks.items():
        found[block.rpartition(" ")[0] or block].append(value)
    return {f"{len(values)} x {kind}" if len(values) > 1 else kind: values for kind, values in found.items()}


def profile_of(ranks: Sequence[RankTrace], plan: Plan | None, load: Load | None) -> tuple[Profile, list[float]]:
    """The profile of all ranks, and what `ranks.merged` needs to bring their traces onto one clock."""
    moved, error = shifts(ranks)
    stores = plan is None or plan.transport.name == "peer"
    lines = timelines(ranks, moved, None if plan is None else plan.layout, stores)
    count = max(1, len(ranks[0].steps))
    rows, kernels = list[BlockTime](), list[KernelTime]()
    for rank, (trace, line, by) in enumerate(zip(ranks, lines, moved, strict=True)):
        marks = [(moment + by, block) for moment, block in trace.marks]
        for step, (start, end) in trace.steps.items():
            found = columns(line.intervals, start + by, end + by, marks)
            rows += [BlockTime(rank, step, block, us * 1e-3) for block, us in found.items()]
        spent = defaultdict[tuple[str, str], float](float)
        for event in trace.events:
            spent[event.name, KINDS[event.what]] += (event.end - event.start) / count / 1e3
        kernels += [KernelTime(rank, name, kind, ms) for (name, kind), ms in spent.items()]
    late = tuple({other: us / count / 1e3 for other, us in line.late.items()} for line in lines)
    notes = tuple(dict.fromkeys(note for trace in ranks for note in trace.notes))
    graph = any(event.graph for trace in ranks for event in trace.events)
    known = () if plan is None or load is None else rates(plan.ranking, load, plan.layout)
    source = "" if plan is None else plan.ranking.rates.source
    return Profile(tuple(rows), tuple(kernels), late, known, source, graph, error, notes, plan), moved
