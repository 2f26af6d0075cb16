"""`seqpar verify` from flags to its table."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from seqpar.cli.args import Args, VerifyArgs
from seqpar.cli.sample import run
from seqpar.cli.verify import RANDOM, _head, checked, run_verify
from seqpar.mesh.mesh import Mesh
from seqpar.verifying import budget
from tests.support.pool import Pool
from tests.verifying.faults import Fault, ending, lost_shard, none

PICTURE = Path(__file__).parents[2] / "docs" / "builtin.png"


def printed(rank: int, world: int, device: torch.device, args: VerifyArgs, fault: Fault) -> tuple[str, str]:
    return ending(rank, fault, lambda: run_verify(args))


def test_a_table_is_printed_and_the_verdicts_are_written(ranks: Pool, tmp_path: Path) -> None:
    out = tmp_path / "new" / "verdicts.json"
    args = VerifyArgs(classes=("cat",), steps=1, strategy="kv_gather", transport="collective", out=out)
    (shown, ended), (_, other) = ranks.run(2, printed, args, none)
    assert ended == other == ""
    for text in (
        "reference one rank, fp32",
        "bfloat16, 2 ranks, ulysses 2, kv_gather, collective ",
        "float32, 2 ranks, ulysses 2, kv_gather, collective ",
        "verdict   every way holds",
    ):
        assert text in shown
    assert "random" not in shown
    rows = json.loads(args.out.read_text())["rows"]
    half = {"torch.float16"} if ranks.device == "cuda" else set[str]()
    assert {row["dtype"] for row in rows} == {"torch.float32", "torch.bfloat16", *half}
    assert all(row["verdict"]["ratio"] < 1.5 and row["finding"] is None for row in rows)


def test_a_fault_ends_in_an_error_that_names_it_and_the_verdicts_are_written(ranks: Pool, tmp_path: Path) -> None:
    flags: dict[str, Any] = {"strategy": "ulysses", "mesh": "cfg=1", "transport": "collective", "dtype": "bf16"}
    args = VerifyArgs(classes=("cat",), steps=2, counts=(2,), out=tmp_path / "verdicts.json", **flags)
    for shown, ended in ranks.run(2, printed, args, lost_shard):
        assert ended.startswith(
            "got bfloat16, 2 ranks, ulysses 2, ulysses, collective: attention in blocks.0 of step 1"
        )
        assert "verdict   1 finding(s)" in shown or not shown
    alone, row = json.loads(args.out.read_text())["rows"]
    assert alone["finding"] is None
    assert row["finding"].startswith("attention in blocks.0 of step 1 on rank ")


def few_runs(patch: pytest.MonkeyPatch) -> None:
    """Let a search end early: `tests/verifying/test_budget.py` tests how it goes."""
    patch.setattr(budget, "GROUPS", 2)
    patch.setattr(budget, "RUNS", 7)


def test_the_error_of_8_bits_is_printed_written_and_bounded(
    ranks: Pool, folders: Callable[[str], Path], pose: Path, tmp_path: Path
) -> None:
    out = tmp_path / "precision.json"
    net = {"controlnet": str(pose), "control_image": str(PICTURE)}
    args = VerifyArgs("builtin-text", prompt=("a red heart",), precision="fp8", steps=2, out=out)
    ends = ranks.run(2, printed, args, none)
    assert [ended for _, ended in ends] == ["", ""]
    assert "precision 8 bits" in ends[0][0]
    (error,), (floor,) = (json.loads(out.read_text())["precision"][name] for name in ("errors", "floor"))
    assert 15 < error["psnr"] < 99 < floor["psnr"]
    args = replace(args, min_psnr=30.0)
    for wrong, message in (
        ({"precision": None, "min_psnr": 20.0}, "--min-psnr without --precision fp8"),
        ({"lora": ("outline",)}, "leave --lora and --preset out"),
        ({"preset": "turbo-8", "steps": 0}, "leave --lora and --preset out"),
        ({"model": "random:FLUX.1-dev"}, "pipelines of trained weights"),
        ({"repeat": 2}, "leave --image, --controlnet, --counts and --repeat out"),
        ({"model": str(folders("flux")), "size": "32x32", **net}, "leave --image, --controlnet, --counts"),
        ({"model": "builtin", "prompt": ()}, "pipelines of trained weights"),
    ):
        with pytest.raises(ValueError, match=message):
            run_verify(VerifyArgs(**{**vars(args), **wrong}))


def test_a_threshold_is_searched_and_sample_takes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SEQPAR_CACHE", str(tmp_path / "cache"))
    shared: Any = {"prompt": ("a red heart",), "steps": 4, "cache": "dbcache:warmup=1", "min_psnr": 9.0}
    image = Args("builtin-text", out=tmp_path / "x.png", **shared)
    with pytest.raises(ValueError, match="run: seqpar verify --cache dbcache:warmup=1 --min-psnr 9 --steps 4"):
        run(image)
    few_runs(monkeypatch)
    run_verify(VerifyArgs("builtin-text", out=tmp_path / "precision.json", **shared))
    found = json.loads((tmp_path / "precision.json").read_text())
    ((count, _),) = found["precision"]["computed"]
    assert count < 4
    assert found["precision"]["errors"][0]["psnr"] >= 9
    run(image)
    said = capsys.readouterr().out
    assert f"step cache dbcache:threshold={found['budget']['threshold']:g},warmup=1 for 9 dB in 4 steps" in said
    assert f"steps computed {count} of 4" in said


def test_random_weights_are_said_to_show_little_and_wrong_flags_are_refused(tmp_path: Path) -> None:
    args, alone = VerifyArgs("dit-s/8", ("1",), size="128", out=tmp_path / "verdicts.json"), Mesh.single()
    assert RANDOM in _head(args, checked(args, alone), alone, "1 way", ())
    assert RANDOM not in _head(args, checked(VerifyArgs(out=tmp_path / "verdicts.json"), alone), alone, "1 way", ())
    for wrong, message in (
        ({"counts": (2,)}, "expected numbers of ranks from 1 to 1"),
        (
            {"model": "random:FLUX.1-dev", "prompt": ("x",), "classes": (), "size": None},
            "are compared for models of classes only",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            run_verify(VerifyArgs(**{**vars(args), **wrong}))
