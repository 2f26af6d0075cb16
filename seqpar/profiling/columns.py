"""Adds intervals of time up to columns: every instant of a window counts once, in one column.

Kernels may overlap, on streams of one device or on threads of one process. An instant belongs to the first kind of
`ORDER` that is active then, and to the gaps if none is. An exchange that runs while something computes is hidden: that
time is listed beside the columns and is no part of their sum, which is the length of the window.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Literal

Kind = Literal["products", "attention", "elementwise", "exchange", "waiting"]
COMPUTES: tuple[Kind, ...] = ("products", "attention", "elementwise")
ORDER: tuple[Kind, ...] = (*COMPUTES, "exchange", "waiting")
OUTSIDE = "outside"  # the block of what runs in none
Marks = Sequence[tuple[float, str]]
"""Moments in ascending order, each with the block that holds from then on."""


@dataclass(frozen=True)
class Interval:
    """A time in which something runs."""

    start: float
    end: float
    kind: Kind


@dataclass(frozen=True)
class Columns:
    """Where a time went, all in one unit. exposed: exchanges behind which nothing computes. hidden: those behind which
    something does, which is no part of the sum."""

    products: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    exposed: float = 0.0
    waiting: float = 0.0
    gaps: float = 0.0
    hidden: float = 0.0

    @property
    def wall(self) -> float:
        """Return the whole time: the sum of all columns but `hidden`."""
        return sum(getattr(self, name) for name in NAMES)

    def __add__(self, other: Columns) -> Columns:
        return Columns(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))

    def __mul__(self, factor: float) -> Columns:
        return Columns(*(getattr(self, each.name) * factor for each in fields(self)))


NAMES = tuple(each.name for each in fields(Columns) if each.name != "hidden")


def mean(every: Sequence[Columns]) -> Columns:
    """Return the mean of some columns."""
    return sum(every, Columns()) * (1 / max(1, len(every)))


def columns(intervals: Iterable[Interval], start: float, end: float, marks: Marks = ()) -> dict[str, Columns]:
    """Return block -> columns of the window from `start` to `end`; the sums of all blocks add up to its length."""
    times: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    active, block, before = Counter[str](), OUTSIDE, start
    for moment, change, name in _changes(intervals, start, end, marks):
        if moment > before:
            _add(times[block], active, moment - before)
            before = moment
        if change:
            active[name] += change
        else:
            block = name
    if end > before:
        _add(times[block], active, end - before)
    return {block: Columns(**each) for block, each in times.items()}


def _changes(intervals: Iterable[Interval], start: float, end: float, marks: Marks) -> list[tuple[float, int, str]]:
    """Return (moment, +1 or -1, kind) where intervals begin and end, and (moment, 0, block) where blocks begin."""
    changes = [(max(start, moment), 0, block) for moment, block in marks if moment < end]
    for each in intervals:
        first, last = max(start, each.start), min(end, each.end)
        if first < last:
            changes += [(first, 1, each.kind), (last, -1, each.kind)]
    return sorted(changes, key=lambda change: change[0])


def _add(times: defaultdict[str, float], active: Mapping[str, int], spent: float) -> None:
    """Count a time in which the same kinds are active."""
    kind = next((each for each in ORDER if active[each]), "gaps")
    times["exposed" if kind == "exchange" else kind] += spent
    if kind in COMPUTES and active["exchange"]:
        times["hidden"] += spent
