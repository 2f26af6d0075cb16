"""`Profile`: where the time of the measured steps went, for every rank, step and block of the model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from seqpar.planner.plan import Plan
from seqpar.planner.predict import Load
from seqpar.profiling import order, trace
from seqpar.profiling.clocks import shifts
from seqpar.profiling.columns import Columns, columns, mean
from seqpar.profiling.rates import Rate, rates
from seqpar.profiling.trace import BLOCK, CLOCK, RankTrace
from seqpar.profiling.waits import Timeline, timelines

T = TypeVar("T")


@dataclass(frozen=True)
class BlockTime:
    """Where the ms of one block in one step of one rank went."""

    rank: int
    step: int
    block: str
    columns: Columns


@dataclass(frozen=True)
class Profile:
    """Where the time went.

    rows: every block of every step and rank. late: for each rank, rank -> ms a step that it was waited for. rates: the
    work of a rank beside what the machine reaches, by `source`; empty where it is not known. graph: whether steps were
    replayed. clock_us: by how much the clocks of two ranks may be wrong. notes: what a reader should know.
    """

    rows: tuple[BlockTime, ...]
    late: tuple[dict[int, float], ...]
    rates: tuple[Rate, ...]
    source: str
    graph: bool
    clock_us: float
    notes: tuple[str, ...]
    plan: Plan | None = None

    @property
    def ranks(self) -> list[int]:
        """Return the ranks."""
        return list(range(len(self.late)))

    @property
    def steps(self) -> list[int]:
        """Return the numbers of the measured steps."""
        return sorted({row.step for row in self.rows})

    def step(self, rank: int, step: int) -> Columns:
        """Return the columns of a whole step."""
        return sum((row.columns for row in self.rows if (row.rank, row.step) == (rank, step)), Columns())

    def mean(self, rank: int) -> Columns:
        """Return the mean of a rank's steps."""
        return mean([self.step(rank, step) for step in self.steps])

    def blocks(self, rank: int) -> dict[str, Columns]:
        """Return block -> the mean of its columns over a rank's steps, in the order in which blocks run."""
        found: dict[str, Columns] = {}
        for row in self.rows:
            if row.rank == rank:
                found[row.block] = found.get(row.block, Columns()) + row.columns
        return {block: each * (1 / len(self.steps)) for block, each in found.items()}


def by_class(blocks: Mapping[str, T]) -> dict[str, list[T]]:
    """Return blocks' values by their classes, such as "19 x FluxTransformerBlock"."""
    found = defaultdict[str, list[T]](list)
    for block, each in blocks.items():
        found[block.rpartition(" ")[0] or block].append(each)
    return {f"{len(each)} x {kind}" if len(each) > 1 else kind: each for kind, each in found.items()}


def told(recorded: Mapping[str, Any], first: int) -> RankTrace:
    """Return what a rank's trace tells of the steps from the first measured one on; those before it know the blocks."""
    blocks = trace.spans(recorded, BLOCK)
    every = trace.events(recorded, order.numbered(blocks))
    known = order.reference(event for event in every if event.step < first and not event.graph)
    plain = [replace(event, block=order.unnumbered(event.block)) for event in every if event.step >= first]
    ran, reason = order.attributed(plain, known)
    met = tuple((span.start, span.end) for span in trace.spans(recorded, CLOCK).all)
    on_gpu, notes = trace.is_on_gpu(recorded), () if reason is None else (reason,)
    ended = {step: window for step, window in trace.windows(recorded, ran).items() if step >= first}
    return RankTrace(
        recorded["baseTimeNanoseconds"], met, ended, trace.renamed(ran), trace.marks(ran, blocks, on_gpu), notes
    )


def profile_of(ranks: Sequence[RankTrace], plan: Plan | None, load: Load | None) -> tuple[Profile, list[float]]:
    """Return the profile of all ranks, and what brings their traces onto one clock (`clocks.merged`)."""
    moved, error = shifts(ranks)
    stores = plan is None or plan.transport.name == "peer"
    lines = timelines(ranks, moved, None if plan is None else plan.layout, stores)
    count = max(1, len(ranks[0].steps))
    late = tuple({rank: us / count / 1e3 for rank, us in line.late.items()} for line in lines)
    rows = tuple(row for rank, one in enumerate(ranks) for row in _rows(rank, one, lines[rank], moved[rank]))
    notes = tuple(dict.fromkeys(note for each in ranks for note in each.notes))
    graph = any(event.graph for each in ranks for event in each.events)
    known = () if plan is None or load is None else rates(plan.ranking, load, plan.layout)
    source = "" if plan is None else plan.ranking.rates.source
    return Profile(rows, late, known, source, graph, error, notes, plan), moved


def _rows(rank: int, one: RankTrace, line: Timeline, by: float) -> list[BlockTime]:
    """Return the rows of a rank."""
    marks, rows = [(moment + by, block) for moment, block in one.marks], list[BlockTime]()
    for step, (start, end) in one.steps.items():
        found = columns(line.intervals, start + by, end + by, marks)
        rows += [BlockTime(rank, step, block, each * 1e-3) for block, each in found.items()]
    return rows
