"""Tests of the pictures that a run begins with: what is read, and the sentence for a file that is none."""

from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from seqpar.pipelines import image_files as _image_files
from seqpar.pipelines.image_files import FORMATS, read

NOISE = torch.randint(256, (40, 50, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8).numpy()


BEST = {"PNG": {}, "JPEG": {"quality": 100, "subsampling": 0}, "WEBP": {"lossless": True}}


@pytest.mark.parametrize("form", FORMATS)
def test_a_picture_is_read_and_a_truncated_one_never_in_part(tmp_path: Path, form: str) -> None:
    path = tmp_path / "x"
    Image.fromarray(NOISE).save(path, form, **BEST[form])
    whole = path.read_bytes()
    assert abs(np.asarray(read(str(path)).image).astype(int) - NOISE).mean() < 1
    for part in range(0, len(whole) - 20, len(whole) // 50):
        path.write_bytes(whole[:part])
        with pytest.raises(ValueError, match=r"^got --image .*which is (broken: |none, expected a picture)"):
            read(str(path))


def test_a_picture_is_turned_as_its_camera_says(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned to the left
    Image.fromarray(NOISE).save(tmp_path / "x.png", exif=exif)
    assert (np.asarray(read(str(tmp_path / "x.png")).image) == np.rot90(NOISE, -1)).all()


def test_what_is_transparent_becomes_white(tmp_path: Path) -> None:
    seen = np.dstack([NOISE, np.full(NOISE.shape[:2], 255, np.uint8)])
    seen[:9, :, 3] = 0
    Image.fromarray(seen).save(tmp_path / "x.png")
    got = np.asarray(read(str(tmp_path / "x.png")).image)
    assert (got[:9] == 255).all()
    assert (got[9:] == NOISE[9:]).all()


def test_what_is_no_picture_for_a_pipeline_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep, program = tmp_path / "deep.png", tmp_path / "program.png"
    Image.fromarray(NOISE[..., 0].astype(np.uint16) * 256).save(deep)
    program.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n")  # for which Pillow starts Ghostscript
    colours, pipe = tmp_path / "colours.png", tmp_path / "pipe.png"
    header = struct.pack(">IIBBBBB", 1, 1, 16, 2, 0, 0, 0)  # one pixel of three values of 16 bits
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(bytes(7))), (b"IEND", b""))
    checked = (struct.pack(">I", len(x)) + kind + x + struct.pack(">I", zlib.crc32(kind + x)) for kind, x in parts)
    colours.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(checked))
    os.mkfifo(pipe)
    messages = {
        colours: "of more than 8 bits a value, expected 8",
        pipe: "which is a pipe, expected a file",
        deep / "x": "which cannot be read: Not a directory",
        deep: "of more than 8 bits a value, expected 8",
        program: "which is none, expected a picture as PNG, JPEG or WEBP",
        tmp_path: "which cannot be read: Is a directory",
        tmp_path / "x.png": "which cannot be read: No such file",
    }
    for path, message in messages.items():
        with pytest.raises(ValueError, match=message):
            read(str(path))
    monkeypatch.setattr(_image_files, "MOST_PIXELS", 40 * 50 - 1)
    Image.fromarray(NOISE).save(tmp_path / "x.png")
    with pytest.raises(ValueError, match=r"of 40x50 pixels \(height x width\), expected at most 1999 pixels"):
        read(str(tmp_path / "x.png"))
