"""Encodes output images and decodes the files of clients, in other processes than the server's event loop.

Decoded pixels, up to 192 MiB per request, stay out of the API server's memory: they go into a file in its private
folder, which rank 0 reads.
"""

from __future__ import annotations

import asyncio
import io
import json
import multiprocessing
import os
import secrets
import signal
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from seqpar.pipelines.image_files import BROKEN, FORMATS, MOST_PIXELS, decoded, digest
from seqpar.serve.front import log
from seqpar.serve.messages import InputImage

Kind = Literal["png", "jpeg", "webp"]
T = TypeVar("T")
DECODERS = 2  # requests whose files are decoded at the same time


@dataclass(frozen=True)
class Format:
    """How a picture is written. quality: from 0 to 100, of JPEG and WebP; PNG is lossless."""

    kind: Kind = "png"
    quality: int = 100


class PixelFile:
    """A file with the pixels of a request's pictures, which is removed when nothing refers to this object any more."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / f"pixels-{secrets.token_hex(8)}"
        weakref.finalize(self, self.path.unlink, missing_ok=True)


@dataclass(frozen=True)
class InputImages:
    """The pictures that a request begins with, and the file with their pixels."""

    images: tuple[InputImage, ...] = ()
    file: PixelFile | None = None

    @property
    def path(self) -> str | None:
        """Return where the pixels are."""
        return None if self.file is None else str(self.file.path)


NO_IMAGES = InputImages()


class ProcessDiedError(OSError):
    """A process of `Processes` died; the message is for clients."""


class Processes:
    """Processes that do one thing each at a time; others take their place if one dies. They start when needed."""

    def __init__(self, count: int, task: str) -> None:
        self._count, self._task = count, task
        self._pool = self._new_pool()

    def start(self) -> None:
        """Start a process, for which the first call then need not wait."""
        self._pool.submit(int)

    async def run(self, work: Callable[..., T], *arguments: Any) -> T:
        """Return what a function returns in such a process; ProcessDiedError if the process died."""
        pool = self._pool
        try:
            return await asyncio.get_running_loop().run_in_executor(pool, work, *arguments)
        except BrokenProcessPool as error:
            log.event(f"the process that {self._task} died and is started again", level=40)
            if pool is self._pool:  # else another request has found it out before
                self._pool = self._new_pool()
            raise ProcessDiedError(f"the process that {self._task} died; ask again") from error

    def close(self) -> None:
        """End the processes, whatever they do."""
        for process in list((self._pool._processes or {}).values()):  # pyright: ignore[reportPrivateUsage]
            process.kill()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _new_pool(self) -> ProcessPoolExecutor:
        # spawned, because a fork would copy the listening sockets and every client's connection
        return ProcessPoolExecutor(self._count, multiprocessing.get_context("spawn"), _begin)


class Pictures:
    """The processes that encode and decode. folder: private, for pixels."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._encoder = Processes(1, "writes pictures")
        self._decoders = Processes(DECODERS, "reads pictures")
        self._turn = asyncio.Semaphore(DECODERS)
        self.waiting = 0  # requests whose images are decoded or wait for it, with up to 50 MB each
        self._encoder.start()

    async def file_of(
        self,
        size: tuple[int, int],
        pixels: bytes,
        how: Format,
        about: Mapping[str, Any],
        enlarged: tuple[int, int] | None = None,
    ) -> bytes:
        """Return a file. size: (height, width). about: parameters that a PNG keeps. OSError if the process died.

        enlarged: the size that the picture is given, where it is not its own.
        """
        return await self._encoder.run(encoded, size, pixels, how, about, enlarged)

    async def inputs_of(self, files: Sequence[bytes], check: Callable[[int], None]) -> InputImages:
        """Decode files of a client; ValueError for what is no picture, OSError if the process died.

        check: called with the bytes of all pixels before any are decoded; what it raises is raised.
        """
        self.waiting += 1
        try:
            async with self._turn:
                check(3 * await self._decoders.run(pixels_in, files))
                file = PixelFile(self._folder)
                return InputImages(await self._decoders.run(written, files, file.path), file)
        finally:
            self.waiting -= 1

    def close(self) -> None:
        """End the processes."""
        self._encoder.close()
        self._decoders.close()


def encoded(
    size: tuple[int, int], pixels: bytes, how: Format, about: Mapping[str, Any], enlarged: tuple[int, int] | None = None
) -> bytes:
    """Return the bytes of a file of rows of RGB bytes; `seqpar sample` writes the same PNG of the same parameters.

    enlarged: see `Pictures.file_of`.
    """
    height, width = size
    image, file = Image.frombytes("RGB", (width, height), pixels), io.BytesIO()
    if enlarged is not None:
        image = image.resize((enlarged[1], enlarged[0]), Image.Resampling.BICUBIC)
    if how.kind == "png":
        info = PngInfo()
        info.add_text("seqpar", json.dumps(about))
        info.add_text("Software", "seqpar")
        image.save(file, "png", pnginfo=info, compress_level=1)
    else:
        image.save(file, how.kind, quality=how.quality)
    return file.getvalue()


def pixels_in(files: Sequence[bytes]) -> int:
    """Return the pixels of all pictures by their headers, up to the first one that `written` refuses.

    Raises ValueError for more than MOST_PIXELS.
    """
    pixels = 0
    for file in files:
        try:
            with Image.open(io.BytesIO(file), formats=FORMATS) as image:
                count = image.width * image.height
        except BROKEN:
            break
        if count > MOST_PIXELS:
            break
        pixels += count
        if pixels > MOST_PIXELS:
            raise ValueError(f"got large pictures, expected at most {MOST_PIXELS} pixels together; make them smaller")
    return pixels


def written(files: Sequence[bytes], path: Path) -> tuple[InputImage, ...]:
    """Decode PNG, JPEG or WebP files, and write their pixels into a new file; ValueError for other files."""
    pictures = list[InputImage]()
    with path.open("xb") as out:
        for number, file in enumerate(files, 1):
            image = decoded(f"picture {number}", io.BytesIO(file))
            pixels = image.tobytes()
            out.write(pixels)
            pictures.append(InputImage(image.height, image.width, digest(pixels)))
    return tuple(pictures)


def _begin() -> None:
    """Leave Ctrl-C to the front, and end when the front has ended, even if it was killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    front = multiprocessing.parent_process()
    if front is not None:
        threading.Thread(target=lambda: (front.join(), os._exit(1)), daemon=True).start()
