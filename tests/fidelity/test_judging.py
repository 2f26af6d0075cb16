"""Tests of the judgement: faults that are planted into the engine are found, and correct ways give no false alarm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from seqpar.distributed import DistributedDiT
from seqpar.fidelity import judging, outliers
from seqpar.fidelity.compare import digest
from seqpar.fidelity.judging import Judged, Subject, judge, plain_engine
from seqpar.fidelity.trajectory import record
from seqpar.fidelity.ways import Meshes, ways
from seqpar.local import sdpa
from seqpar.mesh import Mesh
from seqpar.models import large_dit
from seqpar.pipelines.class_labels import Files, Pipeline
from seqpar.planner.costs import strategies
from seqpar.planner.plan import work_of
from seqpar.planner.search import Wish
from seqpar.sampling.guidance import Guidance
from seqpar.sampling.run import Run
from seqpar.transports.collective.exchange import CollectiveToHeads
from seqpar.weights.find import Blueprint
from tests.models.test_large_dit import TINY, ours
from tests.support.meshes import mesh_for
from tests.support.pool import Pool

Fault = Callable[[pytest.MonkeyPatch, int], None]


def rotary_off_by_one(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Give rank 1 of several the rotary rows of the next token."""
    true = DistributedDiT.positions

    def rolled(dit: DistributedDiT, *args: Any) -> dict[str, Tensor]:
        found, late = true(dit, *args), int(rank == 1 and dit.mesh.world.size > 1)
        return {name: x.roll(-late, 0) for name, x in found.items()}

    patch.setattr(DistributedDiT, "positions", rolled)


