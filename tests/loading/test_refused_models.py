"""Tests that whole models and conversions are refused by one error that names the file."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from seqpar.cli.main import command
from seqpar.convert import export
from seqpar.loading.layout import open_model
from seqpar.loop.blueprint import locate
from tests.loading.test_checkpoint import HEADS, ORIGINALS


@pytest.mark.parametrize("name", ORIGINALS)
def test_a_checkpoint_without_classes_is_refused_with_its_path(tmp_path: Path, name: str) -> None:
    state = ORIGINALS[name]()
    key = "y_embedder.embedding_table.weight"
    torch.save(state | {key: state[key][:1]}, tmp_path / "none.pt")
    with pytest.raises(ValueError, match=r"none\.pt: .*embedding_table\.weight of 1 row, expected one for each class"):
        locate(tmp_path / "none.pt", HEADS[name])


@pytest.mark.parametrize("name", ["consolidated.00-of-00.pth", "consolidated.05-of-02.pth"])
def test_a_part_with_an_impossible_number_is_refused(tmp_path: Path, name: str) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / name)
    with pytest.raises(ValueError, match=rf"{name}, whose name is of no part"):
        locate(tmp_path / name)


def test_converting_a_text_ends_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "notes.pt").write_text("not a checkpoint\n" * 9)
    with pytest.raises(ValueError, match=r"notes\.pt, which is neither an archive nor a pickle"):
        command(["convert", str(tmp_path / "notes.pt"), str(tmp_path / "out")])
    assert [path.name for path in tmp_path.iterdir()] == ["notes.pt"]


def test_a_full_disk_is_an_error_of_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **options: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(export, "save_file", full)
    with pytest.raises(OSError, match=r"cannot write the weights: .*No space left.*out") as error:
        export.write_folder(tmp_path / "out", {}, [("a", torch.ones(2))])
    assert error.value.errno == errno.ENOSPC


def test_a_pipe_is_refused_and_called_one(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.pt")
    with pytest.raises(ValueError, match=r"got model .*model\.pt, expected a file or folder; it is a pipe or a device"):
        locate(tmp_path / "model.pt")
    with pytest.raises(
        ValueError, match=r"got checkpoint .*model\.pt, expected a file; it is a folder, a pipe or a dev"
    ):
        open_model(tmp_path / "model.pt")
    (tmp_path / "model").mkdir()
    os.mkfifo(tmp_path / "model" / "config.json")
    with pytest.raises(ValueError, match=r"got .*config\.json, expected a readable JSON file: it is no regular file"):
        locate(tmp_path / "model")
