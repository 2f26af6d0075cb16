"""The command line as a user meets it: pictures, and for every mistake one message, a non-zero exit and no hang."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
import tyro
from PIL import Image
from safetensors.torch import load_file, save_file

from seqpar.cli.sample import Args, Progress, check, parse_size
from seqpar.mesh import Mesh
from seqpar.planner.plan import parse_mesh
from seqpar.sampling.guidance import Guidance
from seqpar.weights.find import Blueprint
from tests.cli.test_mistakes import words

ROOT = Path(__file__).parents[2]
SCRIPT = str(ROOT / "launch" / "sample.py")
LIMIT_S = 120


def launch(*flags: object, ranks: int = 1, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the launcher on the CPU; a hang is a failure."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command = [*(start if ranks > 1 else [sys.executable]), SCRIPT, *map(str, flags)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "COLUMNS": "200", **env}
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=environment, check=False)


def test_two_ranks_make_a_picture_that_says_how_it_was_made(folder: Path, tmp_path: Path) -> None:
    flags = ("--model", folder, "--classes", "3", "5", "--steps", "3", "--size", "96x64", "--out")
    done = launch(*flags, tmp_path / "two.png", "--mesh", "ulysses=2", ranks=2)
    assert done.returncode == 0, done.stderr
    for shown in ("mesh      ulysses 2 (2 x CPU, gloo)", "plan      ulysses 2 by ulysses, ",
                  "nothing was measured here", "strategy  ulysses (planned)", "local     sdpa",
                  "24 tokens", "ms a step"):  # fmt: skip
        assert shown in done.stdout
    assert "3/3" in done.stderr  # the progress bar
    alone = launch(*flags, tmp_path / "one.png")
    assert alone.returncode == 0, alone.stderr
    with Image.open(tmp_path / "two.png") as two, Image.open(tmp_path / "one.png") as one:
        assert two.size == one.size
        assert max(abs(a - b) for a, b in zip(two.tobytes(), one.tobytes(), strict=True)) <= 2  # fp32, two orders
        told = json.loads(two.info["seqpar"])
    assert told["seed"] == 0
    assert told["latents"] in done.stdout + alone.stdout
    assert told["classes"] == ["3", "5"]
    assert told["chosen"] == {"strategy": "ulysses", "local": "sdpa", "transport": "collective", "world": 2,
                              "device": "CPU", "dtype": "fp32", "size": "96x64",
                              "mesh": {"data": 1, "cfg": 1, "ring": 1, "ulysses": 2},
                              "scheduler": "DDIMScheduler", "classes": ["3", "5"]}  # fmt: skip
    assert told["versions"] == {name: version(name) for name in ("torch", "diffusers", "seqpar")}
    assert set(Args.__dataclass_fields__) <= set(told)


def test_a_preset_makes_a_preview_without_a_decoder(tmp_path: Path) -> None:
    done = launch("--model", "dit-s/8", "--steps", "2", "--size", "128", "--classes", "1", "--out", tmp_path / "x.png")
    assert done.returncode == 0, done.stderr
    assert "first three latent channels" in done.stdout


def test_a_named_strategy_exchanges_and_the_metadata_hold_what_was_chosen(tmp_path: Path) -> None:
    out = tmp_path / "new" / "x.png"
    flags = ("--strategy", "ring", "--scheduler", "HeunDiscreteScheduler", "--steps", "2", "--repeat", "2")
    done = launch(*flags, "--classes", "cat", "1", "--out", out, ranks=2)
    assert done.returncode == 0, done.stderr
    for shown in ("mesh      ring 2 (2 x CPU", "strategy  ring (as asked)", "branches  both on all ranks", "4 pictures",
                  "the scheduler calls the model 3 times"):  # fmt: skip
        assert shown in done.stdout
    assert "3/3" in done.stderr
    with Image.open(out) as picture:
        told = json.loads(picture.info["seqpar"])
    assert told["dtype"] == "auto"  # as given, beside what it came to
    chosen = {"dtype": "fp32", "size": "64x64", "scheduler": "HeunDiscreteScheduler", "classes": ["cat", "1"]}
    assert {name: told["chosen"][name] for name in chosen} == chosen
    assert told["chosen"]["mesh"] == {"data": 1, "cfg": 1, "ring": 2, "ulysses": 1}


# each ends elsewhere: in the planner, in a check, when attention is chosen, at the disk, in the parser; others are in
# test_mistakes.py
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--mesh", "ulysses=3"), "error: got a mesh of data=1 x cfg=1 x ring=1 x ulysses=3 = 3 ranks for 2 process"),
        (("--classes", "99"), "error: got class '99', expected a number 0 to 9"),
        (("--local-attention", "flash"), "error: got local attention 'flash', which does not work here: needs a GPU"),
        (("--out", "/proc/nowhere/x.png"), "error: got output /proc/nowhere/x.png, which cannot be written"),
        (("--step", "x"), "Unrecognized options:"),
    ],
    ids=lambda value: "-".join(map(str, value)).strip("-") if isinstance(value, tuple) else "",
)
def test_a_mistake_is_one_message_and_no_hang(
    folder: Path, tmp_path: Path, flags: tuple[str, ...], message: str
) -> None:
    done = launch(*words(folder, tmp_path / "x.png", flags), ranks=2)
    assert done.returncode != 0
    assert (done.stderr + done.stdout).count(message) == 1, done.stderr
    assert "step/s" not in done.stderr  # no bar before anything has been done
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": -1}, "got --seed -1, expected 0 to 2\\*\\*63 - 1"),
        ({"seed": 2**63}, "got --seed 9223372036854775808"),
        (
            {"guidance": 1.0, "guidance_channels": 3},
            "got --guidance-channels 3 with --guidance 1, expected guidance over",
        ),
        ({"guidance_channels": 5}, "got guidance on 5 channels"),
        ({"eta": 2.0}, "got eta 2, expected 0"),
        ({"eta": 0.5, "scheduler": "EulerDiscreteScheduler"}, "this scheduler has no eta"),
        ({"scheduler": "KarrasVeScheduler"}, "which steps with"),
        ({"scheduler": "PNDMScheduler", "steps": 3}, "got 3 steps, which PNDMScheduler cannot do"),
        ({"steps": 1001}, "got 1001 steps, expected 1 to 1000"),
        ({"repeat": 0}, "--repeat 0"),
    ],
    ids=str,
)
def test_the_check_refuses_before_weights_load_and_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], message: str
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(Blueprint, "build", refuse)
    args = Args(**{"out": tmp_path / "new" / "x.png", **change})
    guidance = Guidance(args.guidance, args.guidance_channels)
    with pytest.raises(ValueError, match=message):
        check(args, Mesh.single(), guidance)
    assert not list(tmp_path.iterdir())


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


def test_latents_that_are_not_finite_are_one_message(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "diffusion_pytorch_model.safetensors")
    tensors["proj_out_2.weight"] = torch.full_like(tensors["proj_out_2.weight"], float("inf"))
    save_file(tensors, tmp_path / "diffusion_pytorch_model.safetensors")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    done = launch("--model", tmp_path, "--steps", "2", "--size", "64", "--out", tmp_path / "x.png", ranks=2)
    assert done.returncode != 0
    assert done.stderr.count("error: latents stopped being finite at step 1 of 2") == 1
    assert not (tmp_path / "x.png").exists()


def test_help_explains_every_flag_and_there_are_few() -> None:
    done = launch("--help")
    assert done.returncode == 0
    flags = Args.__dataclass_fields__
    assert len(flags) <= 18  # 15 that say what to do, and --transport, --exact, --dry-run
    assert all(f"--{name.replace('_', '-')}" in done.stdout for name in flags)


def test_local_is_short_for_local_attention() -> None:
    assert tyro.cli(Args, args=["--local", "flash"]) == tyro.cli(Args, args=["--local-attention", "flash"])
    assert tyro.cli(Args, args=["--local", "flash"]).local == "flash" != Args().local


def test_a_mesh_names_an_aim_or_axes() -> None:
    assert parse_mesh("auto") == ("latency", {})
    assert parse_mesh("throughput") == ("throughput", {})
    assert parse_mesh("cfg=2,ulysses=2") == ("latency", {"cfg": 2, "ulysses": 2})


@pytest.mark.parametrize(("text", "size"), [(None, None), ("256", (256, 256)), ("64x96", (64, 96))])
def test_size_is_height_by_width(text: str | None, size: tuple[int, int] | None) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["1x2x3", "big", "-5", "64x"])
def test_a_size_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected pixels like 256 or 256x384"):
        parse_size(text)


def test_auto_plans_for_the_processes_there_are(folder: Path, tmp_path: Path) -> None:
    done = launch(
        "--model", folder, "--steps", "2", "--size", "64", "--classes", "1", "--out", tmp_path / "x.png", ranks=2
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\nplan ") + done.stdout.startswith("plan ") == 1
    assert "plan      cfg 2, " in done.stdout
    assert "(the first picture soonest); next ulysses 2 by kv_gather" in done.stdout
    assert "mesh      cfg 2 (2 x CPU, gloo)" in done.stdout
    with Image.open(tmp_path / "x.png") as picture:
        assert json.loads(picture.info["seqpar"])["chosen"]["mesh"]["cfg"] == 2


def test_throughput_gives_each_process_its_own_pictures(folder: Path, tmp_path: Path) -> None:
    flags = ("--model", folder, "--steps", "2", "--size", "64", "--classes", "1", "2", "--mesh", "throughput")
    done = launch(*flags, "--out", tmp_path / "x.png", ranks=2)
    assert done.returncode == 0, done.stderr
    assert "plan      data 2, " in done.stdout
    assert "(most pictures a second)" in done.stdout
    assert "mesh      data 2 (2 x CPU, gloo)" in done.stdout


@pytest.mark.parametrize(
    ("text", "message"),
    [("cfg=2,cfg=1", "each axis once: cfg is there twice"), ("rings=2", "expected axes like"), ("cfg", "expected axes"),
     ("", "expected axes"), ("cfg=-1", "expected axes")],
)  # fmt: skip
def test_a_mesh_that_is_none_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_mesh(text)
