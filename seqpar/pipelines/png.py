"""Writes a PNG on several CPU cores: strips of rows are filtered and deflated at the same time and joined in order.

Deflate's blocks may follow each other from separate compressors where each but the last ends at a byte, so every reader
reads the file. Pillow's encoder picks a filter for each row; a strip is encoded with the row above it.
When it wins: from some hundred rows on; one core takes about 0.1 s for 1024 x 1024 pixels.
"""

from __future__ import annotations

import struct
import zlib
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import IO

from PIL import Image
from PIL.PngImagePlugin import PngInfo, putchunk

STRIP, MOST = 32, 16  # rows of a strip at least, and strips at most
EIGHT_BITS_RGB = bytes((8, 2, 0, 0, 0))  # bits of a value, kind of pixels, and the only methods that PNG has
HEADER = b"\x78\x01"  # of a zlib stream with a window of 32 kB, deflated fast


def write(image: Image.Image, file: IO[bytes], info: PngInfo) -> None:
    """Write an RGB picture as a lossless PNG. info: texts, which are written before the pixels."""
    strips = max(1, min(MOST, image.height // STRIP))
    bounds = pairwise(image.height * index // strips for index in range(strips + 1))
    with ThreadPoolExecutor(strips) as pool:  # Pillow's encoder and zlib compute without Python's lock
        parts = [*pool.map(lambda strip: _deflated(image, *strip), bounds)]
    check = 1
    for rows, _ in parts:
        check = zlib.adler32(rows, check)
    file.write(b"\x89PNG\r\n\x1a\n")
    putchunk(file, b"IHDR", struct.pack(">II", *image.size), EIGHT_BITS_RGB)
    for kind, data, *_ in info.chunks:
        putchunk(file, kind, data)
    putchunk(file, b"IDAT", HEADER, *(deflated for _, deflated in parts), check.to_bytes(4, "big"))
    putchunk(file, b"IEND")


def _deflated(image: Image.Image, first: int, end: int) -> tuple[bytes, bytes]:
    """Return rows `first` to `end`, filtered, and the same deflated; only the picture's last strip ends the stream."""
    above = min(first, 1)
    part = image.crop((0, first - above, image.width, end))
    stored = part.tobytes("zip", "RGB", False, 0, zlib.Z_DEFAULT_STRATEGY, b"")  # a zlib stream without compression
    rows = zlib.decompress(stored)[above * (1 + 3 * image.width) :]
    deflate = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS, 9, zlib.Z_RLE)
    return rows, deflate.compress(rows) + deflate.flush(zlib.Z_FINISH if end == image.height else zlib.Z_SYNC_FLUSH)
