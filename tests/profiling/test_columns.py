"""Tests that an interval of time counts once, in the right column and block."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqpar.profiling.ranks import COMPUTES, NAMES, ORDER, Columns, Interval, columns
from seqpar.profiling.trace import OUTSIDE

MOMENTS = st.integers(0, 60)
INTERVALS = st.lists(st.builds(Interval, MOMENTS, MOMENTS, st.sampled_from(ORDER)), max_size=30)
MARKS = st.lists(st.tuples(MOMENTS, st.sampled_from(["a", "b", OUTSIDE])), max_size=8).map(
    lambda marks: sorted(marks, key=lambda mark: mark[0])
)
START, END = 10, 50


def by_instants(intervals: list[Interval], marks: list[tuple[int, str]]) -> dict[str, Columns]:
    """Return what `columns` returns, found by looking at every instant between two whole moments."""
    found: dict[str, Columns] = {}
    for moment in range(START, END):
        kinds = {each.kind for each in intervals if each.start <= moment < each.end}
        kind = next((each for each in ORDER if each in kinds), "gaps")
        column = "exposed" if kind == "exchange" else kind
        hidden = float(kind in COMPUTES and "exchange" in kinds)
        block = next((block for start, block in reversed(marks) if start <= moment), OUTSIDE)
        found[block] = found.get(block, Columns()) + replace(Columns(hidden=hidden), **{column: 1.0})
    return found


@given(INTERVALS, MARKS)
def test_every_instant_counts_once(intervals: list[Interval], marks: list[tuple[int, str]]) -> None:
    found = columns(intervals, START, END, marks)
    assert found == by_instants(intervals, marks)
    assert sum(each.wall for each in found.values()) == END - START
    shuffled = random.Random(0).sample(intervals, len(intervals))
    assert columns(shuffled, START, END, marks) == found


@given(INTERVALS)
def test_what_runs_twice_at_a_time_counts_once(intervals: list[Interval]) -> None:
    assert columns([*intervals, *intervals], START, END) == columns(intervals, START, END)


def test_an_exchange_is_hidden_while_something_computes_and_exposed_after_it() -> None:
    intervals = [Interval(0, 6, "products"), Interval(4, 10, "exchange"), Interval(12, 14, "waiting")]
    (found,) = columns(intervals, 0, 15).values()
    assert found == Columns(products=6, hidden=2, exposed=4, waiting=2, gaps=3)
    assert found.wall == 15
    assert set(NAMES) == {"products", "attention", "elementwise", "exposed", "waiting", "gaps"}


def test_an_empty_window_has_no_columns() -> None:
    assert columns([Interval(0, 6, "products")], 3, 3) == {}


@pytest.mark.parametrize("factor", [0.5, 2])
def test_columns_are_scaled_as_a_whole(factor: float) -> None:
    found = Columns(1, 2, 3, 4, 5, 6, 7) * factor
    assert (found.wall, found.hidden) == (21 * factor, 7 * factor)
