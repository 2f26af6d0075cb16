"""Tests of the output file: it is written whole, with usual permissions, and the early check leaves nothing behind."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
from PIL import Image

from seqpar.pipelines._pictures import check_writable, save

SHEET = Image.new("RGB", (8, 8))


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)], ids=oct)
def test_a_picture_respects_the_umask_and_makes_its_folder(tmp_path: Path, umask: int, mode: int) -> None:
    path = tmp_path / "new" / "deep" / "x.png"
    before = os.umask(umask)
    try:
        save(SHEET, path, {"seed": 7})
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == mode
    assert [other.name for other in path.parent.iterdir()] == ["x.png"]
    with Image.open(path) as image:
        assert json.loads(image.info["seqpar"]) == {"seed": 7}


def test_a_picture_that_fails_leaves_the_old_one_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "x.png"
    path.write_bytes(b"old")

    class Broken(Image.Image):
        def save(self, fp: object, *_: object, **__: object) -> None:
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        save(Broken(), path, {})
    assert path.read_bytes() == b"old"
    assert [other.name for other in tmp_path.iterdir()] == ["x.png"]


def test_the_check_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (tmp_path / "new" / "deep" / "x.png", Path("x.png"), Path("new/x.png")):
        check_writable(name)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("x.jpg", "ends in .png"),
        ("folder.png", "which is a folder"),
        ("file/x.png", "cannot be written"),
        ("/proc/nowhere/deep/x.png", "cannot be written"),
    ],
)
def test_what_cannot_be_written_is_refused(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=message):
        check_writable(tmp_path / name)
