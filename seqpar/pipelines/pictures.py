"""Makes a labelled grid of pictures and writes it, in one atomic step, with the parameters that produced it.

What can be wrong with the file's name or its disk is found by `check_writable`, before any picture is made.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import signal
import stat
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import IO, Any

import torch
from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngInfo
from torch import Tensor

from seqpar.mesh.mesh import Mesh

SHOWN = 128  # pixels; smaller pictures are enlarged so that they can be seen
GAP = 8
HEAD = 1 << 16  # bytes of a file beside its pixels: the parameters
INK, PAPER = (30, 30, 30), (255, 255, 255)


def to_pil(images_N3HW: Tensor) -> list[Image.Image]:
    """Convert values in [0, 1] to pictures; their device rounds and reorders them, and bytes are copied to the host.

    One at a time, because the values in between take three times the memory of a picture.
    """
    bytes_HW3 = ((image_3HW * 255).round().to(torch.uint8).permute(1, 2, 0).contiguous() for image_3HW in images_N3HW)
    return [Image.fromarray(each.cpu().numpy()) for each in bytes_HW3]


def grid(images: Sequence[Image.Image], labels: Sequence[str]) -> Image.Image:
    """Return a sheet of all pictures in rows as even as possible, each with its label below."""
    width, height, line, columns, size = _places(len(images), images[0].size)
    step_x, step_y = width + GAP, height + line + GAP
    font, sheet = ImageFont.load_default(size=max(11, width // 9)), Image.new("RGB", size, PAPER)
    draw = ImageDraw.Draw(sheet)
    for index, (image, label) in enumerate(zip(images, labels, strict=True)):
        x, y = GAP + index % columns * step_x, GAP + index // columns * step_y
        sheet.paste(image.resize((width, height), Image.Resampling.LANCZOS), (x, y))
        draw.text((x + width / 2, y + height + line / 2), label, INK, font, anchor="mm")
    return sheet


def _places(count: int, size: tuple[int, int]) -> tuple[int, int, int, int, tuple[int, int]]:
    """Return width and height of a shown picture, height of its label, columns, and (width, height) of the sheet."""
    scale = max(1, SHOWN // max(size))
    width, height = size[0] * scale, size[1] * scale
    line, columns = max(16, width // 7), _columns(count, round((count * height / width) ** 0.5 * 1.25))
    rows = -(-count // columns)
    return width, height, line, columns, (columns * (width + GAP) + GAP, rows * (height + line + GAP) + GAP)


def bytes_of(count: int, pixels: tuple[int, int], sheet: bool) -> int:
    """Return the most bytes that the files of `count` pictures of (height, width) pixels take.

    sheet: whether they are one sheet. PNG stores what it cannot deflate, with a code for each row and each 32 kB.
    """
    width, height = pixels[::-1]
    if sheet:
        (width, height), count = _places(count, (width, height))[-1], 1
    return count * (HEAD + height * (3 * width + 1) * 1001 // 1000)


def _columns(count: int, wanted: int) -> int:
    """Return a number of columns near `wanted` that leaves the fewest cells empty."""
    wanted = min(wanted, count)  # tall pictures are shown in one row
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
    """Write a lossless PNG. info: texts."""
    image.save(file, "png", pnginfo=info, compress_level=1)  # the defaults take four times as long


@contextmanager
def written(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; what is written there becomes the file at the end, or is removed.

    A link at `path` stays one: the file that it leads to is replaced. OSError, which names `path`, if it cannot be
    written.
    """
    target = Path(os.path.realpath(path))
    temporary = _temporary(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _removed_by_signals(temporary):
            yield temporary
            os.replace(temporary, target)
    except OSError as error:  # a full disk is told without a name, or with that of the temporary file
        temporary.unlink(missing_ok=True)
        if error.errno is None or error.filename not in (None, str(temporary)):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def _removed_by_signals(temporary: Path) -> Iterator[None]:
    """Remove the file if a signal ends this process meanwhile, as torchrun's agent does where another rank fails.

    Signals that are ignored, or that have a handler, as those of the command, which raises, stay as they are.
    """
    if threading.current_thread() is not threading.main_thread():  # signals come to the main thread alone
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        temporary.unlink(missing_ok=True)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    numbers = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) is signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def _temporary(target: Path) -> Path:
    """Return a name beside a file: short, because the system bounds the length of names."""
    return target.with_name(f".{secrets.token_hex(4)}{target.suffix}")


def numbered(path: Path, count: int) -> list[Path]:
    """Return a path for each of several pictures: seqpar-1.png, seqpar-2.png; a single one keeps the name."""
    width = len(str(count))
    return [path.with_stem(f"{path.stem}-{number:0{width}}") for number in range(1, count + 1)] if count > 1 else [path]


def check_writable(path: Path, suffix: str = ".png", others: Sequence[Path] = ()) -> None:
    """Raise ValueError if `written` could not write to this path, so that a long run does not fail at its end.

    suffix: the ending that the name must have, .png for pictures and .mp4 for videos. others: further files of the run,
    in the same folder and with names that are no longer; one of them may be there already, and be no file.
    """
    if path.suffix.lower() != suffix:
        raise ValueError(f"got output {path}, expected a name that ends in {suffix}")
    target = Path(os.path.realpath(path))
    try:
        for other in others:
            _check_target(other, Path(os.path.realpath(other)))
        _check_target(path, target)
        parent = _existing(target)
        for name in target.relative_to(parent).parts:  # new folders and the file
            with suppress(FileNotFoundError):
                os.lstat(parent / name)  # raises if the name is too long
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError as error:
        # without the random name of the trial file, so that every rank raises the same message
        raise ValueError(f"got output {path}, which cannot be written: {error.strerror or error}") from error


def check_room(path: Path, nbytes: int, mesh: Mesh) -> None:
    """Raise OSError (no space left) on every rank if rank 0's disk has no room for the files of a run.

    nbytes: what they take at most.
    """
    free = mesh.on_rank_0(lambda: shutil.disk_usage(_existing(Path(os.path.realpath(path)))).free, int)
    if free < nbytes:
        need = f"{nbytes / 2**20:.1f} MiB are needed and {free / 2**20:.1f} MiB are free"
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {need}", str(path))


def _existing(target: Path) -> Path:
    """Return the nearest folder above a path that exists."""
    return next(parent for parent in target.parents if parent.exists())


def _check_target(path: Path, target: Path) -> None:
    """Raise ValueError if what lies at a path, or where it leads, is no file, or one that is not to be written."""
    if target.is_dir():
        raise ValueError(f"got output {path}, which is a folder; expected the name of a file")
    if target.is_symlink():
        raise ValueError(f"got output {path}, a link that leads to itself; expected the name of a file")
    if not target.exists():
        return
    mode = target.stat().st_mode
    if not stat.S_ISREG(mode):
        raise ValueError(f"got output {path}, which is no file but a device or a pipe; expected the name of a file")
    # the mode alone: a user who may write everything has a reason to protect a file, too
    if not mode & (stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH) or not os.access(target, os.W_OK):
        raise ValueError(f"got output {path}, which is read-only; name another file, or make it writable (chmod +w)")
