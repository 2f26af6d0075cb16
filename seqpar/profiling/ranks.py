"""Merges the traces of all ranks: one clock, exchanges split into waiting for a rank and moving data, and `Columns`.

Columns say how long each kind of work took. Every instant of a step counts once.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from seqpar.profiling.trace import OUTSIDE, Event, RankTrace, What
from seqpar.types.facts import Layout

Kind = Literal["products", "attention", "elementwise", "exchange", "waiting"]
COMPUTES: tuple[Kind, ...] = ("products", "attention", "elementwise")
ORDER: tuple[Kind, ...] = (*COMPUTES, "exchange", "waiting")
KINDS: dict[What, Kind] = {
    "products": "products",
    "attention": "attention",
    "elementwise": "elementwise",
    "exchange": "exchange",
    "copy": "exchange",
    "store": "elementwise",
}
LOCAL_COPY = "dtod"  # in the name of a copy that the driver takes for one within a device
Meetings = Sequence[tuple[float, float]]
Part = tuple[float, float]


Marks = Sequence[tuple[float, str]]
"""Moments in ascending order, each with the block that begins there."""


@dataclass(frozen=True)
class Interval:
    start: float
    end: float
    kind: Kind


# The clock of rank 0 -----------------------------------------------------------------------------------------------


def offset(first: Meetings, other: Meetings) -> tuple[float, float]:
    """How far the other clock is ahead of the first one, and the largest possible error of this number.

    Both have the (begin, end) of the same meetings, each by its own clock. Clocks that may be equal are taken as equal.
    """
    # no rank leaves a meeting before all have entered it
    least = max(begin - end for (_, end), (begin, _) in zip(first, other, strict=True))
    most = min(end - begin for (begin, _), (_, end) in zip(first, other, strict=True))
    ahead = 0.0 if least <= 0 <= most else (least + most) / 2
    return ahead, max(abs(most - ahead), abs(least - ahead))


def shifts(ranks: Sequence[RankTrace]) -> tuple[list[float], float]:
    """What to add to each rank's times to have them by rank 0's clock, and the largest error; in us."""
    first, found, worst = ranks[0], [0.0], 0.0
    for other in ranks[1:]:
        base = (other.base_ns - first.base_ns) / 1e3
        ahead, error = offset(first.clocks, [(begin + base, end + base) for begin, end in other.clocks])
        found.append(base - ahead)
        worst = max(worst, error)
    return found, worst


def merged(traces: Sequence[Mapping[str, Any]], moved: Sequence[float]) -> dict[str, Any]:
    """One trace of all ranks, whose times begin at zero; moved: the result of `shifts`."""
    starts = [
        event["ts"] + by
        for trace, by in zip(traces, moved, strict=True)
        for event in trace["traceEvents"]
        if event.get("ph") == "X" and "ts" in event
    ]
    first, events = min(starts, default=0.0), list[dict[str, Any]]()
    for rank, (trace, by) in enumerate(zip(traces, moved, strict=True)):
        # process numbers and arrows must not collide between ranks
        processes = dict.fromkeys(str(event.get("pid")) for event in trace["traceEvents"])
        numbers = {pid: number for number, pid in enumerate(processes)}
        for original in trace["traceEvents"]:
            event = dict(original, pid=1000 * (rank + 1) + numbers[str(original.get("pid"))])
            if event.get("ph") == "M":
                event.pop("ts", None)
                if event["name"] == "process_name":
                    event["args"] = {"name": f"rank {rank}: {event['args']['name']}"}
            elif "ts" in event:
                event["ts"] += by - first
            if "id" in event:
                event["id"] = f"{rank}.{event['id']}"
            events.append(event)
    return {"schemaVersion": 1, "displayTimeUnit": "ms", "traceEvents": events}


# Waiting -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timeline:
    """The intervals of one rank by rank 0's clock. late: rank -> us for which this rank waited for it."""

    intervals: tuple[Interval, ...]
    late: Mapping[int, float]


