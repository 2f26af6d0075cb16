"""Tests that `auto` is one decision: launcher, library and the caller's own mesh all get the planner's plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from seqpar import DistributedDiT
from seqpar.cli.args import Args
from seqpar.cli.job import check, preferences_of
from seqpar.loop.models import dit
from seqpar.mesh.mesh import Mesh
from seqpar.pipelines.classes import Files
from seqpar.planner import plan as planning
from seqpar.planner.plan import Plan, make, work_of
from seqpar.planner.search import Preferences
from tests.support.meshes import mesh as make_mesh
from tests.support.pool import Pool

CONFIG = dit.Config(4, 16, 2, sample_size=16, num_classes=5)


def model_of() -> dit.Model:
    torch.manual_seed(0)
    return dit.Model(CONFIG).requires_grad_(False)


def shown(plan: Plan) -> tuple[Any, ...]:
    return str(plan), plan.sizes, str(plan.strategy), str(plan.transport), str(plan.local)


def launched(rank: int, world: int, device: torch.device, folder: str) -> list[tuple[Any, ...]]:
    args = Args(model="builtin", classes=("0",), guidance=4.0, dtype="fp32", out=Path(folder) / "x.png")
    ranks = Mesh.joined(device)
    job = check(args, ranks)
    launcher = make(job.work, job.load, job.request.dtype, ranks, preferences_of(args))
    read = DistributedDiT.from_pretrained(Files.locate("builtin").blueprint)
    passed = DistributedDiT.from_pretrained(Files.locate("builtin").blueprint, plan=launcher)
    wrapped = DistributedDiT(passed.model)
    assert wrapped.mesh.sizes == wrapped.plan.sizes
    return [shown(plan) for plan in (launcher, read.plan, passed.plan, wrapped.plan)]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_library_and_launcher_have_the_same_plan_on_every_rank(ranks: Pool, tmp_path: Path, world: int) -> None:
    found = [plan for rank in ranks.run(world, launched, str(tmp_path)) for plan in rank]
    assert len(found) == 4 * world
    assert len({str(plan) for plan in found}) == 1


def within(rank: int, world: int, device: torch.device, axes: dict[str, int], strategy: str) -> tuple[Any, ...]:
    mesh = make_mesh(device, **axes)
    engine = DistributedDiT(model_of().to(device), mesh, strategy)
    assert engine.mesh is mesh
    return shown(engine.plan)[1:4]


@pytest.mark.parametrize(
    ("axes", "named", "strategy", "why"),
    [
        ({"cfg": 1, "ring": 2}, "auto", "ring", "planned"),
        ({"cfg": 1, "ulysses": 2}, "auto", "ulysses", "planned"),
        ({"cfg": 2}, "auto", "ulysses", "one rank a sequence"),
        ({"data": 2, "cfg": 1}, "auto", "ulysses", "one rank a sequence"),
        ({"cfg": 1, "ring": 2}, "kv_gather", "kv_gather", "as asked"),
    ],
)
def test_within_the_callers_mesh_the_plan_only_chooses_what_it_leaves_open(
    ranks: Pool, axes: dict[str, int], named: str, strategy: str, why: str
) -> None:
    first, second = ranks.run(2, within, axes, named)
    assert first == second
    sizes, chosen, _ = first
    assert sizes == {"data": 1, "cfg": 1, "ring": 1, "ulysses": 1} | axes
    assert chosen == f"{strategy} ({why})"


def test_everything_is_decided_exactly_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    for name in ("search", "choose_local", "choose_transport"):
        real = getattr(planning, name)
        monkeypatch.setattr(planning, name, lambda *args, real=real, name=name: made.append(name) or real(*args))
    engine = DistributedDiT.from_pretrained(Files.locate("builtin").blueprint, Mesh.single())
    assert sorted(made) == ["choose_local", "choose_transport", "search"]
    made.clear()
    DistributedDiT(engine.model, plan=engine.plan)
    assert not made


def test_a_plan_is_passed_on_and_leaves_no_name_open() -> None:
    plan = DistributedDiT(model_of(), Mesh.single()).plan
    assert plan.ms == plan.ranking.ranked[0].ms > 0
    assert str(plan) == str(DistributedDiT(model_of(), plan=plan).plan)
    with pytest.raises(ValueError, match="pass either the plan or these names"):
        DistributedDiT(model_of(), strategy="ring", plan=plan)


def another_mesh(rank: int, world: int, device: torch.device) -> str:
    mesh = make_mesh(device, cfg=1)
    plan = DistributedDiT(model_of().to(device), mesh).plan
    try:
        DistributedDiT(model_of().to(device), make_mesh(device, cfg=2), plan=plan)
    except ValueError as error:
        return str(error)
    return "taken"


def test_a_plan_for_another_mesh_is_refused_on_every_rank(ranks: Pool) -> None:
    told = "got a plan for ulysses 2 and a mesh of cfg 2, expected the same sizes; give one"
    assert ranks.run(2, another_mesh) == [told] * 2


def test_a_plan_for_a_known_load_differs_from_one_for_the_models_own_size() -> None:
    """Negative control of the first test: another load leads to another plan."""
    files, ranks = Files.locate("builtin"), Mesh.single()
    work = work_of(files.blueprint.config)
    one, two = (
        make(work, files.load_of(["0"] * images, True, 25, torch.float32), torch.float32, ranks, Preferences())
        for images in (1, 2)
    )
    assert two.ms > one.ms
