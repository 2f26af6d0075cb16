"""`Profile`: where the time of the measured steps went, for every rank, step and block of the model."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, TypeVar

import numpy as np

from seqpar.planner import analysis
from seqpar.planner.costs import attention_calls, busiest, layers, merge_bytes
from seqpar.planner.plan import Plan
from seqpar.planner.predict import STATE, Load
from seqpar.planner.search import Ranking
from seqpar.profiling import trace
from seqpar.profiling.trace import (
    AS_KIND,
    BLOCK,
    CLOCK,
    OUTSIDE,
    Columns,
    Event,
    Interval,
    RankTrace,
    Spans,
    columns,
    mean,
    shifts,
)
from seqpar.types.facts import Blocks, Cost, Layer, Layout, Work, core

ORDERED = ("products", "attention", "elementwise", "store")  # kernels that come in the same order in each run
ENOUGH = 0.9  # of the kernels of a known run have to be found at their places
Reference = Sequence[tuple[str, str]]
"""(kernel, block) of a run whose blocks are known, in order."""


def reference(ran: Iterable[Event]) -> list[tuple[str, str]]:
    """Return the kernels of each block's last run: earlier ones may have tuned themselves.

    ran: what was launched by the host itself, with the number of the run before the name of its block.
    """
    runs: defaultdict[str, list[Event]] = defaultdict(list)
    for event in ran:
        if event.block not in ("", OUTSIDE) and event.what in ORDERED:
            runs[event.block].append(event)
    last = {unnumbered(run): kernels for run, kernels in sorted(runs.items(), key=lambda x: x[1][0].start)}
    return [(event.name, block) for block, kernels in last.items() for event in kernels]


def numbered(blocks: Spans) -> Spans:
    """Return blocks with the number of their run before their names."""
    return Spans(replace(span, name=f"{number} {span.name}") for number, span in enumerate(blocks.all))


def unnumbered(block: str) -> str:
    """Return the name of a block without the number of its run."""
    return block.partition(" ")[2] if block[:1].isdecimal() else block


def attributed(ran: Sequence[Event], known: Reference) -> tuple[list[Event], str | None]:
    """Return the events of replays with their blocks, and why those of some replays are not known, or None."""
    blocks, reason, seen = dict[int, str](), None, dict[tuple[str, ...], list[str] | None]()
    indexed = [(event.graph, index) for index, event in enumerate(ran) if event.graph and event.what in ORDERED]
    for _, group in groupby(sorted(indexed), key=lambda pair: pair[0]):
        indices = [index for _, index in group]
        names = tuple(ran[index].name for index in indices)
        if names not in seen:
            seen[names] = by_order(known, names)
        found = seen[names]
        if found is None:
            reason = "blocks of replayed graphs are not known: their kernels ran in no order that was seen before"
        else:
            blocks.update(zip(indices, found, strict=True))
    return _filled(ran, blocks), reason


def by_order(known: Reference, names: Sequence[str]) -> list[str] | None:
    """Return the block of each kernel, or None if they are not those of the known run.

    Both runs have a longest common subsequence. A kernel between two of it belongs to the block of the first one.
    """
    pairs = common([name for name, _ in known], names)
    if not pairs or len(pairs) < ENOUGH * min(len(known), len(names)):
        return None
    matched, last = {ours: known[theirs][1] for theirs, ours in pairs}, pairs[-1][1]
    found, block = list[str](), OUTSIDE
    for index in range(len(names)):
        block = matched.get(index, block if index < last else OUTSIDE)
        found.append(block)
    return found


def common(first: Sequence[str], second: Sequence[str]) -> list[tuple[int, int]]:
    """Return the places of a longest common subsequence in both, as early as they can be."""
    codes = {name: code for code, name in enumerate(dict.fromkeys((*first, *second)))}
    mine, theirs = ([codes[name] for name in each] for each in (first, second))
    lengths = np.zeros((len(mine) + 1, len(theirs) + 1), dtype=np.int32)
    for row, code in enumerate(mine, start=1):
        before = lengths[row - 1]
        lengths[row, 1:] = np.maximum.accumulate(np.maximum(before[1:], before[:-1] + (np.array(theirs) == code)))
    pairs, (row, column) = list[tuple[int, int]](), (len(mine), len(theirs))
    while lengths[row, column]:
        if lengths[row, column - 1] == lengths[row, column]:
            column -= 1
        elif lengths[row - 1, column] == lengths[row, column]:
            row -= 1
        else:
            row, column = row - 1, column - 1
            pairs.append((row, column))
    return pairs[::-1]


def _filled(ran: Sequence[Event], blocks: Mapping[int, str]) -> list[Event]:
    """Give events of replays the blocks that were found, and others that of the last event before them."""
    every, last = list[Event](), OUTSIDE
    for index, event in enumerate(ran):
        last = blocks.get(index, last if event.graph else event.block)
        every.append(replace(event, block=last))
    return every


Turn = tuple[int, str, int]
"""An exchange of a step: the step, the name, and which one of that name."""
Part = tuple[float, float]
OWN = "dtod"  # in the name of a copy that the driver takes for one within a device


@dataclass(frozen=True)
class Timeline:
    """The intervals of one rank by rank 0's clock. late: rank -> for how many us this rank waited for it."""

    intervals: tuple[Interval, ...]
    late: Mapping[int, float]


