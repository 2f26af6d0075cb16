"""Tells in the exchanges of all ranks what was waiting for a rank, and what was moving data.

All ranks make the same exchanges in the same order. Data can move once the last rank has come to an exchange, which is
when its kernels before it have ended; until then the others wait for that rank. A kernel that stores into other ranks'
memory and meets them at its end first does its own work, as long as that of the fastest rank takes; then it waits. What
a copy to another rank takes is no waiting, on either side.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from seqpar.profiling.columns import OUTSIDE, Interval
from seqpar.profiling.kinds import AS_KIND
from seqpar.profiling.trace import Event, RankTrace
from seqpar.types.facts import Layout

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
