"""Writes a PNG on several CPU cores: strips of rows are filtered and deflated at the same time and joined in order.

Deflate's blocks may follow each other from separate compressors where each but the last ends at a byte, so every reader
reads the file. Rows are filtered by Pillow's encoder, which picks a filter for each row; a strip is encoded with the
row above it, which its first row refers to. The number of strips depends on the height alone.
When it wins: from some hundred rows on; one core takes 20 to 35 ms for 512 x 512 pixels, as long as four denoising
steps of UniDiffuser on an H200.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import IO

from PIL import Image
from PIL.PngImagePlugin import PngInfo

SIGNATURE = b"\x89PNG\r\n\x1a\n"
STRIP, MOST = 32, 16  # rows of a strip at least, and strips at most
LEAST = 1 << 14  # pixels; below, threads and the codes of each strip cost more than they save
EIGHT_BITS_RGB = bytes((8, 2, 0, 0, 0))  # bits of a value, kind of pixels, and the only methods that PNG has
HEADER = b"\x78\x01"  # of a zlib stream with a window of 32 kB, deflated fast


def fits(image: Image.Image) -> bool:
    """Return whether `write` can write this picture: RGB, without metadata of its own, and large enough for strips."""
    large = image.height >= 2 * STRIP and image.width * image.height >= LEAST
    return image.mode == "RGB" and not image.info and large


def write(image: Image.Image, file: IO[bytes], info: PngInfo | None = None) -> None:
    """Write an RGB picture as a lossless PNG. info: texts; other chunks of it are written before the pixels, too."""
    strips = min(MOST, image.height // STRIP)
    bounds = [*pairwise(image.height * index // strips for index in range(strips + 1))]
    with ThreadPoolExecutor(strips) as pool:  # Pillow's encoder and zlib compute without Python's lock
        made = [*pool.map(lambda strip: _strip(image, *strip), bounds)]
    check = 1
    for rows, _ in made:
        check = zlib.adler32(rows, check)
    pixels = b"".join((HEADER, *(deflated for _, deflated in made), check.to_bytes(4, "big")))
    file.write(SIGNATURE)
    for kind, data in _chunks(image.size, info, pixels):
        file.write(struct.pack(">I4s", len(data), kind))
        file.write(data)
        file.write(zlib.crc32(data, zlib.crc32(kind)).to_bytes(4, "big"))


def _strip(image: Image.Image, first: int, end: int) -> tuple[bytes, bytes]:
    """Return rows `first` to `end`, filtered, and the same deflated; only the picture's last strip ends the stream."""
    above = min(first, 1)
    part = image.crop((0, first - above, image.width, end))
    stored = part.tobytes("zip", "RGB", False, 0, zlib.Z_DEFAULT_STRATEGY, b"")  # a zlib stream without compression
    rows = zlib.decompress(stored)[above * (1 + 3 * image.width) :]
    deflate = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS, 9, zlib.Z_RLE)
    ends = zlib.Z_FINISH if end == image.height else zlib.Z_SYNC_FLUSH
    return rows, deflate.compress(rows) + deflate.flush(ends)


def _chunks(size: tuple[int, int], info: PngInfo | None, pixels: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the kind and the data of each chunk of the file."""
    yield b"IHDR", struct.pack(">II", *size) + EIGHT_BITS_RGB
    for kind, data, *_ in [] if info is None else info.chunks:
        yield kind, data
    yield b"IDAT", pixels
    yield b"IEND", b""
