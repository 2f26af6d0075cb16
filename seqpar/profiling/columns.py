"""`Columns`: how long each kind of work took. Every instant of a step counts once."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Literal

from seqpar.profiling.trace import OUTSIDE

Kind = Literal["products", "attention", "elementwise", "exchange", "waiting"]
COMPUTES: tuple[Kind, ...] = ("products", "attention", "elementwise")
ORDER: tuple[Kind, ...] = (*COMPUTES, "exchange", "waiting")
Marks = Sequence[tuple[float, str]]
"""Moments in ascending order, each with the block that begins there."""


@dataclass(frozen=True)
class Interval:
    start: float
    end: float
    kind: Kind


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
