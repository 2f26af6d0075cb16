"""Tests that `seqpar convert` writes folders that load with the arithmetic of the original, or says what is wrong."""

from __future__ import annotations

import errno
import os
import shutil
from argparse import Namespace
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.transformers.dit_transformer_2d import DiTTransformer2DModel
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file

from seqpar import DistributedDiT
from seqpar.cli.args import Args
from seqpar.cli.main import command
from seqpar.cli.sample import run
from seqpar.convert import export, folder
from seqpar.convert.export import uncombined
from seqpar.convert.folder import CLIP
from seqpar.loop.models.large_dit import Config
from seqpar.mesh.mesh import Mesh
from seqpar.pipelines.classes import Files
from seqpar.pipelines.unidiffuser import Files as UniDiffuser
from seqpar.pipelines.unidiffuser import Pipeline
from seqpar.types.keys import TensorSource
from tests.convert.test_originals import dit, opened, prediction, with_table
from tests.loading.test_files import Calls
from tests.loop.models.test_large_dit import inputs, plain
from tests.support.published import original_decoder, save_consolidated, save_unidiffuser, small_vae
from tests.support.tiny import original_state_dict, with_original_arithmetic


def loaded(path: Path) -> DistributedDiT:
    return DistributedDiT.from_pretrained(path, Mesh.single(), torch.float64)


def test_an_original_dit_becomes_a_folder_of_diffusers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """diffusers' class computes other timestep frequencies; with the original's it reproduces the original."""
    theirs = with_original_arithmetic(dit())
    torch.save({"ema": original_state_dict(theirs)}, tmp_path / "dit.pt")
    monkeypatch.setattr(export, "SHARD_BYTES", 100_000)  # several files
    command(["convert", str(tmp_path / "dit.pt"), str(tmp_path / "new"), "--heads", "4"])
    assert "diffusers' arithmetic differs from the original's" in capsys.readouterr().out
    assert len(list((tmp_path / "new").glob("*-of-*.safetensors"))) > 1
    truth = prediction(theirs)
    assert (prediction(loaded(tmp_path / "new")) - truth).abs().max() < 1e-11
    again = DiTTransformer2DModel.from_pretrained(tmp_path / "new", torch_dtype=torch.float64)
    assert (prediction(again) - truth).abs().max() > 1e-3  # pyright: ignore[reportArgumentType]
    again = with_original_arithmetic(again).double()  # pyright: ignore[reportArgumentType]
    assert (prediction(again) - truth).abs().max() < 1e-6  # diffusers rounds its positions to fp32


@pytest.mark.parametrize("table", ["averaged", "learned"])
def test_converting_keeps_a_table_of_positions(tmp_path: Path, capsys: pytest.CaptureFixture[str], table: str) -> None:
    theirs = with_table(table)[0]
    torch.save(original_state_dict(theirs), tmp_path / "dit.pt")
    command(["convert", str(tmp_path / "dit.pt"), str(tmp_path / "new"), "--heads", "4"])
    assert (prediction(loaded(tmp_path / "new")) - prediction(theirs)).abs().max() < 1e-11
    out = capsys.readouterr().out
    if table == "averaged":
        assert "(timestep frequencies, the table of positions)" in out
        DiTTransformer2DModel.from_pretrained(tmp_path / "new")  # leaves the table out, with a warning
        return
    assert "DiTLearnedPositions: " in out  # diffusers would compute other positions
    files = Files.locate(tmp_path / "new")
    assert files.latent_size((64, 64)) == files.latent_size(None) == (8, 8)
    with pytest.raises(ValueError, match=r"got a latent of 8 x 12 .* expected 8 x 8"):
        files.latent_size((64, 96))


def test_large_dit_becomes_a_folder_that_says_its_heads(tmp_path: Path) -> None:
    """Parts of two ranks: QK-norm stays over the heads of one rank. diffusers has no such class."""
    config = Config(64, 3, 16, 16, 48, num_classes=10)
    save_consolidated(tmp_path, plain(config).state_dict(), 2)
    command(["convert", str(tmp_path), str(tmp_path / "new"), "--heads", "16", "--dtype", "fp32"])
    x, t, y = inputs((6, 10))
    dit = loaded(tmp_path / "new")
    assert (dit.config.num_attention_heads, dit.config.qk_norm_groups) == (16, 2)
    truth = opened(tmp_path, 16)(x, timestep=t, class_labels=y).sample
    assert (dit(x, timestep=t, class_labels=y).sample - truth).abs().max() < 1e-4 * truth.abs().max()
    written = load_file(tmp_path / "new" / "diffusion_pytorch_model.safetensors")
    assert {x.dtype for x in written.values()} == {torch.float32}


