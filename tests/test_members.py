"""Tests of every member of the folders of plugins: whatever file is there can be found, named, planned and run."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import seqpar.kernels
import seqpar.local
import seqpar.loop.models
import seqpar.pipelines
from seqpar.cli.args import Args
from seqpar.cli.job import check
from seqpar.cli.sample import run
from seqpar.local import reference
from seqpar.loop.blueprint import locate
from seqpar.mesh.mesh import Mesh
from seqpar.pipelines import classes as class_labels
from seqpar.pipelines.find import FAMILIES, find
from seqpar.types.plugins import plugin, plugins
from tests.support.meshes import random

MODELS = {
    name: f"random:{next(iter(plugin(seqpar.loop.models, name, 'model').SIZES))}"
    for name in plugins(seqpar.loop.models)
}
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def asked(model: str) -> dict[str, Any]:
    return {"classes": ("1",)} if find(MODELS.get(model, model)).takes == "classes" else {"prompt": ("x",)}


@pytest.mark.parametrize("model", MODELS)
def test_every_model_is_planned_by_its_config_and_work(capsys: pytest.CaptureFixture[str], model: str) -> None:
    run(Args(MODELS[model], dry_run=(1, 2), **asked(model)))
    one, two = capsys.readouterr().out.split("\n\n")[1:]
    assert one.startswith("1 x NVIDIA H200: one rank, ")
    assert two.startswith("2 x NVIDIA H200: ")
    assert "a step: " in two


def test_a_model_without_a_family_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(class_labels, "MODELS", ())
    with pytest.raises(ValueError, match="no pipeline here runs dit-s/8; add its family"):
        find("dit-s/8")


@pytest.mark.parametrize("model", MODELS)
def test_no_model_has_two_families(model: str) -> None:
    kind = locate(MODELS[model]).module.Model
    families = [plugin(seqpar.pipelines, name, "family") for name in FAMILIES]
    assert sum(issubclass(kind, family.MODELS) for family in families) <= 1


SMALL = [name for name in MODELS if sum(x.numel() for x in locate(MODELS[name]).meta().parameters()) < 1e6]


@pytest.mark.parametrize("model", [*SMALL, "builtin"])
def test_a_small_model_makes_a_picture_from_the_command_line(tmp_path: Path, model: str) -> None:
    args = Args(MODELS.get(model, model), steps=2, size="64", out=tmp_path / "x.png", **asked(model))
    job = check(args, Mesh.single())
    assert job.steps == 2
    run(args)
    assert [path.name for path in tmp_path.iterdir()] == ["x.png"]


@pytest.mark.parametrize("local", plugins(seqpar.local))
@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
def test_every_local_attention_that_works_here_is_the_formula(local: str, heads: tuple[int, int]) -> None:
    module = plugin(seqpar.local, local, "local attention")
    if (reason := module.why_not(CPU, torch.float64, 8)) is not None:
        pytest.skip(reason)
    q, k, v = (random((2, 11, n, 8), seed) for seed, n in enumerate((heads[0], heads[1], heads[1])))
    mask = torch.arange(11) % 3 != torch.tensor([[0], [1]])
    for given in (None, mask) if module.why_not(CPU, torch.float64, 8, True) is None else (None,):
        for got, truth in zip(module.attend(q, k, v, given), reference.attend(q, k, v, given), strict=True):
            assert (got - truth).abs().max() < 1e-12
    assert isinstance(module.preference(9, 64), int | None)
    assert isinstance(module.invariant(CPU, torch.float64, 8), str | None)


@pytest.mark.parametrize("kernel", plugins(seqpar.kernels))
def test_every_kernel_has_a_reference_in_plain_torch(kernel: str) -> None:
    module: ModuleType = importlib.import_module(f"seqpar.kernels.{kernel}")
    assert module.__doc__
    assert any(name.startswith(("reference", "_reference")) for name in vars(module)), vars(module).keys()
