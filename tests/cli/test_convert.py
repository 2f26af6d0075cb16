"""Tests that `seqpar convert` writes folders that diffusers loads, and that we load with the same arithmetic."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from diffusers.models.transformers.dit_transformer_2d import DiTTransformer2DModel
from diffusers.pipelines.dit.pipeline_dit import DiTPipeline
from safetensors.torch import load_file

from seqpar.cli.convert import _copy_json
from seqpar.cli.main import command
from seqpar.convert import export
from seqpar.convert.export import uncombined
from seqpar.loading.keys import Source
from seqpar.loop.models.large_dit import Config
from tests.loading.test_formats import assert_same_decoder, dit, loaded, paddle_dit, prediction, small_vae, with_table
from tests.loop.models.test_large_dit import inputs, plain
from tests.support.published import save_consolidated, save_pdparams, save_pipeline_index
from tests.support.tiny import original_state_dict, with_original_arithmetic


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
def test_converting_keeps_a_table_of_positions_or_refuses_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], table: str
) -> None:
    theirs = with_table(table)[0]
    torch.save(original_state_dict(theirs), tmp_path / "dit.pt")
    words = ["convert", str(tmp_path / "dit.pt"), str(tmp_path / "new"), "--heads", "4"]
    if table == "learned":
        with pytest.raises(ValueError, match=r"is not the sine-cosine one .* cannot hold others; sample from the orig"):
            command(words)
        assert not (tmp_path / "new").exists()
        return
    command(words)
    assert "(timestep frequencies, the table of positions)" in capsys.readouterr().out
    assert (prediction(loaded(tmp_path / "new")) - prediction(theirs)).abs().max() < 1e-11
    DiTTransformer2DModel.from_pretrained(tmp_path / "new")  # leaves the table out, with a warning


def test_a_ppdiffusers_pipeline_becomes_one_of_diffusers(tmp_path: Path) -> None:
    theirs, vae = dit(), small_vae()
    paddle_dit(tmp_path / "old" / "transformer", theirs)
    (tmp_path / "old" / "vae").mkdir()
    (tmp_path / "old" / "vae" / "config.json").write_text(json.dumps({**vae.config, "_class_name": "AutoencoderKL"}))
    save_pdparams(tmp_path / "old" / "vae" / "model_state.pdparams", vae)
    parts = {"transformer": ["ppdiffusers", "Transformer2DModel"], "vae": ["ppdiffusers", "AutoencoderKL"]}
    save_pipeline_index(tmp_path / "old", parts, "_ppdiffusers_version")
    command(["convert", str(tmp_path / "old"), str(tmp_path / "new")])
    again = DiTPipeline.from_pretrained(tmp_path / "new", torch_dtype=torch.float64)
    assert (prediction(again.transformer) - prediction(theirs)).abs().max() < 1e-6
    assert_same_decoder(again.vae.float(), vae)
    assert not list((tmp_path / "new").rglob("*.pdparams"))


def linked(link: Path, to: str) -> None:
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(to)


LINKS: dict[str, tuple[str, str, str | None]] = {  # link below the source, its target, what is refused
    "a file outside": ("tokenizer/vocab.json", "../../../../../secret", "a link to .*secret, expected files of"),
    "a folder outside": ("tokenizer/more", "/etc", "a link to /etc, expected files of"),
    "a part outside": ("scheduler", "/etc", "a link to /etc, expected files of"),
    "itself": ("tokenizer/more", ".", "expected a link to a file"),
    "a circle": ("tokenizer/more", "more", "expected a link to a file"),
    "the index": ("model_index.json", "../../../../secret", "a link to .*secret, expected files of"),
    "another repository": ("tokenizer/vocab.json", "../../../../other/blobs/1", "expected files of"),
    "a blob": ("tokenizer/vocab.json", "../../../blobs/1", None),
    "a file inside": ("tokenizer/vocab.json", "../model_index.json", None),
}


@pytest.mark.parametrize("case", LINKS)
def test_links_that_lead_out_of_the_source_are_refused(tmp_path: Path, case: str) -> None:
    """The layout of the hub's cache: a repository's snapshots are links to its blobs."""
    link, to, message = LINKS[case]
    repository = tmp_path / "hub" / "models--a--b"
    source, target = repository / "snapshots" / "abc", tmp_path / "new"
    source.mkdir(parents=True)
    target.mkdir()
    for file in (tmp_path / "secret", repository / "blobs" / "1", tmp_path / "hub" / "other" / "blobs" / "1"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("{}")
    if link != "model_index.json":
        (source / "model_index.json").write_text("{}")
    linked(source / link, to)
    if message is None:
        _copy_json(source, target)
        assert (target / link).read_text() == "{}"
        assert not (target / link).is_symlink()
        return
    with pytest.raises(ValueError, match=message):
        _copy_json(source, target)
    assert {path.name for path in target.iterdir()} <= {"model_index.json"}
    assert case != "the index" or not list(target.iterdir())


def test_large_dit_becomes_a_folder_that_says_its_heads(tmp_path: Path) -> None:
    """Parts of two ranks: QK-norm stays over the heads of one rank. diffusers has no such class."""
    config = Config(64, 3, 16, 16, 48, num_classes=10)
    save_consolidated(tmp_path, plain(config).state_dict(), 2)
    command(["convert", str(tmp_path), str(tmp_path / "new"), "--heads", "16", "--dtype", "fp32"])
    x, t, y = inputs((6, 10))
    dit = loaded(tmp_path / "new")
    assert (dit.config.num_attention_heads, dit.config.qk_norm_groups) == (16, 2)
    truth = loaded(tmp_path, 16)(x, timestep=t, class_labels=y).sample
    assert (dit(x, timestep=t, class_labels=y).sample - truth).abs().max() < 1e-4 * truth.abs().max()
    assert {x.dtype for x in load_file(tmp_path / "new" / "diffusion_pytorch_model.safetensors").values()} == {
        torch.float32
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["convert", "dit-s/2", "new"], "a preset with random weights, expected a checkpoint"),
        (["convert", "/dev/null", "new"], r"got model /dev/null, expected a file or folder; it is a pipe or a device"),
        (["convert", "SOURCE", "SOURCE"], "which exists, expected a new folder"),
        (["convert", "SOURCE", "new"], "expected its number of heads from you"),
    ],
)
def test_what_cannot_be_converted_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(original_state_dict(dit()), tmp_path / "dit.pt")
    with pytest.raises(ValueError, match=message):
        command([str(tmp_path / "dit.pt") if word == "SOURCE" else word for word in words])
    assert [path.name for path in tmp_path.iterdir()] == ["dit.pt"]


def test_a_map_that_loses_numbers_cannot_be_run_backwards() -> None:
    halved = Source(("a",), lambda x: x[::2])
    with pytest.raises(ValueError, match="whose numbers are not each in the model once"):
        uncombined(torch.ones(2), halved, {"a": (4,)})
    turned = Source(("a", "b"), lambda x, y: torch.cat((x.T, y)).flip(0))
    made = {"a": torch.randn(3, 2), "b": torch.randn(1, 3)}
    back = uncombined(turned.combine(*made.values()), turned, {"a": (3, 2), "b": (1, 3)})
    assert all(torch.equal(back[key], made[key]) for key in made)