def groups_of(rank: int, world: int, layout: Layout | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ranks that meet this one in exchanges inside of blocks, and outside; without a layout all ranks."""
    if layout is None:
        return tuple(range(world)), tuple(range(world))
    sequence, replica = layout.sequence, layout.sequence * layout.cfg
    first, whole = rank // sequence * sequence, rank // replica * replica
    return tuple(range(first, first + sequence)), tuple(range(whole, whole + replica))


def timelines(
    ranks: Sequence[RankTrace], moved: Sequence[float], layout: Layout | None, stores: bool = True
) -> list[Timeline]:
    """Return the intervals of every rank; moved: what `clocks.shifts` returned.

    stores: whether kernels may store into other ranks' memory, as those of the peer transport do.
    """
    alone = len(ranks) == 1
    every = [[_at(event, by, alone) for event in each.events] for each, by in zip(ranks, moved, strict=True)]
    turns = [_turns(each, stores) for each in every]
    by_turn = [
        {turn: event for turn, event in zip(*pair, strict=True) if turn} for pair in zip(turns, every, strict=True)
    ]
    copies = [[event for event in each if event.what == "copy"] for each in every]
    found = []
    for rank, ran in enumerate(every):
        groups = groups_of(rank, len(ranks), layout)
        sent = [[(copy.start, copy.end) for other in group for copy in copies[other]] for group in groups]
        late, intervals = defaultdict[int, float](float), list[Interval]()
        for event, turn in zip(ran, turns[rank], strict=True):
            group, own = groups[event.block == OUTSIDE], sent[event.block == OUTSIDE]
            same = {other: by_turn[other][turn] for other in group if turn in by_turn[other]} if turn else {}
            intervals += _parts(event, same if len(same) == len(group) > 1 else {}, own, late)
        found.append(Timeline(tuple(intervals), dict(late)))
    return found


def _at(event: Event, by: float, alone: bool) -> Event:
    """Return an event by rank 0's clock; a copy outside of blocks is one in a rank's own memory."""
    own = event.what == "copy" and (alone or (event.block == OUTSIDE and OWN in event.name.lower()))
    what = "elementwise" if own else event.what
    return replace(event, start=event.start + by, end=event.end + by, what=what)


def _turns(ran: Iterable[Event], stores: bool) -> list[Turn | None]:
    """Return which exchange each event is; None for what meets nobody."""
    counts, found = Counter[tuple[int, str]](), list[Turn | None]()
    for event in ran:
        meets = event.what == "exchange" or (stores and event.what == "store")
        counts[event.step, event.name] += meets
        found.append((event.step, event.name, counts[event.step, event.name]) if meets else None)
    return found


def _parts(
    event: Event, same: Mapping[int, Event], sent: Sequence[Part], late: defaultdict[int, float]
) -> Iterator[Interval]:
    """Yield the parts of an event: its own work, waiting for a rank, and moving data; count the waiting as `late`.

    same: the same exchange on each rank that meets in it, or none. sent: the copies of these ranks.
    """
    if not same:
        yield Interval(event.start, event.end, AS_KIND[event.what])
        return
    own = min(each.end - each.start for each in same.values()) if event.what == "store" else 0.0
    last = max(same, key=lambda rank: same[rank].start)
    waits, until = min(event.end, event.start + own), min(event.end, same[last].start + own)
    waited = list(without(waits, until, sent)) if waits < until else []
    late[last] += sum(end - start for start, end in waited)
    yield Interval(event.start, waits, AS_KIND[event.what])
    yield from (Interval(start, end, "waiting") for start, end in waited)
    yield from (Interval(start, end, "exchange") for start, end in without(waits, event.end, waited))


def without(start: float, end: float, others: Iterable[Part]) -> Iterator[Part]:
    """Yield what is left of a time where none of the others is."""
    for first, last in sorted(others):
        if last <= start or first >= end:
            continue
        if first > start:
            yield start, first
        start = max(start, last)
    if start < end:
        yield start, end


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
    every = trace.events(recorded, numbered(blocks))
    known = reference(event for event in every if event.step < first and not event.graph)
    plain = [replace(event, block=unnumbered(event.block)) for event in every if event.step >= first]
    ran, reason = attributed(plain, known)
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