def test_an_original_autoencoder_becomes_diffusers(tmp_path: Path) -> None:
    theirs = small_vae()
    state = {f"module.{key}": tensor for key, tensor in original_decoder(theirs).items()}
    torch.save({"state_dict": state}, tmp_path / "vae.ckpt")
    command(["convert", str(tmp_path / "vae.ckpt"), str(tmp_path / "vae")])
    ours: Any = AutoencoderKL.from_pretrained(tmp_path / "vae")
    x = torch.randn(1, 4, 4, 4, generator=torch.Generator().manual_seed(0))
    theirs.decode(x)
    image = theirs.decode(x).sample
    assert ours.config.scaling_factor == theirs.config.scaling_factor
    assert torch.equal(ours.decode(x).sample, image)
    assert torch.equal(ours.encode(image).latent_dist.mean, theirs.encode(image).latent_dist.mean)
    del state["module.decoder.mid.attn_1.q.bias"]
    torch.save(state, tmp_path / "vae.ckpt")
    with pytest.raises(ValueError, match=r"vae\.ckpt: .*Missing 1: decoder\.mid\.attn_1\.q\.bias"):
        command(["convert", str(tmp_path / "vae.ckpt"), str(tmp_path / "new")])


@cache
def unidiffuser() -> Any:
    """Return diffusers' pipeline of version 1, in sizes that original files can have."""
    from tests.support import pipelines

    return pipelines.unidiffuser(original=True)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of UniDiffuser's files, with CLIP's repository, of which the text half is the encoder."""
    from tests.support.pipelines import ENCODERS, WIDTH, random_weights

    folder = tmp_path_factory.mktemp("original")
    save_unidiffuser(folder, unidiffuser(), "v1")
    sizes = {"hidden_size": WIDTH, "intermediate_size": WIDTH, "num_attention_heads": 4, "num_hidden_layers": 2}
    text = unidiffuser().text_encoder
    parts = {"text_config": text.config.to_dict(), "vision_config": {**sizes, "image_size": 8, "patch_size": 4}}
    whole = ENCODERS.CLIPConfig(**parts, projection_dim=8)
    model = random_weights(ENCODERS.CLIPModel(whole), 9)
    model.text_model.load_state_dict(text.state_dict())
    model.save_pretrained(folder / CLIP)
    unidiffuser().clip_tokenizer.save_pretrained(folder / CLIP)
    return folder


def test_unidiffusers_files_become_a_folder_that_draws_the_same(original: Path, tmp_path: Path) -> None:
    unidiffuser().save_pretrained(tmp_path / "theirs")
    torch.save({"state": {}, "param_groups": []}, original / "optimizer.pt")  # left out
    command(["convert", str(original), str(tmp_path / "new")])
    images = []
    for name in ("theirs", "new"):
        run(Args(str(tmp_path / name), prompt=("a red cat",), steps=2, dtype="fp64", out=tmp_path / f"{name}.png"))
        with Image.open(tmp_path / f"{name}.png") as image:
            images.append(np.asarray(image))
    assert np.array_equal(*images)
    with (
        Pipeline.load(UniDiffuser.locate(tmp_path / "new", "joint")) as pipeline,
        pytest.raises(ValueError, match="text_decoder has the layer for prompts alone; captions need a folder of diff"),
    ):
        pipeline.captions(torch.ones(1, 77, 6))


def without(name: str) -> Callable[[Path], object]:
    return lambda folder: shutil.rmtree(folder / name) if (folder / name).is_dir() else (folder / name).unlink()


def copied(name: str, to: str) -> Callable[[Path], object]:
    return lambda folder: shutil.copy(folder / name, folder / to)


CHANGES: list[tuple[Callable[[Path], object], str]] = [
    (without(CLIP), r"has no CLIP to encode prompts; put openai/clip-vit-large-patch14 into"),
    (without("caption_decoder.pth"), r"has no text_decoder; put caption_decoder\.pth there"),
    (without("autoencoder_kl.pth"), r"has no vae; put autoencoder_kl\.pth there"),
    (copied("uvit_v1.pth", "uvit_v0.pth"), r"has two files of the unet: uvit_v0\.pth and uvit_v1\.pth"),
    (copied("autoencoder_kl.pth", "vae.pt"), r"has two files of the vae: autoencoder_kl\.pth and vae\.pt"),
]


def test_a_missing_or_second_part_is_one_sentence(original: Path, tmp_path: Path) -> None:
    for index, (change, message) in enumerate(CHANGES):
        folder = Path(shutil.copytree(original, tmp_path / f"files{index}"))
        change(folder)
        with pytest.raises(ValueError, match=message):
            command(["convert", str(folder), str(tmp_path / "new")])
    assert not list(tmp_path.glob("new*"))
    # of two versions, the file chooses one
    command(["convert", str(tmp_path / "files3" / "uvit_v0.pth"), str(tmp_path / "new")])
    assert (tmp_path / "new" / "model_index.json").is_file()


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        ("none.pt", "new", r"none\.pt not found"),
        ("dit.pt", "dit.pt", "dit.pt exists; remove it or choose another"),
        ("dit.pt", "new", r"does not state the attention heads.*add --heads"),
        ("folder", "new", "folder is a folder of diffusers; seqpar loads it as it is"),
        ("notes.pt", "new", r"notes\.pt is neither an archive nor a pickle"),
        ("evil.pt", "new", r"evil\.pt requires posix\.system, but only tensors and plain values are loaded; nothing"),
        ("other.pt", "new", r"other\.pt: keys like a belong to no checkpoint of DiT, Large-DiT, UniDiffuser or"),
    ],
)
def test_what_cannot_be_converted_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, target: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(original_state_dict(dit()), "dit.pt")
    torch.save({"a": torch.ones(2)}, "other.pt")
    torch.save({"ema": {"a": torch.ones(2)}, "args": Namespace(x=Calls(os.system, "touch proof"))}, "evil.pt")
    Path("notes.pt").write_text("not a checkpoint\n" * 9)
    Path("folder").mkdir()
    Path("folder/config.json").write_text("{}")
    with pytest.raises(ValueError, match=message):
        command(["convert", source, target])
    assert not Path("new").exists()
    assert not Path("proof").exists()
    assert not list(tmp_path.glob("*.part"))


def test_another_conversion_to_the_same_folder_is_left_alone(tmp_path: Path) -> None:
    torch.save(original_state_dict(dit()), tmp_path / "dit.pt")
    (tmp_path / "new.part").mkdir()
    with pytest.raises(ValueError, match="of another conversion, which may still run"):
        command(["convert", str(tmp_path / "dit.pt"), str(tmp_path / "new"), "--heads", "4"])
    assert (tmp_path / "new.part").is_dir()


def test_two_conversions_at_once_write_one_folder_and_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save(original_state_dict(dit()), tmp_path / "dit.pt")
    words = ["convert", str(tmp_path / "dit.pt"), str(tmp_path / "new"), "--heads", "4"]
    single = folder._single

    def other_first(*args: Any) -> Any:  # a whole conversion, while this one reads its source
        monkeypatch.setattr(folder, "_single", single)
        command(words)
        return single(*args)

    monkeypatch.setattr(folder, "_single", other_first)
    with pytest.raises(ValueError, match="new exists; remove it or choose another"):
        command(words)
    assert not (tmp_path / "new.part").exists()
    assert loaded(tmp_path / "new")

    shutil.rmtree(tmp_path / "new")
    monkeypatch.setattr(Path, "exists", lambda path: path.name == "dit.pt")  # what a moment before was true
    (tmp_path / "new.part").mkdir()
    with pytest.raises(ValueError, match="of another conversion, which may still run"):
        command(words)


def test_a_full_disk_is_an_error_of_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **options: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(export, "save_file", full)
    with pytest.raises(OSError, match=r"cannot write the weights: .*No space left.*out") as error:
        export.write_folder(tmp_path / "out", {}, [("a", torch.ones(2))])
    assert error.value.errno == errno.ENOSPC


def test_a_map_that_loses_numbers_cannot_be_run_backwards() -> None:
    halved = TensorSource(("a",), lambda x: x[::2])
    with pytest.raises(ValueError, match="not every number is in the model exactly once"):
        uncombined(torch.ones(2), halved, {"a": (4,)})
    turned = TensorSource(("a", "b"), lambda x, y: torch.cat((x.T, y)).flip(0))
    made = {"a": torch.randn(3, 2), "b": torch.randn(1, 3)}
    back = uncombined(turned.combine(*made.values()), turned, {"a": (3, 2), "b": (1, 3)})
    assert all(torch.equal(back[key], made[key]) for key in made)
