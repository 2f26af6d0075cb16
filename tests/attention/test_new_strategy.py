"""Tests that a new strategy is one file: once it is in the folder, all checks pass without an edit elsewhere.

While these tests run, two more strategies are in the folder in every process: one that merges results, and one that
only moves data and has a rule about heads. The checks of attention, masks, costs, exactness and the planner are those
of the built-in strategies.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import seqpar.attention
from launch.benches.steps import fitting
from seqpar import DistributedDiT
from seqpar.planner.costs import exact_strategies, strategies
from seqpar.planner.rates import H200
from seqpar.planner.search import Wish
from tests.attention import test_strategies, test_streams
from tests.attention.test_by_kernels import model_of
from tests.planner import test_costs
from tests.planner.test_plan import ONE, planned
from tests.support.meshes import TRANSPORTS, mesh_for, random
from tests.support.pool import Pool

FOLDER = Path(__file__).parent / "new_strategies"
NEW = ("all_to_each", "halves")
CASES = [(2, 13, 4, 4), (1, 15, 6, 3), (3, 12, 5, 5)]  # uneven tokens, grouped-query, uneven heads


@contextmanager
def in_the_folder() -> Iterator[None]:
    """Make the new files importable as if they were in `seqpar/attention`."""
    path = str(FOLDER)
    seqpar.attention.__path__.append(path)
    try:
        yield
    finally:
        seqpar.attention.__path__.remove(path)
        for name in NEW:
            sys.modules.pop(f"seqpar.attention.{name}", None)


@pytest.fixture(autouse=True)
def added() -> Iterator[None]:
    """Add the new strategies in this process."""
    assert not set(NEW) & set(strategies())
    with in_the_folder():
        yield


def added_too(rank: int, world: int, device: torch.device, name: str, *args: Any) -> Any:
    """Run a check on a rank with the new strategies in the folder."""
    checks: dict[str, Callable[..., Any]] = {
        "sharded": test_strategies.sharded,
        "moved": test_strategies.moved,
        "spied": test_costs.spied,
        "shifted": test_strategies.shifted_on_last,
        "streams": test_streams.sharded,
        "modelled": modelled,
    }
    with in_the_folder():
        return checks[name](rank, world, device, *args)


def spied(rank: int, world: int, device: torch.device, *args: Any) -> Any:
    return added_too(rank, world, device, "spied", *args)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("strategy", NEW)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_new_strategy_equals_unsharded_attention(
    ranks: Pool, world: int, strategy: str, transport: str, case: tuple[int, ...]
) -> None:
    got = torch.cat(ranks.run(world, added_too, "sharded", strategy, transport, case), dim=1)
    assert (got - test_strategies.whole(case, ranks.device)).abs().max() < test_strategies.TOLERANCE


@pytest.mark.parametrize("case", test_streams.CASES[:3])
@pytest.mark.parametrize("strategy", NEW)
def test_new_strategy_attends_over_two_masked_streams(ranks: Pool, strategy: str, case: test_streams.Case) -> None:
    got = test_streams.joined(ranks.run(2, added_too, "streams", strategy, "collective", case))
    for out, true in zip(got, test_streams.truth(case), strict=True):
        assert (out - true).abs().max() < test_streams.TOLERANCE


@pytest.mark.parametrize("strategy", NEW)
def test_new_strategy_negative_control_wrong_rotary_offset_is_noticed(ranks: Pool, strategy: str) -> None:
    got = torch.cat(ranks.run(2, added_too, "shifted", strategy, CASES[0]), dim=1)
    assert (got - test_strategies.whole(CASES[0], ranks.device)).abs().max() > 1e-3


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_new_strategy_that_only_moves_data_has_one_ranks_bits(
    ranks: Pool, transport: str, case: tuple[int, ...]
) -> None:
    assert [name for name in NEW if name in exact_strategies()] == ["all_to_each"]
    one = ranks.run(1, added_too, "moved", "all_to_each", transport, case)[0]
    assert torch.equal(torch.cat(ranks.run(3, added_too, "moved", "all_to_each", transport, case), dim=1), one)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("strategy", NEW)
@pytest.mark.parametrize("world", [2, 3])
def test_new_strategy_moves_and_keeps_what_its_file_says(
    ranks: Pool, world: int, strategy: str, case: tuple[int, ...]
) -> None:
    test_costs.check_what_is_counted(ranks, world, strategy, case, spied)


def test_planner_and_benches_find_new_strategies() -> None:
    """The case is 4096 tokens of Large-DiT-7B."""
    without_guidance = replace(ONE, guidance=False, labels=1)
    found = planned(without_guidance)
    assert {row.layout.strategy for row in found.ranked} >= {*NEW, "ulysses"}
    assert "all_to_each" in found.table()
    assert all(row.ms > 0 and row.memory.exchange > 0 for row in found.ranked if row.layout.strategy in NEW)
    named = planned(without_guidance, wish=Wish(strategy="halves"))
    assert named.best.strategy == "halves"
    assert named.best.sequence == 4
    exact = planned(without_guidance, wish=Wish(exact=True))
    assert "all_to_each" in {row.layout.strategy for row in exact.ranked}
    assert "halves" not in {row.layout.strategy for row in exact.ranked}
    with pytest.raises(ValueError, match=r"got strategy halves with .* in exact mode, expected .* or all_to_each"):
        planned(without_guidance, wish=Wish(strategy="halves", exact=True))
    assert {layout.strategy for layout in fitting((), 4)} >= set(NEW)


def test_a_new_strategy_that_only_moves_data_is_taken_unasked_where_it_is_predicted_to_be_the_fastest() -> None:
    """With free links and passes it ties with kv_gather and comes second; a strategy that merges is not chosen."""
    free = replace(H200, exchange={"peer": ((1.0, 1e-6), (1e12, 2e-6))}, copy=1e9, kernel_us=1e-9)
    load = replace(ONE, guidance=False, labels=1)
    assert planned(load, rates=free).best.strategy == "kv_gather"
    with pytest.MonkeyPatch.context() as patch:
        file = importlib.import_module("seqpar.attention.all_to_each")
        patch.setattr(file, "FACTS", replace(file.FACTS, order=0))
        assert planned(load, rates=free).best.strategy == "all_to_each"
        patch.setattr(file, "FACTS", replace(file.FACTS, order=0, moves_only=False))
        assert planned(load, rates=free).best.strategy == "kv_gather"


def test_a_rule_about_heads_is_kept_by_the_planner() -> None:
    grouped = replace(test_costs.SEVEN_B, kv_heads=2)
    load = replace(ONE, guidance=False, labels=1)
    assert "all_to_each" not in {row.layout.strategy for row in planned(load, work=grouped).ranked}
    with pytest.raises(ValueError, match="got strategy all_to_each with 2 key-value heads on 4 ranks, expected one"):
        planned(load, work=grouped, wish=Wish(axes={"ulysses": 4}, strategy="all_to_each"))


def modelled(rank: int, world: int, device: torch.device, strategy: str) -> tuple[torch.Tensor, str]:
    """Return the output of a model with a new strategy, chosen by name, and what the plan says."""
    engine = DistributedDiT(model_of("large_dit").to(device), mesh_for(strategy, world, device), strategy)
    x, t = random((2, 4, 6, 6), 1, device, torch.float32), torch.tensor([960, 3])
    return engine(x, timestep=t, class_labels=torch.tensor([2, 7])).sample, str(engine.strategy)


@pytest.mark.parametrize("strategy", NEW)
def test_a_model_runs_by_a_new_strategy(ranks: Pool, strategy: str) -> None:
    ((truth, _),) = ranks.run(1, added_too, "modelled", "ulysses")
    for got, chosen in ranks.run(2, added_too, "modelled", strategy):
        assert (got - truth).abs().max() < 2e-5
        assert chosen == f"{strategy} (as asked)"


def test_the_folder_is_as_before() -> None:
    """A negative control: without the files in the folder, the names are unknown."""
    path = str(FOLDER)
    seqpar.attention.__path__.remove(path)
    try:
        with pytest.raises(ValueError, match="got strategy 'halves', expected one of kv_first"):
            planned(wish=Wish(strategy="halves"))
    finally:
        seqpar.attention.__path__.append(path)
