"""Tests of the numerics bench: in fp64 its three ways agree, and in bf16 it detects a planted error."""

from __future__ import annotations

import json
from argparse import Namespace
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from launch.baselines.plain import cast
from launch.benches import numerics, table
from launch.benches.numerics import ENGINE, PLAIN, Numerics
from seqpar.engine.distributed import DistributedDiT
from seqpar.mesh import Mesh
from seqpar.models import dit, large_dit
from seqpar.pipelines.class_labels import Files
from seqpar.weights.find import Blueprint
from tests.support.tiny import diffusers_dit, original_state_dict

CPU, STEPS = torch.device("cpu"), 4
LARGE = large_dit.Config(64, 2, 4, 4, 48, num_classes=10, sample_size=8)
TINY = {
    "builtin": Files.locate("builtin"),
    "dit": Files(Blueprint("dit", dit, dit.Config(4, 16, 2)), None, None, {}),
    "large": Files(Blueprint("large", large_dit, LARGE), None, None, {}),
}


def errors(name: str, dtype: torch.dtype, planted: float = 0.0) -> dict[str, list[float]]:
    """Return the errors of each way; `planted` scales the engine's last projection by 1 + planted."""
    files = TINY[name]
    truth = numerics.plain_truth(files, torch.float64, CPU)
    plain = cast(deepcopy(truth), dtype)
    engine: Any = numerics.engine_of(plain, dtype)
    engine.final.weight.mul_(1 + planted)
    return numerics.compare(truth, plain, DistributedDiT(engine, Mesh.single()), files.schedule(None, STEPS), STEPS)


@pytest.mark.parametrize("name", TINY)
def test_in_fp64_the_three_ways_are_one(name: str) -> None:
    """The tolerance is that of fp32: diffusers' coefficients and all models' sinusoids have that dtype."""
    found = errors(name, torch.float64)
    assert {way: len(values) for way, values in found.items()} == {ENGINE: STEPS, PLAIN: STEPS}
    assert max(found[PLAIN]) < 1e-12
    assert max(found[ENGINE]) < 1e-4  # the error in bf16 is about 1e-2


@pytest.mark.parametrize("name", ["dit", "large"])
def test_a_planted_error_is_seen_and_is_as_large_as_it_is(name: str) -> None:
    found = errors(name, torch.float64, planted=0.01)
    assert found[ENGINE] == pytest.approx([0.01] * STEPS, rel=0.6)  # the planted error leaves the bias as it is
    assert max(found[PLAIN]) < 1e-12


@pytest.mark.parametrize("name", TINY)
def test_in_bf16_the_engine_is_no_worse_than_plain_torch(name: str) -> None:
    found = errors(name, torch.bfloat16)
    assert min(found[PLAIN]) > 1e-4
    assert all(ours < 1.25 * theirs for ours, theirs in zip(found[ENGINE], found[PLAIN], strict=True))
    worse = errors(name, torch.bfloat16, planted=0.5)
    assert all(ours > 1.25 * theirs for ours, theirs in zip(worse[ENGINE], worse[PLAIN], strict=True))


def test_the_line_holds_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numerics, "pick_device", lambda world: CPU)
    numerics.main(Numerics(steps=STEPS, out=tmp_path / "lines.jsonl"))
    line = json.loads((tmp_path / "lines.jsonl").read_text())
    assert line["case"] == {
        "model": "builtin",
        "tokens": 64,
        "steps": STEPS,
        "local": "sdpa",
        "dtype": "bfloat16",
        "truth": "float64",
        "graph": False,
    }
    ratios = [ours / theirs for ours, theirs in zip(line["error"][ENGINE], line["error"][PLAIN], strict=True)]
    assert line["ratio"]["max"] == max(ratios)
    assert f"({max(ratios):.3f})" in table.tables([line])[0]


def test_models_without_a_plain_twin_and_schedulers_with_memory_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = original_state_dict(diffusers_dit(num_attention_heads=1, attention_head_dim=64))
    torch.save({"model": state, "args": Namespace(num_heads=1)}, tmp_path / "dit.pt")
    with pytest.raises(ValueError, match=r"got model .*dit\.pt, expected builtin, a diffusers pipeline folder"):
        numerics.locate(str(tmp_path / "dit.pt"), STEPS)
    schedule = Files.schedule
    monkeypatch.setattr(
        Files, "schedule", lambda self, name, steps: schedule(self, "DPMSolverMultistepScheduler", steps)
    )
    with pytest.raises(ValueError, match="got DPMSolverMultistepScheduler, expected DDIMScheduler"):
        numerics.locate("builtin", STEPS)
