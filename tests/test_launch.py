"""The command line as a user meets it: pictures, and for every mistake one message, a non-zero exit and no hang."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from launch.sample import Args, mesh_axes, parse_size
from tests.tiny import diffusers_dit

ROOT = Path(__file__).parent.parent
SCRIPT = str(ROOT / "launch" / "sample.py")
LIMIT_S = 120


def launch(*flags: object, ranks: int = 1, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the launcher on the CPU; a hang is a failure."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command = [*(start if ranks > 1 else [sys.executable]), SCRIPT, *map(str, flags)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "COLUMNS": "200", **env}
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=environment, check=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A transformer folder with random weights."""
    path = tmp_path_factory.mktemp("model")
    diffusers_dit().float().save_pretrained(path)  # pyright: ignore
    return path


def test_two_ranks_make_a_picture_that_says_how_it_was_made(folder: Path, tmp_path: Path) -> None:
    flags = ("--model", folder, "--classes", "3", "5", "--steps", "3", "--size", "96x64", "--out")
    done = launch(*flags, tmp_path / "two.png", "--mesh", "ulysses=2", ranks=2)
    assert done.returncode == 0, done.stderr
    for shown in ("mesh      ulysses 2 (2 x CPU, gloo)", "strategy  ulysses (3 heads on 2 ranks)", "local     sdpa",
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
    assert told["classes"] == ["3", "5"]
    assert told["chosen"] == {"strategy": "ulysses", "local": "sdpa",
                              "mesh": {"data": 1, "cfg": 1, "ring": 1, "ulysses": 2}}  # fmt: skip
    assert set(Args.__dataclass_fields__) <= set(told)


def test_a_preset_makes_a_preview_without_a_decoder(tmp_path: Path) -> None:
    done = launch("--model", "dit-s/8", "--steps", "2", "--size", "128", "--classes", "1", "--out", tmp_path / "x.png")
    assert done.returncode == 0, done.stderr
    assert "first three latent channels" in done.stdout


def truncated(folder: Path, tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    name = "diffusion_pytorch_model.safetensors"
    (tmp_path / name).write_bytes((folder / name).read_bytes()[:-100])
    return tmp_path


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--mesh", "ulysses=3"), "error: got a mesh of data=1 x cfg=1 x ring=1 x ulysses=3 = 3 ranks for 2 process"),
        (("--mesh", "rings=2"), "error: got --mesh rings=2, expected axes like cfg=2,ulysses=2"),
        (("--classes", "99"), "error: got class '99', expected a number 0 to 9"),
        (("--model", "nothing-there"), "error: got model 'nothing-there': there is no such path; presets"),
        (("--strategy", "ulises"), "error: got attention 'ulises', expected one of kv_gather, ring, ulysses, usp"),
        (("--local-attention", "flash"), "error: got local attention 'flash', which does not work here: needs a GPU"),
        (("--size", "100"), "error: got size 100x100, expected multiples of 16"),
        (("--size", "16"), "error: got 1 tokens for 2 ranks"),
        (("--out", "/proc/nowhere/x.png"), "error: got output /proc/nowhere/x.png, which cannot be written"),
        (("--guidance", "1", "--mesh", "cfg=2"), "error: got cfg=2 with guidance 1.0, expected guidance > 1"),
        (("--scheduler", "DDIMSchedular"), "error: got scheduler 'DDIMSchedular', expected one of diffusers': DDIMS"),
        (("--steps", "0"), "error: got --steps 0"),
        (("--step", "x"), "Unrecognized options:"),
    ],
    ids=lambda value: "-".join(map(str, value)).strip("-") if isinstance(value, tuple) else "",
)
def test_a_mistake_is_one_message_and_no_hang(
    folder: Path, tmp_path: Path, flags: tuple[str, ...], message: str
) -> None:
    given = {"--mesh": "ulysses=2", "--model": str(folder), "--out": str(tmp_path / "x.png"), "--steps": "2",
             "--size": "64"}  # fmt: skip
    rest = [word for name, value in given.items() if name not in flags for word in (name, value)]
    done = launch(*rest, *flags, ranks=2)
    assert done.returncode != 0
    assert (done.stderr + done.stdout).count(message) == 1, done.stderr
    assert not list(tmp_path.iterdir())


def test_a_truncated_checkpoint_is_one_message(folder: Path, tmp_path: Path) -> None:
    bad = truncated(folder, tmp_path)
    done = launch("--model", bad, "--out", tmp_path / "x.png", ranks=2)
    assert done.returncode != 0
    assert done.stderr.count("truncated or no safetensors file") == 1


def test_latents_that_are_not_finite_are_one_message(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "diffusion_pytorch_model.safetensors")
    tensors["proj_out_2.weight"] = torch.full_like(tensors["proj_out_2.weight"], float("inf"))
    save_file(tensors, tmp_path / "diffusion_pytorch_model.safetensors")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    done = launch("--model", tmp_path, "--steps", "2", "--size", "64", "--out", tmp_path / "x.png", ranks=2)
    assert done.returncode != 0
    assert done.stderr.count("error: latents stopped being finite at step 1 of 2") == 1
    assert not (tmp_path / "x.png").exists()


def test_help_explains_every_flag_and_there_are_at_most_15() -> None:
    done = launch("--help")
    assert done.returncode == 0
    flags = Args.__dataclass_fields__
    assert len(flags) <= 15
    assert all(f"--{name.replace('_', '-')}" in done.stdout for name in flags)


def test_local_is_short_for_local_attention(folder: Path, tmp_path: Path) -> None:
    done = launch("--model", folder, "--local", "flash", "--out", tmp_path / "x.png")
    assert "local attention 'flash', which does not work here" in done.stderr


@pytest.mark.parametrize(("text", "size"), [(None, None), ("256", (256, 256)), ("64x96", (64, 96))])
def test_size_is_height_by_width(text: str | None, size: tuple[int, int] | None) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["1x2x3", "big", "-5", "64x"])
def test_a_size_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected pixels like 256 or 256x384"):
        parse_size(text)


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [("ring", {"cfg": 2, "ring": 2, "ulysses": 1}), ("auto", {"cfg": 2, "ring": 1, "ulysses": 2})],
)
def test_auto_mesh_follows_the_strategy(
    monkeypatch: pytest.MonkeyPatch, strategy: str, expected: dict[str, int]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert mesh_axes(Args(strategy=strategy), guidance=True) == expected
