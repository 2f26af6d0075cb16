"""Tests of the PNG writer: other programs read its files, pixels and texts are as given, and files stay small."""

from __future__ import annotations

import io
import zlib

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from seqpar.pipelines.pictures import write_png


def made(width: int, height: int, kind: str) -> Image.Image:
    drawn = np.random.default_rng(0)
    if kind == "noise":
        return Image.fromarray(drawn.integers(0, 256, (height, width, 3), dtype=np.uint8))
    small = Image.fromarray(drawn.integers(0, 256, (1 + height // 40, 1 + width // 40, 3), dtype=np.uint8))
    return small.resize((width, height), Image.Resampling.BICUBIC)


@pytest.mark.parametrize("kind", ["noise", "smooth"])
@pytest.mark.parametrize("size", [(512, 512), (301, 257), (24, 700), (999, 63), (9, 1)])
def test_a_reader_finds_the_pixels_and_the_texts(size: tuple[int, int], kind: str) -> None:
    """Pillow checks the sums of chunks and of the stream; its own files, of one strip, are not much smaller."""
    image, info, file, pillow = made(*size, kind), PngInfo(), io.BytesIO(), io.BytesIO()
    info.add_text("seqpar", '{"seed": 1}')
    info.add_itxt("Title", "Füchse")
    write_png(image, file, info)
    image.save(pillow, "png", pnginfo=info, compress_level=1, compress_type=zlib.Z_RLE)
    read = Image.open(io.BytesIO(file.getvalue()))
    read.load()
    assert (read.mode, read.size, read.info) == ("RGB", size, {"seqpar": '{"seed": 1}', "Title": "Füchse"})
    assert np.array_equal(np.asarray(read), np.asarray(image))
    assert len(file.getvalue()) < 1.01 * len(pillow.getvalue()) + 1600
    Image.open(io.BytesIO(file.getvalue())).verify()


@pytest.mark.parametrize("mode", ["RGBA", "L"])
def test_pictures_that_are_no_rgb_are_written_by_pillow(mode: str) -> None:
    image, file = made(70, 70, "noise").convert(mode), io.BytesIO()
    write_png(image, file)
    read = Image.open(io.BytesIO(file.getvalue()))
    assert read.mode == mode
    assert np.array_equal(np.asarray(read), np.asarray(image))
