"""Turns pixels into files, and files of clients into pixels, in a process of its own, while the ranks work."""

from __future__ import annotations

import asyncio
import io
import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from seqpar.pipelines import png as _png
from seqpar.pipelines.image_files import MOST_PIXELS, decoded, digest
from seqpar.serve.front import log
from seqpar.serve.messages import OrderPicture

Kind = Literal["png", "jpeg", "webp"]
T = TypeVar("T")


@dataclass(frozen=True)
class Format:
    """How a picture is written. quality: from 0 to 100, of JPEG and WebP; PNG is lossless."""

    kind: Kind = "png"
    quality: int = 100


class Pictures:
    """The process that writes files; another one takes its place if it dies."""

    def __init__(self) -> None:
        self._pool = _new_pool()

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
        return await self._run(encoded, size, pixels, how, about, enlarged)

    async def pixels_of(self, files: Sequence[bytes]) -> list[OrderPicture]:
        """Return the pictures in files of a client; ValueError for what is none, OSError if the process died."""
        return await self._run(pictures_in, files)

    async def _run(self, work: Callable[..., T], *arguments: Any) -> T:
        pool = self._pool
        try:
            return await asyncio.get_running_loop().run_in_executor(pool, work, *arguments)
        except BrokenProcessPool as error:
            log.event("the process that writes pictures died and is started again", level=40)
            if pool is self._pool:  # else another picture has found it out before
                self._pool = _new_pool()
            raise OSError("the process that writes pictures died; ask again") from error

    def close(self) -> None:
        """End the process, whatever it does."""
        self._pool.shutdown(wait=False, cancel_futures=True)


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
        _png.write(image, file, info)
    else:
        image.save(file, how.kind, quality=how.quality)
    return file.getvalue()


def pictures_in(files: Sequence[bytes]) -> list[OrderPicture]:
    """Return the pictures in PNG, JPEG or WebP files; ValueError for other files, and for too many pixels."""
    pictures, left = list[OrderPicture](), MOST_PIXELS
    for number, file in enumerate(files, 1):
        image = decoded(f"picture {number}", io.BytesIO(file))
        left -= image.width * image.height
        if left < 0:
            raise ValueError(f"got large pictures, expected at most {MOST_PIXELS} pixels together; make them smaller")
        pixels = image.tobytes()
        pictures.append(OrderPicture(image.height, image.width, pixels, digest(pixels)))
    return pictures


def _new_pool() -> ProcessPoolExecutor:
    # spawned, because a fork would copy the listening sockets and every client's connection
    pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _begin)
    pool.submit(int)  # starts the process, which the first picture then need not wait for
    return pool


def _begin() -> None:
    """Leave Ctrl-C to the front, and end when the front has ended, even if it was killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    front = multiprocessing.parent_process()
    if front is not None:
        threading.Thread(target=lambda: (front.join(), os._exit(1)), daemon=True).start()
