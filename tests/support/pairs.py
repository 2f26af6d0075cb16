"""Lists of test cases that cover all pairs of values that matter, without all combinations of all parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

import pytest

ParameterSet = type(pytest.param())


def covering(*columns: Iterable[Any], turns: Sequence[Any], rest: Any = None) -> list[Any]:
    """Return every combination of the columns, each with one value of `turns`, which change from case to case.

    The sum of a combination's indices chooses the value, so every value of a column meets every value of `turns` if
    another column has as many values as `turns`. A value may be a `pytest.param` of several arguments and marks.
    rest: a mark; cases with the other values of `turns` follow with this mark, and values with marks are always there.
    """
    usual = [value for value in turns if not _param(value).marks]
    cases, others = [], []
    for combination in product(*map(enumerate, columns)):
        chosen = usual[sum(index for index, _ in combination) % len(usual)]
        values = [value for _, value in combination]
        cases.append(_joined(*values, chosen))
        if rest is not None:
            others += [_joined(*values, value, marks=[rest]) for value in turns if value is not chosen]
    return cases + others


def _param(value: Any) -> Any:
    return value if isinstance(value, ParameterSet) else pytest.param(value)


def _joined(*values: Any, marks: Sequence[Any] = ()) -> Any:
    params = [_param(value) for value in values]
    arguments = [argument for each in params for argument in each.values]
    return pytest.param(*arguments, marks=[*marks, *(mark for each in params for mark in each.marks)])
