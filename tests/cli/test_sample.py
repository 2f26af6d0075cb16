"""`seqpar sample` from flags to a picture, in processes that it starts itself and under torchrun."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch

import seqpar as package
from seqpar.cli.args import Args
from seqpar.cli.sample import run
from seqpar.cli.summary import Progress
from seqpar.mesh.mesh import Mesh
from tests.cli.processes import seqpar, torchrun
from tests.cli.runs import SAME, parameters, pixels, shown
from tests.support.pool import Pool


@pytest.mark.usefixtures("no_gpu")
def test_two_ranks_make_the_picture_of_torchrun_and_say_how_it_was_made(folder: Path, tmp_path: Path) -> None:
    flags = ("--model", folder, "--classes", "3", "5", "--steps", "3", "--size", "96x64", "--mesh", "ulysses=2")
    done = seqpar("sample", *flags, "--ranks", "2", "--out", tmp_path / "ours.png")
    assert done.returncode == 0, done.stderr
    for text in (
        "mesh      ulysses 2 (2 x CPU, gloo)",
        "plan      ulysses 2 by ulysses, ",
        "nothing was measured here",
        "strategy  ulysses (planned)",
        "local     sdpa",
        "24 tokens",
        " ms per step, ",
    ):
        assert text in done.stdout
    assert "3/3" in done.stderr  # the progress bar
    other = torchrun(*flags, "--out", tmp_path / "torchrun.png")
    assert other.returncode == 0, other.stderr
    told = parameters(tmp_path / "ours.png")
    assert told["latents"] == parameters(tmp_path / "torchrun.png")["latents"]
    assert told["latents"] in done.stdout
    assert (told["seed"], told["classes"], told["ranks"]) == (0, ["3", "5"], 2)
    assert told["chosen"] == {
        "strategy": "ulysses",
        "local": "sdpa",
        "transport": "collective",
        "world": 2,
        "device": "CPU",
        "dtype": "fp32",
        "size": "96x64",
        "mesh": {"data": 1, "cfg": 1, "ring": 1, "ulysses": 2},
        "scheduler": "DDIMScheduler",
        "guidance": "guidance 4",
        "classes": ["3", "5"],
        "vae": None,
    }
    assert told["versions"] == {module.__name__: module.__version__ for module in (torch, diffusers, package)}
    assert set(Args.__dataclass_fields__) <= set(told)
    run(Args(str(folder), ("3", "5"), steps=3, size="96x64", out=tmp_path / "one.png"))
    assert abs(pixels(tmp_path / "ours.png") - pixels(tmp_path / "one.png")).max() <= SAME


@pytest.mark.usefixtures("no_gpu")
def test_a_random_model_makes_a_preview_without_a_decoder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    ddpm: dict[str, Any] = {"scheduler": "DDPMScheduler", "respacing": "2", "guidance_channels": 3}
    run(Args("dit-s/8", ("1",), size="128", out=tmp_path / "x.png", **ddpm))
    told = capsys.readouterr().out
    assert "model     dit-s/8\nweights   random\n" in told
    assert "first three latent channels" in told
    assert "2 steps of DDPMScheduler with the model's variances on local tokens, guidance 4" in told
    assert (tmp_path / "x.png").is_file()


@pytest.mark.usefixtures("no_gpu")
def test_8_bits_change_little_and_no_request_or_rank_changes_them(
    ranks: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEQPAR_CACHE", str(tmp_path / "cache"))
    args = Args(classes=("cat", "tree"), steps=4, dtype="fp32", out=tmp_path / "x.png")
    run(args)
    wide, eight, made = pixels(args.out), replace(args, precision="fp8"), list[object]()
    for asked in (replace(eight, classes=("dog",), seed=5, size="96x64"), eight):  # the first is calibrated
        ((out, _), *_) = ranks.run(1, shown, asked)
        assert "seqpar: 28 of 28 GEMMs in 8 bits are centred by fixed classes\n" in out
        assert "float32 and fp8, 4 steps" in out
        assert "GEMMs     28 of 28 in 8 bits, " in out
        made.append([path.read_bytes() for path in (tmp_path / "cache").iterdir()])
    assert made[0] == made[1]
    assert 1e-3 < abs(pixels(args.out) - wide).mean() < 0.04


def test_a_named_strategy_exchanges_and_the_metadata_hold_what_was_chosen(ranks: Pool, tmp_path: Path) -> None:
    out = tmp_path / "new" / "x.png"
    args = Args(classes=("cat", "1"), strategy="ring", scheduler="HeunDiscreteScheduler", steps=2, repeat=2, out=out)
    (first, _), (second, _) = ranks.run(2, shown, args)
    for text in (
        "mesh      ring 2 (2 x ",
        "strategy  ring (as asked)",
        "branches  both on all ranks",
        "4 pictures",
        "the scheduler calls the model 3 times",
    ):
        assert text in first
    assert second == ""
    told = parameters(out)
    assert told["dtype"] == "auto"  # as given, beside the value that was used
    chosen = {"size": "64x64", "scheduler": "HeunDiscreteScheduler", "classes": ["cat", "1"]}
    assert {name: told["chosen"][name] for name in chosen} == chosen
    assert told["chosen"]["mesh"] == {"data": 1, "cfg": 1, "ring": 2, "ulysses": 1}


@pytest.mark.parametrize(
    ("mesh", "classes", "axis", "aim"),
    [("auto", "1", "cfg", "(lowest latency); next "), ("throughput", "12", "data", "(highest throughput)")],
)
def test_a_plan_is_made_for_the_processes_there_are(
    ranks: Pool, folder: Path, tmp_path: Path, mesh: str, classes: str, axis: str, aim: str
) -> None:
    args = Args(str(folder), tuple(classes), steps=2, size="64", mesh=mesh, out=tmp_path / "x.png")
    (first, _), (second, _) = ranks.run(2, shown, args)
    assert first.startswith(f"model     {folder}\nplan ")
    assert first.count("\nplan ") == 1
    assert all(text in first for text in (f"plan      {axis} 2, ", aim, f"mesh      {axis} 2 (2 x "))
    assert second == ""
    assert parameters(tmp_path / "x.png")["chosen"]["mesh"][axis] == 2


def test_a_flag_says_how_pictures_are_decoded_and_it_is_told(ranks: Pool, tmp_path: Path) -> None:
    made, one, two = list[Path](), ("cat",), ("cat", "1")
    for wish, classes, way in (("strips", two, "strips"), ("auto", one, "strips"), ("pictures", one, "")):
        args = Args(classes=classes, steps=2, vae=wish, out=tmp_path / f"{wish}.png")  # pyright: ignore
        (first, _), (second, _) = ranks.run(2, shown, args)
        assert f"decoder   {'strips on 2 ranks' if way else 'whole images, some on each of 2 ranks'}" in first
        assert second == ""
        assert parameters(args.out)["chosen"]["vae"] == (way or "pictures")
        made.append(args.out)
    run(replace(args, vae="auto", classes=two, out=tmp_path / "one.png"))
    assert abs(pixels(made[0]) - pixels(tmp_path / "one.png")).max() <= SAME


def test_the_bar_comes_with_the_first_step_and_one_step_is_not_timed(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(2, Mesh.single()) as progress:
        assert capsys.readouterr().err == ""
        progress(0)
        assert "step/s" in capsys.readouterr().err
        assert progress.finish() is None
        time.sleep(0.01)
        progress(1)
        per_step = progress.finish()
        assert per_step is not None
        assert per_step >= 10
    with Progress(2, Mesh.single()):
        pass
    assert "0/2" not in capsys.readouterr().err  # no step, no bar
