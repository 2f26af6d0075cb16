"""Tests of the table of all ways: planted faults are found, and correct ways give no false alarm."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from seqpar.engine.distributed import DistributedDiT
from seqpar.fidelity import table
from seqpar.fidelity.compare import NOT_FINITE
from seqpar.fidelity.table import Row, judged, plant_outliers
from seqpar.fidelity.ways import Meshes, ways
from seqpar.pipelines.class_labels import Files, Pipeline
from seqpar.planner.costs import strategies
from seqpar.planner.plan import work_of
from seqpar.planner.search import Wish
from seqpar.ranks.mesh import Mesh
from seqpar.sampling.guidance import Guidance
from tests.fidelity.faults import Fault, lost_shard, narrow_sums, none, one_bit
from tests.support.pool import Pool

BF16 = torch.bfloat16


def rows_of(
    rank: int, world: int, device: torch.device, fault: Fault, counts: tuple[int, ...], wish: Wish, size: int = 64
) -> list[Row]:
    """Return the rows of all ways of computing one class with noise in each step."""
    files, guidance, meshes = Files.locate("builtin"), Guidance(4.0), Meshes(Mesh.joined(device))
    model = files.blueprint.build(BF16, device)
    if size > 64:  # over few keys a narrow sum shows little
        plant_outliers(model)
    pipeline = Pipeline(DistributedDiT(model, Mesh.single(device)), files, None)
    request = pipeline.request(["3"], steps=2, guidance=guidance, size=(size, size), eta=1.0)
    load = files.load_of([3], guidance.on, 2, BF16, (size, size))
    listed, _ = ways(counts, meshes, wish, work_of(files.blueprint.config), load)
    with pytest.MonkeyPatch.context() as patch:
        fault(patch, rank)
        return judged("builtin", model, request, listed, meshes, wish)


GATHERED = Wish(strategy="kv_gather", axes={"cfg": 1}, transport="collective")


def test_a_narrow_sum_is_found_also_on_one_rank(ranks: Pool) -> None:
    rows = ranks.run(2, rows_of, narrow_sums, (2,), GATHERED, 128)[0]
    assert [row.way.ranks for row in rows] == [1, 2]
    assert all("attention in blocks." in row.failures[0] for row in rows)


def test_a_lost_shard_is_found_on_several_ranks_alone(ranks: Pool) -> None:
    alone, row = ranks.run(2, rows_of, lost_shard, (2,), replace(GATHERED, strategy="ulysses"))[0]
    assert alone.findings == ()
    assert row.failures[0].startswith(
        "builtin, bfloat16, 2 ranks, ulysses 2, ulysses, collective: attention in blocks.0"
    )


def test_transports_of_one_layout_have_equal_bits_or_it_is_a_finding(ranks: Pool) -> None:
    for fault in (none, one_bit):
        _, *rows = ranks.run(2, rows_of, fault, (2,), Wish(strategy="ulysses", axes={"cfg": 1}))[0]
        assert [row.way.transport for row in rows] == ["collective", "peer"]
        unequal = [finding for row in rows for finding in row.findings if "other bits than 2 ranks" in finding]
        assert len(unequal) == int(fault is one_bit)
        assert all(finding.startswith("prediction of step 1: ") for finding in unequal)


def test_no_correct_way_is_an_alarm(ranks: Pool) -> None:
    rows = ranks.run(4, rows_of, none, (1, 2, 3, 4), Wish(axes={"cfg": 1}, transport="collective"))[0]
    assert [row for row in rows if row.findings] == []
    assert {row.way.strategy for row in rows} == {"-", *strategies()}
    assert {row.way.ranks for row in rows} == {1, 2, 3, 4}
    assert all(row.verdict and 0.8 < row.verdict.ratio < 1.5 for row in rows)


def overflow(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Let the model overflow, also on one rank alone."""

    def overflowing(verdict_of: Any, dit: DistributedDiT, *args: Any) -> Any:
        dit.model.get_parameter("blocks.3.fc2.bias").fill_(torch.inf)
        return verdict_of(dit, *args)

    patch.setattr(table, "verdict_of", partial(overflowing, table.verdict_of))


def refused(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Let the run of two ranks end in an error."""

    def refusing(verdict_of: Any, dit: DistributedDiT, *args: Any) -> Any:
        if dit.mesh.world.size > 1:
            raise ValueError("got what does not fit")
        return verdict_of(dit, *args)

    patch.setattr(table, "verdict_of", partial(refusing, table.verdict_of))


def test_a_run_that_fails_is_a_finding_and_one_rank_alone_that_does_ends_the_table(ranks: Pool) -> None:
    for rows in ranks.run(2, rows_of, refused, (2,), GATHERED):
        assert [row.findings for row in rows] == [(), ("got what does not fit",)]
    for (alone,) in ranks.run(2, rows_of, overflow, (2,), GATHERED):
        assert NOT_FINITE in alone.findings[0]
