"""Makes a labelled grid of pictures and writes it, in one atomic step, with the parameters that produced it."""

from __future__ import annotations

import json
import os
import secrets
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngInfo
from torch import Tensor

from seqpar.pipelines import _png

SHOWN = 128  # pixels; smaller pictures are enlarged so that they can be seen
GAP = 8
# Rows are filtered as always, but only runs of equal bytes are sought. A picture of 1024 x 1024 pixels, one CPU core,
# Pillow 13.0 with zlib-ng: noise takes 0.09 s instead of 0.33 s for the same 3.15 MB, a smooth picture with slight
# noise 0.09 s instead of 0.60 s for 1.31 MB instead of 1.35; with compress_level=1 alone that one takes 1.60 MB.
FAST = {"compress_level": 1, "compress_type": zlib.Z_RLE}
INK, PAPER = (30, 30, 30), (255, 255, 255)


def to_pil(images_N3HW: Tensor) -> list[Image.Image]:
    """Convert values in [0, 1] to pictures; their device rounds and reorders them, and bytes are copied to the host."""
    bytes_NHW3 = (images_N3HW * 255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous()
    arrays = bytes_NHW3.cpu().numpy()
    return [Image.fromarray(array) for array in arrays]


def grid(images: Sequence[Image.Image], labels: Sequence[str]) -> Image.Image:
    """Return a sheet of all pictures in rows as even as possible, each with its label below."""
    scale = max(1, SHOWN // max(images[0].size))
    width, height = images[0].width * scale, images[0].height * scale
    columns = _columns(len(images), round((len(images) * height / width) ** 0.5 * 1.25))
    font, line = ImageFont.load_default(size=max(11, width // 9)), max(16, width // 7)
    step_x, step_y = width + GAP, height + line + GAP
    sheet = Image.new("RGB", (columns * step_x + GAP, -(-len(images) // columns) * step_y + GAP), PAPER)
    draw = ImageDraw.Draw(sheet)
    for index, (image, label) in enumerate(zip(images, labels, strict=True)):
        x, y = GAP + index % columns * step_x, GAP + index // columns * step_y
        sheet.paste(image.resize((width, height), Image.Resampling.LANCZOS), (x, y))
        draw.text((x + width / 2, y + height + line / 2), label, INK, font, anchor="mm")
    return sheet


def _columns(count: int, wanted: int) -> int:
    """Return a number of columns near `wanted` that leaves the fewest cells empty."""
    near = range(max(1, wanted - 1), min(count, wanted + 1) + 1)
    return min(near, key=lambda columns: (-count % columns, abs(columns - wanted), -columns))


def save(sheet: Image.Image, path: Path, parameters: Mapping[str, Any]) -> None:
    """Write a PNG in one atomic step; its metadata holds every parameter as JSON under the key "seqpar"."""
    info = PngInfo()
    info.add_text("seqpar", json.dumps(parameters))
    info.add_text("Software", "seqpar")
    with written(path) as temporary, open(temporary, "xb") as file:  # mkstemp would ignore the umask
        write_png(sheet, file, info)


def write_png(image: Image.Image, file: IO[bytes], info: PngInfo | None = None) -> None:
    """Write a lossless PNG in a fraction of the time of Pillow's defaults, at about the same size; see `FAST`."""
    if _png.fits(image):
        _png.write(image, file, info)
    else:
        image.save(file, "png", pnginfo=info, **FAST)


@contextmanager
def written(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; what is written there becomes the file at the end, or is removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.stem}.{secrets.token_hex(4)}{path.suffix}")
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def numbered(path: Path, count: int) -> list[Path]:
    """Return a path for each of several pictures: seqpar-1.png, seqpar-2.png; a single one keeps the name."""
    width = len(str(count))
    return [path.with_stem(f"{path.stem}-{number:0{width}}") for number in range(1, count + 1)] if count > 1 else [path]


def check_writable(path: Path, suffix: str = ".png") -> None:
    """Raise ValueError if `written` could not write to this path, so that a long run does not fail at its end.

    suffix: the ending that the name must have, .png for pictures and .mp4 for videos.
    """
    if path.suffix.lower() != suffix:
        raise ValueError(f"got output {path}, expected a name that ends in {suffix}")
    if path.is_dir():
        raise ValueError(f"got output {path}, which is a folder; expected the name of a file")
    try:
        parent = next(parent for parent in path.absolute().parents if parent.exists())
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError as error:
        # without the random name of the trial file, so that every rank raises the same message
        raise ValueError(f"got output {path}, which cannot be written: {error.strerror or error}") from error
