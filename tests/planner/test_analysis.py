"""Tests that docs/analysis.md has the planner's numbers and formulas, and that plans are explained.

The page's predictions are compared with what was measured: lines of docs/benchmarks.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

import pytest

from docs.tools import analysis
from docs.tools import analysis_points as points
from docs.tools.analysis_tables import PAGE, TABLES, operations, page, traffic
from seqpar.planner.costs import parts as parts_of
from seqpar.planner.explain import PARTS, explain, first, half_of_flops, ways
from seqpar.planner.predict import predict
from seqpar.planner.rates import H200
from seqpar.planner.search import name_of
from seqpar.types.facts import Blocks, Cost, Layout
from tests.planner.test_plan import CPU, SEVEN_B, planned


def test_the_page_is_what_the_code_computes() -> None:
    written = PAGE.read_text(encoding="utf-8")
    assert written == page(), "python -m docs.tools.analysis_tables --write"
    assert re.findall(r"<!-- table (\w+) -->", written) == [*TABLES]


def value(formula: str, **letters: int) -> float:
    """Return the value of a formula as the page writes it: "8 b s d² + 4 d²"."""
    python = re.sub(r"(?<=[\w²)]) (?=[\w(])", " * ", formula).replace("²", "**2")
    return eval(python, {}, letters)


def test_the_formulas_are_what_the_code_computes() -> None:
    shape = {"b": 2, "T": 3, "P": 20, "d": 48, "z": 6, "c": 7, "e": 11}
    for row in operations(*shape.values()):
        letters = {**shape, "s": 60}
        assert value(row.flops, **letters) == row.cost.flops, row.name
        assert value(row.elements, **letters) == row.cost.elements, row.name
        assert value(row.elements, **letters | {"d": 49}) != row.cost.elements
    for ranks in (2, 4, 8):
        for sent in traffic(2, 64, ranks):
            assert value(sent.sent, b=2, s=64, d=SEVEN_B.width, N=ranks) == sent.elements, sent.name
            assert value(sent.sent, b=2, s=65, d=SEVEN_B.width, N=ranks) != sent.elements


def test_predictions_are_near_what_was_measured() -> None:
    for point in points.measured_times():
        assert points.planned_ms(point) == pytest.approx(point.value, rel=0.09), point
    assert {point.gpus for point in points.measured_times()} == {1, 2, 4}
    for point in points.measured_shares():
        work, load = points.run_of(point.model)
        layout = Layout(1, point.gpus if load.guidance else 1, 1, 1, "ulysses", "peer")
        row = predict(work, replace(load, tokens=point.tokens), layout, H200)
        assert row.attention / row.ms == pytest.approx(point.value, abs=0.055), point


def test_parts_of_a_step_add_up_to_it() -> None:
    parts = parts_of(SEVEN_B, 2, 256)
    assert sum(parts.values(), Cost(0, 0)) == SEVEN_B.step(2, 256)
    assert parts["attention"].flops == 32 * 4 * 2 * 256**2 * 4096


def test_attentions_core_has_the_flops_of_all_products_at_six_widths() -> None:
    assert first(partial(int.__le__, 3072)) == 3072
    assert first(lambda s: s > 1 << 23) is None
    assert analysis.PUBLISHED[0].ridge == 208
    plain = Blocks(1, ((48, 144), (48, 48), (48, 192), (192, 48)), ())
    work = replace(SEVEN_B, width=48, heads=6, kv_heads=6, head_dim=8, blocks=(plain,), once=())
    assert half_of_flops(work) == 6 * 48


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_a_plan_is_explained_by_its_own_numbers(world: int) -> None:
    ranking = planned(world=world)
    text = explain(ranking)
    assert text.startswith(f"why {ranking.best}")
    assert "a rank has" in text
    if world == 1:
        return
    every = ways(ranking)
    assert every[0] is ranking.ranked[0]
    for row in every[1:]:
        more = row.ms - every[0].ms
        apart = [getattr(row, part) - getattr(every[0], part) for part in PARTS]
        assert sum(apart) == pytest.approx(more)
        assert f"{name_of(row.layout)}: {more:+.2f} ms" in text
    assert ("branches of guidance run apart" in text) == (ranking.best.cfg > 1)


def test_nothing_is_explained_where_nothing_fits_and_rings_say_why_not() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        explain(planned(world=1, memory=1))
    fast = replace(H200, exchange={"peer": ((1e3, 1e-3), (1e9, 1e-2))}, kernel_us=1e-3, copy=1e3)
    slow = replace(fast, attention=CPU.attention)
    for rates in (fast, slow):
        ranking = planned(rates=rates)
        rings = [row for row in ways(ranking) if row.layout.strategy in ("ring", "usp")]
        faster = [row for row in rings if row.ms < ranking.ranked[0].ms]
        assert explain(ranking).count("rounds differently") == len(faster)
