"""Tests of the PNG writer: other programs read its files, pixels and texts are as given, and files stay small."""

from __future__ import annotations

import io
import zlib

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from seqpar.pipelines import _png
from seqpar.pipelines._pictures import FAST, write_png


def made(width: int, height: int, kind: str) -> Image.Image:
    drawn = np.random.default_rng(0)
    if kind == "noise":
        return Image.fromarray(drawn.integers(0, 256, (height, width, 3), dtype=np.uint8))
    small = Image.fromarray(drawn.integers(0, 256, (1 + height // 40, 1 + width // 40, 3), dtype=np.uint8))
    return small.resize((width, height), Image.Resampling.BICUBIC)


@pytest.mark.parametrize("kind", ["noise", "smooth"])
@pytest.mark.parametrize("size", [(512, 512), (301, 257), (24, 700), (64, 64), (999, 63)])
def test_a_reader_finds_the_pixels_and_the_texts(size: tuple[int, int], kind: str) -> None:
    image, info, file, pillow = made(*size, kind), PngInfo(), io.BytesIO(), io.BytesIO()
    info.add_text("seqpar", '{"seed": 1}')
    info.add_itxt("Title", "Füchse")
    write_png(image, file, info)
    image.save(pillow, "png", pnginfo=info, **FAST)
    read = Image.open(io.BytesIO(file.getvalue()))
    read.load()
    assert (read.mode, read.size, read.info) == ("RGB", size, {"seqpar": '{"seed": 1}', "Title": "Füchse"})
    assert np.array_equal(np.asarray(read), np.asarray(image))
    assert len(file.getvalue()) < 1.01 * len(pillow.getvalue()) + 100 * _png.MOST
    Image.open(io.BytesIO(file.getvalue())).verify()


def test_the_stream_of_all_strips_is_what_one_encoder_writes() -> None:
    image, file = made(130, 520, "smooth"), io.BytesIO()
    _png.write(image, file)
    start = file.getvalue().index(b"IDAT")
    length = int.from_bytes(file.getvalue()[start - 4 : start], "big")
    whole = image.tobytes("zip", "RGB", False, 0, zlib.Z_DEFAULT_STRATEGY, b"")
    # zlib compares its checksum, and the filters, which refer to the row above, are those of the whole picture
    assert zlib.decompress(file.getvalue()[start + 4 : start + 4 + length]) == zlib.decompress(whole)


def test_pictures_that_are_no_plain_rgb_are_written_whole() -> None:
    for image in (Image.new("RGBA", (70, 70), (1, 2, 3, 4)), Image.new("L", (70, 70), 9), Image.new("RGB", (70, 9))):
        file = io.BytesIO()
        write_png(image, file)
        read = Image.open(io.BytesIO(file.getvalue()))
        assert (read.mode, read.size) == (image.mode, image.size)
        assert np.array_equal(np.asarray(read), np.asarray(image))
