"""Tests that exchanges are parted into waiting for a rank and moving data, and that every instant counts once."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from seqpar.profiling.ranks import (
    COMPUTES,
    ORDER,
    Columns,
    Interval,
    columns,
    groups_of,
    merged,
    offset,
    shifts,
    timelines,
    without,
)
from seqpar.profiling.trace import OUTSIDE
from seqpar.types.facts import Layout
from tests.profiling import traces
from tests.profiling.traces import Kernel, kernel, launch, meeting, rank

NCCL, SPIN, PUSH, COPY = "ncclDevKernel_SendRecv", "flags_kernel", "push_kernel", "Memcpy PtoP (Device -> Device)"


def parted(*ranks: Sequence[Kernel], aheads: tuple[float, ...] = (0, 0, 0, 0)) -> list[Columns]:
    """Return the columns of each rank in a window of 100 us. aheads: by how much the ranks' clocks are."""
    every = [rank(kernels, ahead=ahead) for kernels, ahead in zip(ranks, aheads, strict=False)]
    lines = timelines(every, [-ahead for ahead in aheads[: len(every)]], None)
    return [sum(columns(line.intervals, 0, 100).values(), Columns()) for line in lines]


def test_a_collective_waits_for_the_last_rank_and_then_exchanges() -> None:
    first, last = parted([("gemm", 0, 10), (NCCL, 10, 50)], [("gemm", 0, 40), (NCCL, 40, 51)])
    assert first == Columns(products=10, waiting=30, exposed=10, gaps=50)
    assert last == Columns(products=40, exposed=11, gaps=49)


def test_clocks_that_differ_change_nothing() -> None:
    ran = [("gemm", 0, 10), (NCCL, 10, 50)], [("gemm", 0, 40), (NCCL, 40, 51)]
    assert parted(*ran, aheads=(0, 1e6)) == parted(*ran)


def test_a_kernel_that_stores_and_meets_works_as_long_as_the_fastest_and_then_waits() -> None:
    first, last = parted([(PUSH, 10, 45)], [(PUSH, 30, 44)])
    assert first == Columns(elementwise=14, waiting=20, exposed=1, gaps=65)  # its last producer ended at 44
    assert last == Columns(elementwise=14, gaps=86)


def test_kernels_that_store_into_no_other_memory_do_not_wait() -> None:
    every = [rank([(PUSH, 10, 45)]), rank([(PUSH, 30, 44)])]
    (found,) = columns(timelines(every, [0, 0], None, stores=False)[0].intervals, 0, 100).values()
    assert found == Columns(elementwise=35, gaps=65)


def test_a_copy_on_its_way_is_no_waiting() -> None:
    first, last = parted([(SPIN, 0, 60)], [("gemm", 0, 30), (COPY, 30, 55), (SPIN, 58, 60)])
    assert first == Columns(waiting=33, exposed=27, gaps=40)
    assert last == Columns(products=30, exposed=27, gaps=43)


def test_a_copy_within_a_device_is_elementwise_outside_of_blocks_and_on_one_rank() -> None:
    own = [("Memcpy DtoD (Device -> Device)", 0, 10)]
    for ranks, inside, column in ((2, True, "exposed"), (2, False, "elementwise"), (1, True, "elementwise")):
        (line, *_) = timelines([rank(own, inside)] * ranks, [0.0] * ranks, None)
        (found,) = columns(line.intervals, 0, 10).values()
        assert getattr(found, column) == 10


def test_nothing_waits_while_it_computes() -> None:
    first, _ = parted([(NCCL, 0, 50), ("gemm", 0, 35)], [(NCCL, 40, 50)])
    assert first == Columns(products=35, waiting=5, exposed=10, gaps=50)


def test_the_late_rank_is_named() -> None:
    every = [rank([(NCCL, 10, 50)]), rank([(NCCL, 40, 51)]), rank([(NCCL, 20, 50)])]
    assert [dict(line.late) for line in timelines(every, [0, 0, 0], None)] == [{1: 30}, {1: 0}, {1: 20}]


def test_exchanges_inside_blocks_are_those_of_a_sequence() -> None:
    layout = Layout(1, 2, 1, 2, "ulysses", "nccl")
    assert groups_of(2, 4, layout) == ((2, 3), (0, 1, 2, 3))
    times = [(10, 52), (12, 52), (40, 51), (41, 51)]
    for inside, waited in ((True, [2, 0, 1, 0]), (False, [31, 29, 1, 0])):
        every = [rank([(NCCL, *each)], inside) for each in times]
        assert [sum(line.late.values()) for line in timelines(every, [0] * 4, layout)] == waited


def test_an_exchange_that_others_did_not_make_is_no_waiting() -> None:
    first, _ = parted([(NCCL, 0, 50)], [("gemm", 0, 40)])
    assert first == Columns(exposed=50, gaps=50)


@given(st.integers(0, 30), st.integers(0, 30), st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=6))
def test_what_is_left_of_a_time(start: int, end: int, others: list[tuple[int, int]]) -> None:
    whole = [pair for pair in others if pair[0] < pair[1]]
    left = [x for a, b in without(start, end, whole) for x in range(int(a), int(b))]
    assert left == [x for x in range(start, end) if not any(a <= x < b for a, b in whole)]


# Clocks -----------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.floats(0, 50), st.floats(0, 50), st.floats(0, 9), st.floats(0, 9)), min_size=1, max_size=20),
    st.floats(-1e6, 1e6),
)
def test_the_offset_of_a_clock_is_within_its_error(delays: list[tuple[float, ...]], ahead: float) -> None:
    """In a meeting no rank leaves before all have come: (coming of both, what they take to leave)."""
    first, other = [], []
    for turn, (mine, theirs, out, back) in enumerate(delays):
        met = 100 * turn + max(mine, theirs)
        first.append((100 * turn + mine, met + out))
        other.append((100 * turn + theirs + ahead, met + back + ahead))
    found, error = offset(first, other)
    assert abs(found - ahead) <= error + 1e-6
    assert error <= 120 + 1e-6


def test_clocks_of_which_nothing_shows_a_difference_are_equal() -> None:
    assert offset([(0, 10)], [(1, 12)]) == (0, 12)
    assert offset([(0, 10)], [(100, 104)]) == (97, 7)


def test_traces_of_all_ranks_are_one_trace_on_one_clock() -> None:
    events = [
        {"ph": "M", "name": "process_name", "pid": 7, "tid": 0, "ts": 5, "args": {"name": "python"}},
        meeting(100, 110),
        launch(1, 120),
        {"ph": "s", "id": 1, "pid": 7, "tid": 7, "ts": 120, "name": "ac2g", "cat": "ac2g"},
        kernel(1, NCCL, 130, 140),
    ]
    late = [dict(each, ts=each["ts"] + 4000) for each in events]
    ranks = [rank([]), rank([], base_ns=-1000, ahead=4001)]  # its times count from 1 us earlier
    moved, _ = shifts(ranks)
    whole = merged([traces.trace(events), traces.trace(late)], moved)["traceEvents"]
    assert moved == [0, -4001]
    assert [each["ts"] for each in whole if each["ph"] == "X"] == [1, 21, 31, 0, 20, 30]
    assert [each["args"]["name"] for each in whole if each["ph"] == "M"] == ["rank 0: python", "rank 1: python"]
    assert {each["pid"] for each in whole} == {1000, 1001, 2000, 2001}
    assert [each["id"] for each in whole if each["ph"] == "s"] == ["0.1", "1.1"]


# Columns ----------------------------------------------------------------------------------------------------------

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
