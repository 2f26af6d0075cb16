"""Writes images as PNG in one atomic step, with the parameters that produced them; several as one labelled sheet.

`check_writable` finds what is wrong with the file's name before any image is generated.
"""

from __future__ import annotations

import json
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import torch
from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngInfo
from torch import Tensor

SHOWN = 128  # pixels; smaller images are enlarged so that they can be seen
GAP = 8
INK, PAPER = (30, 30, 30), (255, 255, 255)


def to_pil(images_N3HW: Tensor) -> list[Image.Image]:
    """Convert values in [0, 1] to images; the device rounds and reorders them, and bytes are copied to the host.

    One at a time, because the intermediate values take three times the memory of an image.
    """
    bytes_HW3 = ((image_3HW * 255).round().to(torch.uint8).permute(1, 2, 0).contiguous() for image_3HW in images_N3HW)
    return [Image.fromarray(image_HW3.cpu().numpy()) for image_HW3 in bytes_HW3]


def grid(images: Sequence[Image.Image], labels: Sequence[str]) -> Image.Image:
    """Return a sheet of all images in rows as even as possible, each with its label below."""
    scale = max(1, SHOWN // max(images[0].size))
    width, height = (side * scale for side in images[0].size)
    line, columns = max(16, width // 7), _columns(len(images), round((len(images) * height / width) ** 0.5 * 1.25))
    step_x, step_y = width + GAP, height + line + GAP
    size = columns * step_x + GAP, -(-len(images) // columns) * step_y + GAP
    font, sheet = ImageFont.load_default(size=max(11, width // 9)), Image.new("RGB", size, PAPER)
    draw = ImageDraw.Draw(sheet)
    for index, (image, label) in enumerate(zip(images, labels, strict=True)):
        x, y = GAP + index % columns * step_x, GAP + index // columns * step_y
        sheet.paste(image.resize((width, height), Image.Resampling.LANCZOS), (x, y))
        draw.text((x + width / 2, y + height + line / 2), label, INK, font, anchor="mm")
    return sheet


def _columns(count: int, target: int) -> int:
    """Return a number of columns near `target` that leaves the fewest cells empty."""
    target = min(target, count)  # tall images are shown in one row
    near = range(max(1, target - 1), min(count, target + 1) + 1)
    return min(near, key=lambda columns: (-count % columns, abs(columns - target), -columns))


def save(image: Image.Image, path: Path, parameters: Mapping[str, Any]) -> None:
    """Write a PNG in one atomic step; its metadata holds every parameter as JSON under the key "seqpar"."""
    info = PngInfo()
    info.add_text("seqpar", json.dumps(parameters))
    info.add_text("Software", "seqpar")
    with written(path) as temporary, open(temporary, "xb") as file:  # mkstemp would ignore the umask
        write_png(image, file, info)


def write_png(image: Image.Image, file: IO[bytes], info: PngInfo | None = None) -> None:
    """Write a lossless PNG, at zlib's fastest level: higher ones take several times as long for a few percent."""
    image.save(file, "png", pnginfo=info, compress_level=1)


@contextmanager
def written(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to `path`; it is renamed to `path` at the end, or removed after an error.

    A link at `path` stays one: its target is replaced. Raises OSError with `path` as its file name.
    """
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{secrets.token_hex(4)}{target.suffix}")  # short: the system bounds names
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        os.replace(temporary, target)
    except OSError as error:  # of a full disk, which has no file name, or that of the temporary file
        temporary.unlink(missing_ok=True)
        if error.errno is None or error.filename not in (None, str(temporary)):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def numbered(path: Path, count: int) -> list[Path]:
    """Return a path for each of several images: seqpar-1.png, seqpar-2.png; a single one keeps the name."""
    width = len(str(count))
    return [path.with_stem(f"{path.stem}-{number:0{width}}") for number in range(1, count + 1)] if count > 1 else [path]


def check_writable(path: Path, suffix: str = ".png", others: Sequence[Path] = ()) -> None:
    """Raise ValueError if `written` could not write to this path, so that a long run does not fail at its end.

    suffix: required ending of the name, .png for images and .mp4 for videos. others: further files of the run, in the
    same folder and with names that are no longer.
    """
    if path.suffix.lower() != suffix:
        raise ValueError(f"got output {path}, expected a name that ends in {suffix}")
    target = Path(os.path.realpath(path))
    try:
        for file in (*others, path):
            _check_file(file)
        parent = next(parent for parent in target.parents if parent.exists())
        for name in target.relative_to(parent).parts:  # new folders and the file
            with suppress(FileNotFoundError):
                os.lstat(parent / name)  # raises if the name is too long
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError as error:
        # without the random name of the trial file, so that every rank raises the same message
        raise ValueError(f"got output {path}, which cannot be written: {error.strerror or error}") from error


def _check_file(path: Path) -> None:
    if path.is_dir():
        raise ValueError(f"got output {path}, which is a folder; expected the name of a file")
    # the mode too: a user who may write everything has a reason to protect a file
    writable = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH
    if path.is_file() and not (path.stat().st_mode & writable and os.access(path, os.W_OK)):
        raise ValueError(f"got output {path}, which is read-only; name another file, or make it writable (chmod +w)")
