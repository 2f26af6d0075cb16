"""Tests of UniDiffuser's original files as a model for prompts, against the same model in diffusers' folder."""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from seqpar import Guidance
from seqpar.cli.args import Args
from seqpar.cli.sample import run
from seqpar.pipelines.unidiffuser import Files, Pipeline
from seqpar.pipelines.unidiffuser_parts import CLIP_FOLDER
from tests.support.foreign import bound
from tests.support.meshes import mesh_for
from tests.support.pool import Pool
from tests.support.published import save_unidiffuser

TEXT = "a red cat"
CLOSE = bound(1e-9, 2e-4)  # of two ways to read the same weights, relative


@cache
def pipe() -> Any:
    """Return diffusers' pipeline of version 1, in sizes that original files can have."""
    from tests.support import pipelines

    return pipelines.unidiffuser(original=True)


def save_clip(folder: Path) -> None:
    """Write CLIP's whole repository, of which the text half is the pipeline's text encoder."""
    from tests.support.pipelines import ENCODERS, WIDTH, random_weights

    sizes = {"hidden_size": WIDTH, "intermediate_size": WIDTH, "num_attention_heads": 4, "num_hidden_layers": 2}
    text = pipe().text_encoder
    whole = ENCODERS.CLIPConfig(
        text_config=text.config.to_dict(), vision_config={**sizes, "image_size": 8, "patch_size": 4}, projection_dim=8
    )
    model = random_weights(ENCODERS.CLIPModel(whole), 9)
    model.text_model.load_state_dict(text.state_dict())
    model.save_pretrained(folder)
    pipe().clip_tokenizer.save_pretrained(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return diffusers' folder and the original one, with CLIP's repository beside its files."""
    theirs, original = tmp_path_factory.mktemp("diffusers"), tmp_path_factory.mktemp("original")
    pipe().save_pretrained(theirs)
    save_unidiffuser(original, pipe(), "v1")
    save_clip(original / CLIP_FOLDER)
    return theirs, original


def sampled(rank: int, world: int, device: torch.device, *names: str) -> list[list[torch.Tensor]]:
    """Return latents and pictures of models on the same mesh."""
    mesh, found = mesh_for("ulysses", world, device), []
    for name in names:
        with Pipeline.load(Files.locate(name), mesh, torch.float64, prompts=[TEXT]) as pipeline:
            latents = pipeline.latents([TEXT], steps=3, guidance=Guidance(8.0))
            found.append([latents, pipeline.decode(latents)])
    return found


def test_original_files_make_the_latents_of_diffusers_folder(ranks: Pool, folders: tuple[Path, Path]) -> None:
    for truth, got in ranks.run(2, sampled, *map(str, folders)):
        assert all((a - b).abs().max() < CLOSE * a.abs().max() for a, b in zip(truth, got, strict=True))
        assert got[1].shape == (1, 3, 16, 16)


def test_the_u_vits_file_runs_from_the_command_line_with_folders_beside_it(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    theirs, original = folders
    for file in original.glob("*.pth"):
        shutil.copy(file, tmp_path)
    shutil.copy(tmp_path / "uvit_v1.pth", tmp_path / "uvit_v0.pth")
    shutil.copytree(theirs / "text_encoder", tmp_path / "text_encoder")
    shutil.copytree(theirs / "clip_tokenizer", tmp_path / "tokenizer")
    shown = []
    for name, out in ((theirs, "a.png"), (tmp_path / "uvit_v1.pth", "b.png")):
        run(Args(str(name), prompt=(TEXT,), steps=2, dtype="fp64", out=tmp_path / out))
        with Image.open(tmp_path / out) as found:
            shown.append(np.asarray(found))
    assert np.array_equal(*shown)


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        (CLIP_FOLDER, r"without CLIP.*files of openai/clip-vit-large-patch14 in .*/clip-vit-large-patch14, or the"),
        (f"{CLIP_FOLDER}/model.safetensors", r"/clip-vit-large-patch14 without weights"),
        (f"{CLIP_FOLDER}/tokenizer_config.json", r"clip-vit-large-patch14 without tokenizer_config.json"),
        ("caption_decoder.pth", r"without caption_decoder.pth, expected it beside uvit_v1.pth"),
        ("autoencoder_kl.pth", r"without autoencoder_kl.pth, expected it beside uvit_v1.pth"),
    ],
)
def test_a_missing_part_is_one_sentence(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str, message: str
) -> None:
    whole = tmp_path / "model"
    shutil.copytree(folders[1], whole)
    shutil.rmtree(whole / lost) if (whole / lost).is_dir() else (whole / lost).unlink()
    monkeypatch.setattr(Pipeline, "load", pytest.fail)
    with pytest.raises(ValueError, match=message):
        run(Args(str(whole), prompt=(TEXT,), out=tmp_path / "x.png"))


def test_an_encoder_without_all_of_its_weights_is_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    whole = tmp_path / "model"
    shutil.copytree(folders[1], whole)
    state = load_file(whole / CLIP_FOLDER / "model.safetensors")
    lost = next(key for key in sorted(state) if key.startswith("text_model.encoder"))
    save_file({key: x for key, x in state.items() if key != lost}, whole / CLIP_FOLDER / "model.safetensors")
    with pytest.raises(ValueError, match=r"wrong keys\. Missing 1: .*\. Unknown 0: none"):
        Pipeline.load(Files.locate(whole), prompts=[TEXT])


def test_captions_need_diffusers_decoder(folders: tuple[Path, Path]) -> None:
    with (
        Pipeline.load(Files.locate(folders[1], "joint")) as pipeline,
        pytest.raises(ValueError, match=r"original caption decoder .*caption_decoder\.pth, expected diffusers' folder"),
    ):
        pipeline.captions(torch.ones(1, 77, 6))
