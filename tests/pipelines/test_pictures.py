"""Tests of the output file: it is written whole, with usual permissions, and the early check leaves nothing behind."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from PIL import Image

from seqpar.pipelines.pictures import Sound, check_writable, grid, save, save_video, to_pil

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
            raise OSError(errno.ENOSPC, "disk full")

    with pytest.raises(OSError, match=rf"disk full: '{path}'"):  # the path says which disk it is
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
        ("kept.png", r"which is read-only; name another file, or make it writable \(chmod \+w\)"),
        (f"{'x' * 252}.png", "cannot be written: File name too long"),
        (f"{'x' * 256}/x.png", "cannot be written: File name too long"),
    ],
    ids=lambda value: value[:20],
)
def test_what_cannot_be_written_is_refused(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "kept.png").touch(0o444)
    with pytest.raises(ValueError, match=message):
        check_writable(tmp_path / name)


def test_each_of_several_pictures_is_checked(tmp_path: Path) -> None:
    (tmp_path / "x-1.png").mkdir()
    check_writable(tmp_path / "x-2.png")
    with pytest.raises(ValueError, match=r"x-1\.png, which is a folder"):
        check_writable(tmp_path / "x-2.png", others=[tmp_path / "x-1.png"])


def test_the_longest_name_is_written_and_a_link_stays_one(tmp_path: Path) -> None:
    path, link = tmp_path / f"{'x' * 251}.png", tmp_path / "link.png"
    link.symlink_to(tmp_path / "deep" / "there.png")
    for each in (path, link):
        check_writable(each)
        save(SHEET, each, {})
    assert link.is_symlink()
    assert sorted(other.name for other in tmp_path.iterdir()) == ["deep", "link.png", path.name]
    assert [other.name for other in (tmp_path / "deep").iterdir()] == ["there.png"]


@pytest.mark.parametrize(("height", "width"), [(256, 64), (6400, 8), (8, 1600), (128, 128), (1, 1)])
@pytest.mark.parametrize("count", [1, 2, 12])
def test_a_sheet_of_any_shape_holds_all_pictures(count: int, height: int, width: int) -> None:
    sheet = grid(to_pil(torch.rand(count, 3, height, width)), ["a"] * count)
    assert sheet.width * sheet.height >= count * height * width
    assert (height, count) != (128, 12) or min(sheet.size) > 2 * 128


FRAMES = np.zeros((5, 24, 34, 3))  # whose sides 16 does not divide
FRAMES[:, :, :17] = (1.0, 0.2, 0.1)
FRAMES[:, :, 17:, 1] = np.linspace(0, 1, 5)[:, None, None]


@pytest.mark.parametrize("fps", [24, 29.97])
def test_frames_colours_and_long_parameters_are_read_back(tmp_path: Path, fps: float) -> None:
    parameters = {"prompt": ["a long é " * 20000], "seed": 3}
    save_video(FRAMES, tmp_path / "x.mp4", fps, parameters)
    with av.open(str(tmp_path / "x.mp4")) as file:
        assert json.loads(file.metadata["comment"]) == parameters
        assert float(file.streams.video[0].average_rate or 0) == pytest.approx(fps, rel=1e-4)
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)])
    assert frames.shape == FRAMES.shape
    assert abs(frames / 255 - FRAMES).mean() < 0.02


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("rate", [8000, 32000, 48000])
def test_a_sound_is_heard_from_the_first_frame_on(tmp_path: Path, channels: int, rate: int) -> None:
    times, pitches = np.arange(2 * rate) / rate, (440, 660)[:channels]
    sound_CT = np.stack([np.sin(2 * np.pi * pitch * times) * np.linspace(0.1, 0.9, len(times)) for pitch in pitches])
    save_video(FRAMES, tmp_path / "x.mp4", 24, {}, Sound(sound_CT, rate))
    with av.open(str(tmp_path / "x.mp4")) as file:
        assert (file.streams.audio[0].rate, file.streams.audio[0].channels) == (rate, channels)
        heard_CT = np.concatenate([frame.to_ndarray() for frame in file.decode(audio=0)], axis=1)[:, : len(times)]
    assert abs(heard_CT - sound_CT).mean() < 0.01
    assert abs(heard_CT[:, 1:] - sound_CT[:, :-1]).mean() > 0.01  # a sample late


def test_a_video_that_fails_leaves_the_old_one_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "x.mp4"
    path.write_bytes(b"old")

    def frames() -> Iterator[np.ndarray]:
        yield FRAMES[0]
        raise MemoryError

    with pytest.raises(MemoryError):
        save_video(frames(), path, 16, {})
    assert path.read_bytes() == b"old"
    assert [other.name for other in tmp_path.iterdir()] == ["x.mp4"]
