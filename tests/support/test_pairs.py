"""Tests of covering lists of cases: all pairs are there, and what a mark leaves out is there with it."""

from __future__ import annotations

import pytest

from tests.support.pairs import covering


def test_all_pairs_are_covered_by_as_many_cases_as_the_columns_have_combinations() -> None:
    worlds, strategies, transports = (2, 3, 4), ("a", "b", "c", "d"), ("x", "y")
    cases = [case.values for case in covering(worlds, strategies, turns=transports)]
    assert len(cases) == 12
    for first, second, together in ((0, 1, 12), (0, 2, 6), (1, 2, 8)):
        assert len({(case[first], case[second]) for case in cases}) == together


def test_marks_stay_and_the_rest_has_one() -> None:
    gpu = pytest.mark.gpu
    sizes = [1, pytest.param(2, "two", marks=gpu)]
    cases = covering(sizes[1:], turns=(3, pytest.param(4, marks=gpu)), rest=gpu)
    assert [(case.values, len(case.marks)) for case in cases] == [((2, "two", 3), 1), ((2, "two", 4), 3)]
    assert [len(case.marks) for case in covering(sizes[:1], turns=(3, 4), rest=gpu)] == [0, 1]
