"""Tests of the pictures that a run begins with: what is read, and the sentence for a file that is none."""

from __future__ import annotations

import io
import os
import struct
import zlib
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from seqpar.pipelines import image_files as _image_files
from seqpar.pipelines.image_files import FORMATS, decoded_mask, read

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


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P", "PA", "L", "LA"])
def test_a_picture_is_turned_as_its_camera_says(tmp_path: Path, mode: str, form: str) -> None:
    """With transparency, too: a quarter of each picture that can have it is transparent, and becomes white."""
    if form == "JPEG" and mode not in ("RGB", "L"):
        pytest.skip("JPEG has neither palettes nor transparency")
    clear = np.full((40, 50), 255, np.uint8)
    clear[:20, :25] = 0
    picture = Image.fromarray(NOISE).convert("L" if mode in ("L", "LA") else "RGB")
    if mode in ("RGBA", "LA"):
        picture.putalpha(Image.fromarray(clear))
    elif mode in ("P", "PA"):
        picture = picture.quantize(16)
    more = {"transparency": 3} if mode == "PA" else {}  # all pixels of one colour
    for number in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = number
        picture.save(tmp_path / f"{number}", form, exif=exif, **more, **BEST[form])
    plain, *turned = (np.asarray(read(str(tmp_path / f"{number}")).image) for number in range(1, 9))
    for number, got in enumerate(turned, 2):
        flipped = plain[:, ::-1] if number in (2, 4, 5, 7) else plain
        quarters = {3: 2, 4: 2, 5: 1, 6: 3, 7: 3, 8: 1}.get(number, 0)
        assert np.array_equal(got, np.rot90(flipped, quarters)), number
    if mode in ("RGBA", "LA"):
        assert (plain[:20, :25] == 255).all()
    if mode == "RGBA":
        assert (plain[20:] == NOISE[20:]).all()
    if mode == "PA" and form == "PNG":
        assert ((plain == 255).all(axis=2) == (np.asarray(picture) == 3)).all()


def test_what_is_no_picture_for_a_pipeline_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep, program = tmp_path / "deep.png", tmp_path / "program.png"
    Image.fromarray(NOISE[..., 0].astype(np.uint16) * 256).save(deep)
    program.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n")  # for which Pillow starts Ghostscript
    colours, pipe = tmp_path / "colours.png", tmp_path / "pipe.png"
    header = struct.pack(">IIBBBBB", 1, 1, 16, 2, 0, 0, 0)  # one pixel of three values of 16 bits
    bare, palette = tmp_path / "bare.png", struct.pack(">IIBBBBB", 2, 1, 8, 3, 0, 0, 0)  # two pixels of a palette
    for path, head, size in ((colours, header, 7), (bare, palette, 3)):
        parts = ((b"IHDR", head), (b"IDAT", zlib.compress(bytes(size))), (b"IEND", b""))
        checked = (struct.pack(">I", len(x)) + kind + x + struct.pack(">I", zlib.crc32(kind + x)) for kind, x in parts)
        path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(checked))
    os.mkfifo(pipe)
    messages = {
        colours: "of more than 8 bits a value, expected 8",
        bare: r"without the palette \(PLTE\) of its pixels; save it again",
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


def test_a_mask_is_transparent_or_white_where_the_image_is_repainted(tmp_path: Path) -> None:
    white = np.zeros((40, 50), np.uint8)
    white[:20] = 255
    clear, flat = Image.fromarray(NOISE), Image.fromarray(white).convert("RGB")
    clear.putalpha(Image.fromarray(255 - white))
    opaque = flat.convert("RGBA")  # as many programs save it
    for image in (clear, flat, opaque, Image.fromarray(white)):
        image.save(tmp_path / "m.png")
        picture = read(str(tmp_path / "m.png"), "--mask", partial(decoded_mask, white=True))
        assert np.array_equal(np.asarray(picture.image), white)
    with pytest.raises(ValueError, match=r"^got mask without transparency, expected transparent"):  # of the server
        decoded_mask("mask", io.BytesIO((tmp_path / "m.png").read_bytes()))
