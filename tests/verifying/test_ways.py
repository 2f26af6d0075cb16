"""Tests of the comparison of all ways: planted faults are found, and correct ways give no false alarm."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from seqpar.loop.distributed import DistributedDiT
from seqpar.mesh.mesh import Mesh
from seqpar.pipelines.classes import Files, Pipeline
from seqpar.planner.costs import facts_of, strategies
from seqpar.planner.plan import work_of
from seqpar.planner.search import Preferences
from seqpar.types.guidance import Guidance
from seqpar.verifying import ways as all_ways
from seqpar.verifying.ways import Row, judged, meshes, table, ways
from tests.support.pool import Pool
from tests.verifying.faults import Fault, narrow_sums, none, one_bit

pytestmark = pytest.mark.slow

BF16 = torch.bfloat16


def rows_of(
    rank: int,
    world: int,
    device: torch.device,
    fault: Fault,
    counts: tuple[int, ...],
    wish: Preferences,
    size: tuple[int, int] = (40, 40),
) -> list[Row]:
    """Return the rows of all ways of computing one class with noise in its step, of 25 tokens if no size is given."""
    files, guidance, joined = Files.locate("builtin"), Guidance(4.0), Mesh.joined(device)
    mesh_of, model = meshes(joined), files.blueprint.build(BF16, device)
    pipeline = Pipeline(DistributedDiT(model, Mesh.single(device)), files, None)
    request = pipeline.request(["3"], steps=1, guidance=guidance, size=size, eta=1.0)
    load = files.load_of([3], guidance.on, 2, BF16, size)
    listed, _ = ways(joined, counts, mesh_of, wish, work_of(files.blueprint.config), load)
    with pytest.MonkeyPatch.context() as patch:
        fault(patch, rank)
        return judged(joined, model, request, listed, mesh_of, wish.local)


GATHERED = Preferences(strategy="kv_gather", axes={"cfg": 1}, transport="collective")


def test_a_narrow_sum_is_found_also_on_one_rank(ranks: Pool) -> None:
    rows = ranks.run(2, rows_of, narrow_sums, (2,), GATHERED, (128, 128))[0]  # over few keys it shows little
    assert [row.way.ulysses for row in rows] == [1, 2]
    assert all((row.finding or "").startswith("attention in blocks.") for row in rows)


def test_transports_of_one_layout_have_equal_bits_or_it_is_a_finding(ranks: Pool) -> None:
    for fault in (none, one_bit):
        _, *rows = ranks.run(2, rows_of, fault, (2,), Preferences(strategy="ulysses", axes={"cfg": 1}))[0]
        assert [row.way.transport for row in rows] == ["collective", "peer"]
        unequal = "prediction of step 1: other bits than 2 ranks, ulysses 2, ulysses, collective"
        assert (rows[1].finding or "").startswith(unequal) is (fault is one_bit)
        assert rows[0].finding is None


def test_no_correct_way_is_an_alarm(ranks: Pool) -> None:
    plain = Preferences(axes={"cfg": 1}, transport="collective")
    of_three = ranks.run(3, rows_of, none, (3,), plain)[0]
    of_four = ranks.run(4, rows_of, none, (4,), replace(plain, strategy="usp"))[0]  # which takes two axes
    assert {row.way.strategy for row in of_three + of_four} == set(strategies())
    for world, rows in ((3, of_three), (4, of_four)):
        assert [str(row) for row in rows if row.finding is not None] == []
        assert {row.way.sequence for row in rows} == {1, world}
        assert all(row.verdict and 0.8 < row.verdict.ratio < 1.5 for row in rows)
        for line, row in zip(table(rows).splitlines()[2:], rows[1:], strict=True):
            assert ("one rank's" in line) is facts_of(row.way.strategy).moves_only, line


def overflow(patch: pytest.MonkeyPatch, rank: int) -> None:
    def overflowing(verdict_of: Any, dit: DistributedDiT, *args: Any) -> Any:
        dit.model.get_parameter("blocks.3.fc2.bias").fill_(torch.inf)
        return verdict_of(dit, *args)

    patch.setattr(all_ways, "verdict_of", partial(overflowing, all_ways.verdict_of))


def refused(patch: pytest.MonkeyPatch, rank: int) -> None:
    def refusing(verdict_of: Any, dit: DistributedDiT, *args: Any) -> Any:
        if dit.mesh.world.size > 1:
            raise ValueError("got what does not fit")
        return verdict_of(dit, *args)

    patch.setattr(all_ways, "verdict_of", partial(refusing, all_ways.verdict_of))


def test_a_run_that_fails_is_a_finding_and_one_rank_alone_that_does_ends_the_table(ranks: Pool) -> None:
    for rows in ranks.run(2, rows_of, refused, (2,), GATHERED):
        assert [row.finding for row in rows] == [None, "got what does not fit"]
    for (alone,) in ranks.run(2, rows_of, overflow, (2,), GATHERED):
        assert alone.skipped
        assert " not judged at blocks.3, output 1 of step 1 on rank 0: one rank alone" in table([alone])