def swapped_branches(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Let rank 1, whose prediction no other rank reads, take the unconditional branch for the conditional one."""
    true = Run._parted

    def swapped(run: Run, name: str, out: Tensor) -> Any:
        pair = true(run, name, out)
        return pair[::-1] if rank == 1 and run._dit.mesh.cfg.size > 1 else pair

    patch.setattr(Run, "_parted", swapped)


def lost_shard(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Let rank 0 see zeros for the keys and values of the last rank's tokens."""
    true = CollectiveToHeads.deliver

    def lossy(exchange: Any, met: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = true(exchange, met)
        for x in (k, v) if rank == 0 else ():
            x[:, -exchange._layout.tokens[-1] :] = 0
        return q, k, v

    patch.setattr(CollectiveToHeads, "deliver", lossy)


def narrow_sums(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Sum over keys in bf16, as a kernel with a bf16 accumulator does."""

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, /) -> tuple[Tensor, Tensor]:
        scores = torch.einsum("blhd,bmhd->blhm", q.float(), k.float()) * q.shape[-1] ** -0.5
        weights = scores.softmax(-1).to(q.dtype)
        out = torch.zeros_like(q)
        for key in range(k.shape[1]):
            out += weights[..., key, None] * v[:, None, key]
        return out, scores.logsumexp(-1).transpose(1, 2)

    patch.setattr(sdpa, "attend", attend)


def one_bit(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Change the last bit of one value on the way to attention by collectives."""
    true = CollectiveToHeads.deliver

    def nearly(exchange: Any, met: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = true(exchange, met)
        v.view(torch.int16)[0, 0, 0, 0] ^= 1
        return q, k, v

    patch.setattr(CollectiveToHeads, "deliver", nearly)


def builtin(device: torch.device) -> Pipeline:
    """Return the built-in, trained model in fp64, without its decoder."""
    files = Files.locate("builtin")
    return Pipeline(plain_engine(files.blueprint.build(torch.float64, device), Mesh.single(device)), files, None)


def planted(device: torch.device) -> Pipeline:
    """Return the built-in model with planted outliers."""
    pipeline = builtin(device)
    outliers.plant(pipeline.dit.model)
    return pipeline


def rotary(device: torch.device) -> Pipeline:
    """Return a tiny Large-DiT with random weights, whose rounding in bf16 is as large as the fault: it needs fp32."""
    model = ours(TINY, device)
    files = Files(Blueprint("tiny", large_dit, TINY), None, None, {})
    return Pipeline(plain_engine(model, Mesh.single(device)), files, None)


# name -> (pipeline, data type, size in pixels)
KINDS = {
    "builtin": (builtin, torch.bfloat16, (64, 64)),
    "outliers": (planted, torch.bfloat16, (128, 128)),  # 256 tokens: over few keys a narrow sum shows little
    "rotary": (rotary, torch.float32, (64, 64)),
}


def judged(
    rank: int, world: int, device: torch.device, kind: str, fault: Fault | None, counts: tuple[int, ...], wish: Wish
) -> list[tuple[int, str, str, tuple[str, ...], float]]:
    """Return (ranks, strategy, transport, findings, ratio) of each row."""
    made_by, dtype, size = KINDS[kind]
    pipeline, guidance = made_by(device), Guidance(4.0)
    files = pipeline.files
    request = pipeline.request(["3"], steps=2, guidance=guidance, size=size)
    ranks, config = Mesh.joined(device), files.blueprint.config
    load = files.load_of([3], guidance.on, 2, dtype, size)
    meshes = Meshes(ranks)
    tried, _ = ways(counts, meshes, wish, work_of(config), load)
    with pytest.MonkeyPatch.context() as patch:
        if fault is not None:
            fault(patch, rank)
        made: Judged = judge(Subject(kind, pipeline, request), tried, (dtype,), meshes, wish)
    assert made.notes == ()
    return [
        (row.way.ranks, row.way.strategy, row.way.transport, row.findings, row.ratio) for row in made.rows if row.way
    ]


def failed(rank: int, world: int, device: torch.device, everywhere: bool) -> tuple[str, int]:
    """Return how a record that fails ends, in the bench on rank 1 or in a way on all ranks, and what is released."""
    pipeline, mesh, released = builtin(device), Mesh.joined(device), Mock()
    request = pipeline.request(["3"], steps=2, guidance=Guidance(4.0), size=(16, 16))
    true, subject = judging.record, Subject("tiny", pipeline, request)

    def failing(*args: Any, **named: Any) -> Any:
        if everywhere or rank == 1:
            raise ValueError("overflow")
        return true(*args, **named)

    truth = true(pipeline.dit, request)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(judging, "record", failing)
        patch.setattr(DistributedDiT, "release", released)
        if not everywhere:
            made = judging._bench(subject, torch.bfloat16, truth, torch.zeros(1, 3, 16, 16), None, mesh)
            return str(made), 0
        bench: Any = SimpleNamespace(pipeline=pipeline, subject=subject, truth=truth)
        way: Any = SimpleNamespace(layout=SimpleNamespace(strategy="ulysses", transport="auto"), exchanges=True)
        with pytest.raises(ValueError, match="overflow") as error:
            judging._computed(bench, way, mesh_for("ulysses", world, device), Wish())
        return str(error.value), released.call_count


@pytest.mark.parametrize(
    ("fault", "kind", "wish", "reason"),
    [
        (
            rotary_off_by_one,
            "rotary",
            Wish(strategy="kv_gather", axes={"cfg": 1}, transport="collective"),
            "prediction of step 1: ",
        ),
        (swapped_branches, "builtin", Wish(axes={"cfg": 2}, transport="collective"), "prediction of step 1: "),
        (
            lost_shard,
            "builtin",
            Wish(strategy="ulysses", axes={"cfg": 1}, transport="collective"),
            "prediction of step 1: ",
        ),
        (narrow_sums, "outliers", Wish(strategy="kv_gather", axes={"cfg": 1}, transport="collective"), "prediction"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_planted_fault_is_found(ranks: Pool, fault: Fault, kind: str, wish: Wish, reason: str) -> None:
    alone, *rows = ranks.run(2, judged, kind, fault, (2,), wish)[0]
    assert (alone[3] == ()) is (fault is not narrow_sums)  # the one rank is without fault, except where sums are narrow
    assert rows
    assert all(any(finding.startswith(reason) for finding in row[3]) for row in rows), rows


def test_transports_of_one_layout_have_equal_bits_or_it_is_a_finding(ranks: Pool) -> None:
    wish = Wish(strategy="ulysses", axes={"cfg": 1})
    for fault in (None, one_bit):
        _, *rows = ranks.run(2, judged, "builtin", fault, (2,), wish)[0]
        assert [row[2] for row in rows] == ["collective", "peer"]
        found = [finding for row in rows for finding in row[3]]
        assert (found == []) is (fault is None)
        assert all("other bits than 2 ranks, ulysses 2, ulysses, collective" in finding for finding in found)


def test_every_record_of_a_request_adds_the_same_noise() -> None:
    pipeline = builtin(torch.device("cpu"))
    request = pipeline.request(["3"], steps=2, guidance=Guidance(4.0), size=(16, 16), eta=1.0)
    first, again = (record(pipeline.dit, request) for _ in range(2))
    assert first.bits == again.bits
    other = record(pipeline.dit, replace(request, generator=torch.Generator().manual_seed(1)))
    assert digest(other.inputs[1]) != digest(first.inputs[1])  # there is noise to compare


def test_a_data_type_in_which_one_rank_alone_fails_is_left_out_on_all_ranks(ranks: Pool) -> None:
    found = ranks.run(2, failed, False)
    assert found[0] == found[1]
    assert "bfloat16 is not judged, because one rank alone fails in it: rank 1: overflow" in found[0][0]
    assert ranks.run(2, failed, True) == [("overflow", 1)] * 2


def test_no_correct_way_is_an_alarm(ranks: Pool) -> None:
    rows = ranks.run(4, judged, "builtin", None, (1, 2, 3, 4), Wish(axes={"cfg": 1}, transport="collective"))[0]
    assert [row for row in rows if row[3]] == []
    assert {row[1] for row in rows} == {"-", *strategies()}
    assert {row[0] for row in rows} == {1, 2, 3, 4}
    assert all(0.8 < row[4] < 1.25 for row in rows)
