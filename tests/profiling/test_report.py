"""Tests of the report: the table, the rates, the waits, and the kernels that lose most."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from seqpar.loop.models.large_dit import SIZES
from seqpar.planner import rates as known
from seqpar.planner.plan import Choice, Plan, rank, work_of
from seqpar.planner.predict import Load, predict
from seqpar.planner.rates import Machine
from seqpar.planner.search import Preferences
from seqpar.profiling.ranks import Columns
from seqpar.profiling.report import GAPS, losses, report
from seqpar.profiling.result import BlockTime, KernelTime, Profile, rates
from seqpar.profiling.trace import OUTSIDE
from seqpar.types.facts import Layout

LOAD = Load(1, 4096, True, 25, 2, 7_000_000_000, 16, 2, 1 << 30)


def plan() -> Plan:
    machine, wish = Machine("NVIDIA H200", 2, "peer", 139), Preferences(strategy="ulysses", axes={"cfg": 1})
    ranking = rank(work_of(SIZES["large-dit-7b"]), LOAD, machine, wish, torch.bfloat16)
    return Plan(ranking.best, Choice(ranking.best.strategy, ""), Choice("peer", ""), Choice("flash", ""), ranking)


def profile(*ranks: dict[str, Columns], plan: Plan | None = None, kernels: tuple[KernelTime, ...] = ()) -> Profile:
    """Return the profile of one step. ranks: block -> its columns."""
    rows = [
        BlockTime(rank, 0, block, columns) for rank, blocks in enumerate(ranks) for block, columns in blocks.items()
    ]
    late = tuple({1 - rank: sum(each.waiting for each in blocks.values())} for rank, blocks in enumerate(ranks))
    shown = () if plan is None else rates(plan.ranking, LOAD, plan.layout)
    return Profile(tuple(rows), kernels, late, shown, "measured", True, 0.0, (), plan)


def test_kernels_that_lose_most_come_first() -> None:
    kernels = (
        KernelTime(0, "gemm", "products", 10),
        KernelTime(0, "adaln", "elementwise", 3),
        KernelTime(0, "nccl", "exchange", 8),
        KernelTime(1, "adaln", "elementwise", 4),
    )
    both = [{"Block 0": Columns(10, 10, elementwise=4, exposed=5, waiting=1, hidden=2, gaps=0.5)}] * 2
    found = losses(profile(*both, kernels=kernels))
    # three quarters of the exchanges are visible; without rates products lose nothing
    assert [(loss.kernel, loss.rank, loss.ms) for loss in found] == [("nccl", 0, 6), ("adaln", 1, 4), (GAPS, 0, 0.5)]
    assert losses(profile({"Block 0": Columns(10, 10)}, kernels=kernels[:1])) == []


def test_products_lose_what_they_take_beyond_the_best_rate() -> None:
    made = plan()
    kernels = (KernelTime(0, "gemm", "products", 80), KernelTime(0, "flash", "attention", 50))
    whole = profile({"Block 0": Columns(100, 50)}, plan=made, kernels=kernels)
    products, attention, *_ = whole.rates
    found = {loss.column: loss.ms for loss in losses(whole)}
    assert found["products"] == pytest.approx(0.8 * (100 - products.least_ms))
    assert found["attention"] == pytest.approx(50 - attention.least_ms)
    # the planner predicts the same work at the same rate
    assert products.least_ms == pytest.approx(predict(made.ranking.work, LOAD, made.layout, known.H200).gemm, rel=0.02)


@pytest.mark.parametrize(
    ("waits", "place"), [([0.5, 4, 0, 0], "in Block 1 (4 ms)"), ([1, 1, 1, 1], "in 4 x Block (4 ms)")]
)
def test_the_rank_and_the_block_of_a_wait_are_named(waits: list[float], place: str) -> None:
    early = {f"Block {index}": Columns(10, waiting=wait) for index, wait in enumerate(waits)}
    lines = report(profile(early, {"Block 0": Columns(50)})).splitlines()
    assert [line for line in lines if line.startswith("waiting")] == [
        f"waiting     rank 0: {sum(waits):.3g} ms for rank 1 per step, most {place}"
    ]


def test_the_report_has_every_step_kind_of_block_and_rate() -> None:
    made = plan()
    blocks = {OUTSIDE: Columns(1), "Block 0": Columns(90, 30, 5, 2, 0, 1, 3), "Block 1": Columns(90, 30, 5, 2, 0, 1, 3)}
    lines = report(profile(blocks, blocks, plan=made)).splitlines()
    numbers = "257.000 181.000 60.000 10.000 6.000 4.000 0.000 2.000"
    assert " ".join(lines[1].split()) == f"0 step 1 {numbers}"
    assert lines[4].split()[:4] == ["0", "2", "x", "Block"]
    assert [line.split()[0] for line in lines if " per step)" in line] == [
        *("products", "attention", "elementwise", "exchange")
    ]
    exchange = made.ranking.work.layers * 4 * LOAD.tokens // 4 * made.ranking.work.width * 2 * 2 / 1e6
    (rate,) = [each for each in rates(made.ranking, LOAD, made.layout) if each.column == "exchange"]
    assert rate.amount == pytest.approx(exchange)
    assert rate.achieved(Columns(exposed=4, hidden=6)) == pytest.approx(exchange / 10)
    assert rate.achieved(Columns()) is None


def test_a_single_rank_exchanges_nothing() -> None:
    made = plan()
    alone = Layout(1, 1, 1, 1, "ulysses", "peer")
    assert [each.column for each in rates(made.ranking, LOAD, alone)] == ["products", "attention", "elementwise"]
    two = rates(made.ranking, replace(LOAD, images=2), alone)
    assert two[0].amount == pytest.approx(2 * rates(made.ranking, LOAD, alone)[0].amount)
