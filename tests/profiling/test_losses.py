"""Tests that the largest losses are those of the columns, and name what would remove them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from seqpar.loop.models.large_dit import PRESETS
from seqpar.planner import rates as known
from seqpar.planner.machine import Machine
from seqpar.planner.plan import Choice, Plan, rank, work_of
from seqpar.planner.predict import Load, predict
from seqpar.planner.search import Preferences
from seqpar.profiling.report import losses, report
from seqpar.profiling.result import BlockTime, Profile, rates
from seqpar.profiling.trace import OUTSIDE, Columns
from seqpar.types.facts import Layout

LOAD = Load(1, 4096, True, 25, 2, 7_000_000_000, 16, 2, 1 << 30)


def plan(strategy: str = "ulysses", transport: str = "peer", cfg: int | None = 1) -> Plan:
    wish = Preferences(strategy=strategy, axes={} if cfg is None else {"cfg": cfg})
    curve = "peer" if transport == "peer" else "nccl"
    machine = Machine("NVIDIA H200", 2, curve, 139)
    ranking = rank(work_of(PRESETS["large-dit-7b"]), LOAD, machine, wish, torch.bfloat16)
    return Plan(ranking.best, Choice(ranking.best.strategy, ""), Choice(transport, ""), Choice("flash", ""), ranking)


def profile(
    *ranks: dict[str, Columns], plan: Plan | None = None, load: Load | None = None, graph: bool = True
) -> Profile:
    """Return the profile of one step. ranks: block -> its columns."""
    rows = [
        BlockTime(rank, 0, block, columns) for rank, blocks in enumerate(ranks) for block, columns in blocks.items()
    ]
    late = tuple({1 - rank: sum(each.waiting for each in blocks.values())} for rank, blocks in enumerate(ranks))
    shown = () if plan is None or load is None else rates(plan.ranking, load, plan.layout)
    return Profile(tuple(rows), late, shown, "measured", graph, 0.0, (), plan)


def test_the_largest_come_first() -> None:
    made = profile({"Block 0": Columns(10, 10, elementwise=3, exposed=5, gaps=1), OUTSIDE: Columns(elementwise=1)})
    found = losses(made)
    assert [(loss.column, loss.ms) for loss in found] == [("exposed", 5), ("elementwise", 4), ("gaps", 1)]
    assert found[1].text.startswith("4 ms of 30 ms a step on rank 0: elementwise work, most of it in Block 0 (3 ms)")
    assert losses(profile({"Block 0": Columns(10, 10)})) == []


def test_products_lose_what_they_take_beyond_the_best_rate() -> None:
    made = plan()
    whole = profile({"Block 0": Columns(100, 50)}, plan=made, load=LOAD)
    products, attention, *_ = whole.rates
    found = {loss.column: loss for loss in losses(whole)}
    assert found["products"].ms == pytest.approx(100 - products.least_ms)
    assert found["attention"].ms == pytest.approx(50 - attention.least_ms)
    assert f"of {products.ceiling:.3g} TFLOP/s" in found["products"].text
    # the planner predicts what the same formulas count at the same rate
    assert products.least_ms == pytest.approx(predict(made.ranking.work, LOAD, made.layout, known.H200).gemm, rel=0.02)


def test_a_late_rank_is_blamed_for_what_it_has_more_of() -> None:
    early = {"Block 0": Columns(10, waiting=0.5), "Block 1": Columns(10, waiting=4)}
    late = {"Block 0": Columns(10.5), "Block 1": Columns(10, gaps=4)}
    (found, *_) = losses(profile(early, late))
    assert found.text == (
        "4.5 ms of 24.5 ms a step on rank 0: it waits for rank 1, most of it in Block 1 (4 ms); rank 1 has 4 ms more "
        "gaps, of it 4 ms in Block 1: without that it would be in time"
    )
    (found, *_) = losses(profile(early, {"Block 0": Columns(10, waiting=4), "Block 1": Columns(10)}))
    assert "the ranks are late in turn" in found.text


def test_exposed_exchanges_name_a_layout_that_is_predicted_to_exchange_less() -> None:
    blocks = {"Block 0": Columns(10, exposed=5)}
    (found, *_) = losses(profile(blocks, plan=plan(strategy="ulysses", transport="collective", cfg=None)))
    (restricted, *_) = losses(profile(blocks, plan=plan()))
    assert "fewer ranks a picture, or faster links, would remove some of it" in restricted.text
    assert "the peer transport, which needs no collective," in found.text


def test_gaps_of_a_graph_are_between_its_kernels() -> None:
    blocks = {"Block 0": Columns(10, gaps=5)}
    assert "between the kernels of a graph" in losses(profile(blocks))[0].text
    assert "a step as a CUDA graph" in losses(profile(blocks, plan=plan(), graph=False))[0].text
    assert "a CPU runs Python" in losses(profile(blocks, graph=False))[0].text


def test_the_report_has_every_step_kind_of_block_and_rate() -> None:
    made = plan()
    blocks = {OUTSIDE: Columns(1), "Block 0": Columns(90, 30, 5, 2, 0, 1, 3), "Block 1": Columns(90, 30, 5, 2, 0, 1, 3)}
    lines = report(profile(blocks, blocks, plan=made, load=LOAD)).splitlines()
    numbers = "257.000 181.000 60.000 10.000 6.000 4.000 0.000 2.000"
    assert " ".join(lines[1].split()) == f"0 step 1 {numbers}"
    assert lines[4].split()[:4] == ["0", "2", "x", "Block"]
    exchange = made.ranking.work.layers * 4 * LOAD.tokens // 4 * made.ranking.work.width * 2 * 2 / 1e6
    (rate,) = [each for each in rates(made.ranking, LOAD, made.layout) if each.column == "exchange"]
    assert rate.amount == pytest.approx(exchange)
    assert rate.achieved(Columns(exposed=4, hidden=6)) == pytest.approx(exchange / 10)
    assert rate.achieved(Columns()) is None


def test_what_many_blocks_share_is_said_of_their_class() -> None:
    blocks = {f"Block {index}": Columns(elementwise=1) for index in range(4)} | {"Norm 0": Columns(elementwise=1.5)}
    assert "most of it in 4 x Block (4 ms)" in losses(profile(blocks))[0].text
    assert "most of it in Norm 0 (4.5 ms)" in losses(profile(blocks | {"Norm 0": Columns(elementwise=4.5)}))[0].text


def test_elementwise_work_faster_than_copies_is_explained() -> None:
    made = plan()
    (least,) = [each.least_ms for each in rates(made.ranking, LOAD, made.layout) if each.column == "elementwise"]
    for factor, explained in ((0.5, True), (1.1, False)):
        text = report(profile({"Block 0": Columns(elementwise=factor * least)}, plan=made, load=LOAD))
        assert ("note: elementwise work above the rate of copies" in text) == explained
        assert ("elementwise work at the" in text) == explained  # and not at twice what the machine has


def test_a_single_rank_exchanges_nothing() -> None:
    made = plan()
    alone = Layout(1, 1, 1, 1, "ulysses", "peer")
    assert [each.column for each in rates(made.ranking, LOAD, alone)] == ["products", "attention", "elementwise"]
    two = rates(made.ranking, replace(LOAD, images=2), alone)
    assert two[0].amount == pytest.approx(2 * rates(made.ranking, LOAD, alone)[0].amount)
