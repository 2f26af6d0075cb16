"""The built-in model of texts as it comes with the package: its pictures are looked at, and are diffusers' own."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from seqpar.cli.args import Args
from seqpar.cli.sample import run
from seqpar.loading.names import NAMES
from seqpar.transformer import calibration
from tests.cli.processes import LIMIT_S, environment
from tests.cli.runs import SAME, pixels, shown
from tests.support.pool import Pool

pytestmark = pytest.mark.slow

FOLDER = NAMES["builtin-text"]
MOST_PARAMETERS = 7_000_000
FROG = "a green frog on white"


@pytest.fixture(scope="module")
def theirs() -> Any:
    from diffusers.pipelines.flux.pipeline_flux import FluxPipeline

    pipe: Any = FluxPipeline.from_pretrained(FOLDER, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.mark.usefixtures("no_gpu")
def test_pictures_show_what_the_prompt_says_and_are_diffusers_own(ranks: Pool, theirs: Any, tmp_path: Path) -> None:
    """A frog: green in the middle, on white; a heart: red, on blue. Two ranks make what diffusers makes alone."""
    args = Args(prompt=(FROG, "a red heart on blue"), steps=5, seed=3, dtype="fp32", out=tmp_path / "x.png")
    ranks.run(2, shown, args)
    frog, heart = (pixels(tmp_path / f"x-{number}.png") for number in (1, 2))
    same: dict[str, Any] = {"height": 64, "width": 64, "num_inference_steps": 5, "output_type": "np"}
    truth = theirs(list(args.prompt), generator=torch.Generator().manual_seed(3), **same).images
    for picture, expected in zip((frog, heart), truth, strict=True):
        assert picture.shape == (64, 64, 3)
        assert abs(picture - expected).max() <= SAME
    (frog_middle, frog_corners), (heart_middle, heart_corners) = colours(frog), colours(heart)
    assert frog_middle.argmax() == 1
    assert frog_corners.min() > 0.78
    assert heart_middle.argmax() == 0
    assert heart_corners.argmax() == 2


def colours(picture: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    edges = slice(4), slice(-4, None)
    corners = [picture[rows, columns] for rows in edges for columns in edges]
    return picture[24:40, 24:40].mean((0, 1)), np.stack(corners).mean((0, 1, 2))


def test_its_files_are_small_and_its_tokenizers_know_the_words_of_its_prompts(theirs: Any) -> None:
    parts = (theirs.transformer, theirs.vae, theirs.text_encoder, theirs.text_encoder_2)
    assert sum(weight.numel() for part in parts for weight in part.parameters()) <= MOST_PARAMETERS
    for tokenizer in (theirs.tokenizer, theirs.tokenizer_2):
        assert len(tokenizer.tokenize("green frog on white")) == 4


@pytest.mark.usefixtures("no_gpu")
def test_the_lora_that_comes_with_it_changes_the_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Lines leave more of the background: the middle of the frog comes closer to white."""
    plain = Args(prompt=(FROG,), steps=4, seed=3, dtype="fp32", out=tmp_path / "x.png")
    middles = []
    for lora in ((), ("outline",)):
        run(replace(plain, lora=lora))
        middles.append(colours(pixels(plain.out))[0].mean())
    assert middles[1] > middles[0] + 0.08
    assert "lora      outline:1\n" in capsys.readouterr().out


def cached(rank: int, world: int, device: torch.device, args: Args, cache: Path) -> tuple[tuple[str, str], bytes]:
    """What a run prints, and the calibration that it leaves or finds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SEQPAR_CACHE", str(cache))
        patch.setattr(calibration, "STEPS", 2)
        printed = shown(rank, world, device, args)
    (file,) = cache.iterdir()
    return printed, file.read_bytes()


@pytest.mark.usefixtures("no_gpu")
def test_8_bits_change_little_and_no_request_or_rank_changes_their_calibration(ranks: Pool, tmp_path: Path) -> None:
    args = Args(prompt=(FROG,), steps=2, seed=3, dtype="fp32", out=tmp_path / "x.png")
    run(args)
    wide, eight, calibrations = pixels(args.out), replace(args, precision="fp8"), set[bytes]()
    Image.new("RGB", (64, 64)).save(tmp_path / "in.png")
    other = replace(
        eight, prompt=("a red heart on blue",), seed=1, image=(str(tmp_path / "in.png"),), lora=("outline",)
    )
    for world, asked in ((1, other), (2, eight)):
        ((out, bars), calibration), *_ = ranks.run(world, cached, asked, tmp_path / str(world))
        calibrations.add(calibration)
        assert "GEMMs in 8 bits are centred by fixed prompts" in out
        assert "17 of 22 GEMMs in 8 bits" in out
        assert "float32 and fp8, " in out
        assert {line.partition(":")[0] for line in bars.splitlines() if line.strip()} == {
            "encoding",
            "denoising",
            "decoding",
        }
    assert len(calibrations) == 1
    assert 1e-3 < abs(pixels(eight.out) - wide).mean() < 0.02


@pytest.mark.whole
def test_a_run_prints_no_line_of_other_libraries_and_imports_no_profiler(tmp_path: Path) -> None:
    """In a process of its own: transformers warns once per process of torchvision, also for image-to-image classes."""
    seen = "print([x for x in sys.modules if 'seqpar.profiling' in x])"
    program = f"import atexit, sys; from seqpar.cli.entry import main; atexit.register(lambda: {seen}); main()"
    Image.new("RGB", (64, 64)).save(tmp_path / "in.png")
    flags = ["--prompt", FROG, "--image", "in.png", "--steps", "2", "--out", "x.png"]
    command = [sys.executable, "-c", program, "sample", *flags]
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=LIMIT_S, cwd=tmp_path, check=True
    )
    bars = {line.partition(":")[0] for line in done.stderr.splitlines() if line.strip()}
    assert bars == {"encoding", "denoising", "decoding"}
    assert done.stdout.splitlines()[-1] == "[]"
