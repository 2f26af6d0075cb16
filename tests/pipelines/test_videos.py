"""Tests of the video file: its frames and parameters are read back, and it is written whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import av
import numpy as np
import pytest

from seqpar.pipelines.videos import save_video

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
