"""Decodes the pictures that a run begins with: checked by their headers first, and bounded. This file imports no torch.

A server decodes what its clients send by the same function, in a process without a model.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from PIL import Image, ImageOps, UnidentifiedImageError

FORMATS = ("PNG", "JPEG", "WEBP")  # Pillow reads others with warnings alone, or starts a program for them
DEEP = ("I", "F")  # how Pillow's names of modes begin whose values are not of 8 bits
MOST_PIXELS = 1 << 26
DEPTH = 24  # the byte of a PNG that says the bits of a value: Pillow cuts colours of 16 bits to 8 without a word
# what Pillow raises for a broken file
BROKEN = (OSError, SyntaxError, ValueError, EOFError, struct.error, Image.DecompressionBombError)


@dataclass(frozen=True)
class Picture:
    """An image that a run begins with. name: that of its file. image: its pixels, as RGB."""

    name: str
    image: Image.Image

    def __str__(self) -> str:
        return self.name

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return self.image.height, self.image.width

    @property
    def facts(self) -> dict[str, str]:
        """What the metadata of a result says of it."""
        return {"file": self.name, "size": f"{self.size[0]}x{self.size[1]}", "pixels": digest(self.image.tobytes())}


def digest(pixels: bytes) -> str:
    return hashlib.sha256(pixels).hexdigest()[:16]


def read(name: str, flag: str = "--image", decode: Callable[[str, IO[bytes]], Image.Image] | None = None) -> Picture:
    """Return the picture in a file; ValueError for one that cannot be read. decode: None is `decoded`."""
    what = f"{flag} {name}"
    if Path(name).is_fifo():  # reading one would wait for who writes it
        raise ValueError(f"got {what}, which is a pipe, expected a file")
    try:
        with open(name, "rb") as file:
            return Picture(name, (decode or decoded)(what, file))
    except OSError as error:
        raise ValueError(f"got {what}, which cannot be read: {error.strerror}; name a picture") from error


def decoded(what: str, file: IO[bytes]) -> Image.Image:
    """Return the image in an open file as RGB: the first frame, EXIF orientation applied, transparency on white.

    what: names it in the message. ValueError for other formats, broken or too large images, and over 8 bits a value.
    """
    image = _opened(what, file)
    if image.has_transparency_data:  # under which any invisible colours may lie
        seen = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", seen.size, "white"), seen)
    return image.convert("RGB")


def decoded_mask(what: str, file: IO[bytes], white: bool = False) -> Image.Image:
    """Return the mask in an open file as L: 255 where it is transparent, which is repainted.

    white: whether a file without transparent pixels is white where it is repainted. ValueError as `decoded`, and for a
    file without transparency unless `white` is true.
    """
    image = _opened(what, file)
    alpha = image.convert("RGBA").getchannel("A") if image.has_transparency_data else None
    if white and (alpha is None or alpha.getextrema() == (255, 255)):
        return image.convert("L")
    if alpha is None:
        raise ValueError(f"got {what} without transparency, expected transparent pixels where the image is repainted")
    return ImageOps.invert(alpha)


def _opened(what: str, file: IO[bytes]) -> Image.Image:
    """Return the image in a file with its EXIF orientation applied; ValueError as `decoded`."""
    try:
        with Image.open(file, formats=FORMATS) as image:
            reason = _why_not(file, image)
            if reason is None:
                return ImageOps.exif_transpose(image)  # reads the pixels; what is put on white has no metadata
    except UnidentifiedImageError as error:
        expected = f"expected a picture as {', '.join(FORMATS[:-1])} or {FORMATS[-1]}"
        raise ValueError(f"got {what}, which is none, {expected}") from error
    except BROKEN as error:
        if isinstance(error, OSError) and error.errno is not None:  # of the system, which Pillow's own have not
            raise
        raise ValueError(f"got {what}, which is broken: {error}; save it again from its source") from error
    raise ValueError(f"got {what} {reason}")


def _why_not(file: IO[bytes], image: Image.Image) -> str | None:
    """Return why a picture is not taken, before its pixels are read, or None."""
    if image.width * image.height > MOST_PIXELS:
        size = f"{image.height}x{image.width} pixels (height x width)"
        return f"of {size}, expected at most {MOST_PIXELS} pixels; make it smaller"
    if image.mode == "P" and image.palette is None:
        return "without the palette (PLTE) of its pixels; save it again from its source"
    deep = image.mode.startswith(DEEP)
    if image.format == "PNG":
        place = file.tell()
        file.seek(0)
        deep |= file.read(DEPTH + 1)[-1] > 8
        file.seek(place)
    return "of more than 8 bits a value, expected 8; convert it" if deep else None
