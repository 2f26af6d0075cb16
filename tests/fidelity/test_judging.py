"""Tests of the judgement: faults that are planted into the engine are found, and correct ways give no false alarm."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from seqpar.engine.distributed import DistributedDiT
from seqpar.fidelity import judging
from seqpar.fidelity.compare import digest
from seqpar.fidelity.judging import Row, Subject, judge, plant_outliers
from seqpar.fidelity.one_rank import plain_engine
from seqpar.fidelity.runs import record
from seqpar.fidelity.ways import Meshes, Way, ways
from seqpar.models import large_dit
from seqpar.pipelines.class_labels import Files, Pipeline
from seqpar.planner.costs import strategies
from seqpar.planner.plan import work_of
from seqpar.planner.search import Wish
from seqpar.ranks.mesh import Mesh
from seqpar.sampling.guidance import Guidance
from seqpar.types.facts import Layout
from seqpar.weights.find import Blueprint
from tests.fidelity.faults import Fault, lost_shard, narrow_sums, none, one_bit, rotary_off_by_one, swapped_branches
from tests.models.test_large_dit import TINY, ours
from tests.support.pool import Pool

# name -> (data type, size in pixels). Random weights of a tiny Large-DiT round in bf16 as much as the fault in its
# positions is wrong; with outliers there are 256 tokens, because over few keys a narrow sum shows little
KINDS = {
    "trained": (torch.bfloat16, (64, 64)),
    "outliers": (torch.bfloat16, (128, 128)),
    "rotary": (torch.float32, (64, 64)),
}


def pipeline_of(kind: str, device: torch.device) -> Pipeline:
    """Return the built-in model in fp64 or a tiny Large-DiT, without a decoder."""
    files = Files.locate("builtin")
    model = ours(TINY, device) if kind == "rotary" else files.blueprint.build(torch.float64, device)
    if kind == "rotary":
        files = Files(Blueprint("tiny", large_dit, TINY), None, None, {})
    if kind == "outliers":
        plant_outliers(model)
    return Pipeline(plain_engine(model, Mesh.single(device)), files, None)


def judged(
    rank: int, world: int, device: torch.device, kind: str, fault: Fault, counts: tuple[int, ...], wish: Wish
) -> list[Row]:
    """Return the rows of all ways."""
    pipeline, guidance, (dtype, size) = pipeline_of(kind, device), Guidance(4.0), KINDS[kind]
    request = pipeline.request(["3"], steps=2, guidance=guidance, size=size)
    load, meshes = pipeline.files.load_of([3], guidance.on, 2, dtype, size), Meshes(Mesh.joined(device))
    tried, _ = ways(counts, meshes, wish, work_of(pipeline.files.blueprint.config), load)
    with pytest.MonkeyPatch.context() as patch:
        fault(patch, rank)
        rows, notes = judge(Subject(kind, pipeline, request), tried, (dtype,), meshes, wish)
    assert notes == []
    return [replace(row, picture=None) for row in rows if row.way]


GATHERED = Wish(strategy="kv_gather", axes={"cfg": 1}, transport="collective")


@pytest.mark.parametrize(
    ("fault", "kind", "wish"),
    [
        (rotary_off_by_one, "rotary", GATHERED),
        (swapped_branches, "trained", Wish(axes={"cfg": 2}, transport="collective")),
        (lost_shard, "trained", replace(GATHERED, strategy="ulysses")),
        (narrow_sums, "outliers", GATHERED),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_planted_fault_is_found(ranks: Pool, fault: Fault, kind: str, wish: Wish) -> None:
    alone, *rows = ranks.run(2, judged, kind, fault, (2,), wish)[0]
    assert (alone.findings == ()) is (
        fault is not narrow_sums
    )  # the one rank has no fault, except where sums are narrow
    assert rows
    named = "prediction of step" if fault is narrow_sums else "prediction of step 1: "
    assert all(any(finding.startswith(named) for finding in row.findings) for row in rows), rows


def test_transports_of_one_layout_have_equal_bits_or_it_is_a_finding(ranks: Pool) -> None:
    for fault in (none, one_bit):
        _, *rows = ranks.run(2, judged, "trained", fault, (2,), Wish(strategy="ulysses", axes={"cfg": 1}))[0]
        assert [row.way.transport for row in rows if row.way] == ["collective", "peer"]
        findings = [finding for row in rows for finding in row.findings]
        assert (findings == []) is (fault is none)
        assert all("other bits than 2 ranks, ulysses 2, ulysses, collective" in finding for finding in findings)


def test_no_correct_way_is_an_alarm(ranks: Pool) -> None:
    rows = ranks.run(4, judged, "trained", none, (1, 2, 3, 4), Wish(axes={"cfg": 1}, transport="collective"))[0]
    assert [row for row in rows if row.findings] == []
    assert {row.way.strategy for row in rows if row.way} == {"-", *strategies()}
    assert {row.way.ranks for row in rows if row.way} == {1, 2, 3, 4}
    assert all(0.8 < row.ratio < 1.25 for row in rows)


def test_every_record_of_a_request_adds_the_same_noise() -> None:
    pipeline = pipeline_of("trained", torch.device("cpu"))
    request = pipeline.request(["3"], steps=2, guidance=Guidance(4.0), size=(16, 16), eta=1.0)
    first, again = (record(pipeline.dit, request) for _ in range(2))
    assert first.bits == again.bits
    other = record(pipeline.dit, replace(request, generator=torch.Generator().manual_seed(1)))
    assert digest(other.inputs[1]) != digest(first.inputs[1])  # there is noise to compare


def failing(rank: int, world: int, device: torch.device, alone: bool) -> tuple[list[str], list[str], int]:
    """Return notes, findings and releases where bf16 fails: for one rank alone on rank 1, or for all ranks of a way."""
    pipeline, releases = pipeline_of("trained", device), list[int]()
    request = pipeline.request(["3"], steps=2, guidance=Guidance(4.0), size=(16, 16))
    true, release, layout = record, DistributedDiT.release, Layout(1, 1, 1, world, "ulysses", "collective")

    def failing_record(dit: DistributedDiT, *args: Any, **named: Any) -> Any:
        if dit.dtype == torch.bfloat16 and (rank == 1 if alone else dit.mesh.world.size > 1):
            raise ValueError("overflow")
        return true(dit, *args, **named)

    def counted(dit: DistributedDiT) -> None:
        releases.append(dit.mesh.world.size)
        release(dit)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(judging, "record", failing_record)
        patch.setattr(DistributedDiT, "release", counted)
        meshes = Meshes(Mesh.joined(device))
        rows, notes = judge(Subject("tiny", pipeline, request), [Way(layout)], [torch.bfloat16], meshes, Wish())
    return notes, [finding for row in rows for finding in row.findings], releases.count(world)


def test_a_data_type_in_which_one_rank_alone_fails_is_left_out_on_all_ranks(ranks: Pool) -> None:
    note = "tiny: bfloat16 is not judged, because one rank alone fails in it: rank 1: overflow"
    assert ranks.run(2, failing, True) == [([note], [], 0)] * 2
    assert ranks.run(2, failing, False) == [([], ["rank 0: overflow", "rank 1: overflow"], 1)] * 2