def groups_of(rank: int, world: int, layout: Layout | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ranks that meet this one in exchanges inside blocks, and outside; without a layout all ranks."""
    if layout is None:
        return tuple(range(world)), tuple(range(world))
    sequence, replica = layout.sequence, layout.sequence * layout.cfg
    first, whole = rank // sequence * sequence, rank // replica * replica
    return tuple(range(first, first + sequence)), tuple(range(whole, whole + replica))


def timelines(
    ranks: Sequence[RankTrace], moved: Sequence[float], layout: Layout | None, stores: bool = True
) -> list[Timeline]:
    """The intervals of every rank. moved: the result of `shifts`.

    stores: whether kernels may store into other ranks' memory, as those of the peer transport do.
    """
    every = [
        [_at(event, by, len(ranks) == 1) for event in trace.events] for trace, by in zip(ranks, moved, strict=True)
    ]
    turns = [list(_turns(events, stores)) for events in every]
    by_turn = [
        {turn: event for turn, event in zip(*pair, strict=True) if turn} for pair in zip(turns, every, strict=True)
    ]
    copies = [[(event.start, event.end) for event in events if event.what == "copy"] for events in every]
    found = list[Timeline]()
    for rank, events in enumerate(every):
        groups = groups_of(rank, len(ranks), layout)
        sent = [[copy for other in group for copy in copies[other]] for group in groups]
        late, intervals = defaultdict[int, float](float), list[Interval]()
        for event, turn in zip(events, turns[rank], strict=True):
            where = event.block == OUTSIDE
            # the same exchange on each rank of the group, if all of them have it
            same = {other: by_turn[other][turn] for other in groups[where] if turn in by_turn[other]} if turn else {}
            whole = len(same) == len(groups[where]) > 1
            intervals += _parts(event, same if whole else {}, sent[where], late)
        found.append(Timeline(tuple(intervals), dict(late)))
    return found


def _at(event: Event, by: float, alone: bool) -> Event:
    """An event by rank 0's clock; a copy outside blocks is one in a rank's own memory."""
    local = event.what == "copy" and (alone or (event.block == OUTSIDE and LOCAL_COPY in event.name.lower()))
    return replace(event, start=event.start + by, end=event.end + by, what="elementwise" if local else event.what)


def _turns(events: Iterable[Event], stores: bool) -> Iterator[tuple[int, str, int] | None]:
    """(step, name, number among those of the name) of each exchange; None for events that meet no other rank."""
    counts = Counter[tuple[int, str]]()
    for event in events:
        meets = event.what == "exchange" or (stores and event.what == "store")
        counts[event.step, event.name] += meets
        yield (event.step, event.name, counts[event.step, event.name]) if meets else None


def _parts(
    event: Event, same: Mapping[int, Event], sent: Sequence[Part], late: defaultdict[int, float]
) -> Iterator[Interval]:
    """Split an event into its own work, waiting for the last rank, and moving data; count the waiting in `late`.

    While a copy of these ranks (`sent`) is on its way, no rank waits. A kernel that stores and then meets the others
    works for as long as the fastest rank's.
    """
    if not same:
        yield Interval(event.start, event.end, KINDS[event.what])
        return
    work = min(other.end - other.start for other in same.values()) if event.what == "store" else 0.0
    last = max(same, key=lambda rank: same[rank].start)
    begin, until = min(event.end, event.start + work), min(event.end, same[last].start + work)
    waited = list(without(begin, until, sent)) if begin < until else []
    late[last] += sum(end - start for start, end in waited)
    yield Interval(event.start, begin, KINDS[event.what])
    yield from (Interval(start, end, "waiting") for start, end in waited)
    yield from (Interval(start, end, "exchange") for start, end in without(begin, event.end, waited))


def without(start: float, end: float, others: Iterable[Part]) -> Iterator[Part]:
    """The parts of a time in which none of the others is."""
    for first, last in sorted(others):
        if last <= start or first >= end:
            continue
        if first > start:
            yield start, first
        start = max(start, last)
    if start < end:
        yield start, end


# Columns -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Columns:
    """Times of one unit. exposed: exchanges while nothing computes. hidden: exchanges while something computes; not
    part of the sum."""

    products: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    exposed: float = 0.0
    waiting: float = 0.0
    gaps: float = 0.0
    hidden: float = 0.0

    @property
    def wall(self) -> float:
        """The whole time: the sum of all columns but `hidden`."""
        return sum(getattr(self, name) for name in NAMES)

    def __add__(self, other: Columns) -> Columns:
        return Columns(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    def __mul__(self, factor: float) -> Columns:
        return Columns(*(getattr(self, field.name) * factor for field in fields(self)))


NAMES = tuple(field.name for field in fields(Columns) if field.name != "hidden")


def mean(columns: Sequence[Columns]) -> Columns:
    return sum(columns, Columns()) * (1 / max(1, len(columns)))


def columns(intervals: Iterable[Interval], start: float, end: float, marks: Marks = ()) -> dict[str, Columns]:
    """Block -> columns of the window from `start` to `end`; the blocks add up to its length."""
    # (moment, +1 or -1, kind) where intervals begin and end, (moment, 0, block) where blocks begin
    changes = [(max(start, moment), 0, block) for moment, block in marks if moment < end]
    for interval in intervals:
        first, last = max(start, interval.start), min(end, interval.end)
        if first < last:
            changes += [(first, 1, interval.kind), (last, -1, interval.kind)]
    changes.sort(key=lambda change: change[0])
    times: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    active, block, before = Counter[str](), OUTSIDE, start
    for moment, change, name in [*changes, (end, 0, OUTSIDE)]:
        if moment > before:
            kind = next((kind for kind in ORDER if active[kind]), "gaps")
            times[block]["exposed" if kind == "exchange" else kind] += moment - before
            if kind in COMPUTES and active["exchange"]:
                times[block]["hidden"] += moment - before
            before = moment
        if change:
            active[name] += change
        else:
            block = name
    return {block: Columns(**spent) for block, spent in times.items()}
