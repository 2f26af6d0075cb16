"""`seqpar profile`: a run of `seqpar sample` that also tells where its time went."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from seqpar.cli.args import ProfileArgs
from seqpar.cli.sample import run
from tests.cli.processes import seqpar
from tests.cli.runs import parameters


def test_two_ranks_make_the_picture_and_the_profile(tmp_path: Path) -> None:
    out, folder = tmp_path / "x.png", tmp_path / "profile"
    flags = ("--ranks", "2", "--classes", "cat", "--steps", "4", "--profile-steps", "2", "--mesh", "ulysses=2")
    ended = seqpar("profile", *flags, "--profile-out", folder, "--out", out)
    assert ended.returncode == 0, ended.stderr
    assert "\nKernels that lose the most time per step:\n1. " in ended.stdout
    assert f"profile   {folder}: traces for ui.perfetto.dev, table" in ended.stdout
    assert (folder / "profile.txt").read_text() in ended.stdout
    assert {path.suffix for path in folder.iterdir()} == {".gz", ".txt", ".csv", ".json"}
    assert len(list(folder.iterdir())) == 6
    shown = parameters(out)
    assert (shown["profile_out"], shown["profile_steps"]) == (str(folder), 2)


@pytest.mark.usefixtures("no_gpu")
def test_a_pipeline_of_diffusers_is_profiled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], folders: Callable[[str], Path]
) -> None:
    made = {"model": str(folders("flux")), "prompt": ("a cat",), "out": tmp_path / "x.png"}
    run(ProfileArgs(**made, steps=3, profile_steps=2, profile_out=tmp_path / "p"))
    text = capsys.readouterr().out
    assert "FluxTransformerBlock" in text
    assert "FluxSingleTransformerBlock" in text
    assert (tmp_path / "p" / "profile.txt").is_file()
