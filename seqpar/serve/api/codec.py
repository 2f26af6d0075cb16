"""Encodes output images and decodes clients' files, in other processes than the server's event loop.

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

from seqpar.pipelines.image_files import BROKEN, FORMATS, MOST_PIXELS, decoded, decoded_mask, digest
from seqpar.serve.api import log
from seqpar.serve.api.errors import short
from seqpar.serve.messages import MASK, InputImage, InputLatents

ImageKind = Literal["png", "jpeg", "webp", "safetensors", "latents"]
T = TypeVar("T")
JOIN_S = 2.0  # seconds for the thread of a pool whose processes were killed
DECODERS = 2  # requests whose files are decoded at the same time


@dataclass(frozen=True)
class Format:
    """How an image is written. quality: 0 to 100, of JPEG and WebP; the others are lossless."""

    kind: ImageKind = "png"
    quality: int = 100


class PixelFile:
    """A file with the pixels of a request's images, which is removed with the last reference to this object."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / f"pixels-{secrets.token_hex(8)}"
        weakref.finalize(self, self.path.unlink, missing_ok=True)


@dataclass(frozen=True)
class InputFiles:
    """The input images or latents of a request, by their roles, and the file with their pixels or values."""

    images: tuple[InputImage, ...] = ()
    mask: InputImage | None = None
    control_image: InputImage | None = None
    latents: InputLatents | None = None
    file: PixelFile | None = None

    @staticmethod
    def of(count: int, roles: Sequence[str] = ()) -> InputFiles:
        """What stands for so many images before they are decoded. roles: of the last ones, mask or control_image."""
        return InputFiles.having([InputImage(0, 0, "")] * count, roles)

    @staticmethod
    def having(images: Sequence[InputImage], roles: Sequence[str], file: PixelFile | None = None) -> InputFiles:
        plain = len(images) - len(roles)
        named: dict[str, Any] = dict(zip(roles, images[plain:], strict=True))
        return InputFiles(tuple(images[:plain]), **named, file=file)

    @property
    def path(self) -> str | None:
        return None if self.file is None else str(self.file.path)


class ProcessDiedError(OSError):
    """A process of a `Workers` died; the message is for clients."""


class Workers:
    """Processes that run one function each at a time; replaced if one dies. They start when needed."""

    def __init__(self, count: int, task: str) -> None:
        self._count, self._task = count, task
        self._pool = self._new_pool()

    def start(self) -> None:
        """Start a process, for which the first call then need not wait."""
        self._pool.submit(int)

    async def run(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run a function in a process; ProcessDiedError if the process died."""
        pool = self._pool
        try:
            return await asyncio.get_running_loop().run_in_executor(pool, work, *arguments)
        except BrokenProcessPool as error:
            log.event(f"process that {self._task} died, restarting", level=40)
            if pool is self._pool:  # else another request has noticed before
                self._pool = self._new_pool()
            raise ProcessDiedError(f"the process that {self._task} died; retry") from error

    def close(self) -> None:
        for process in list((self._pool._processes or {}).values()):  # pyright: ignore[reportPrivateUsage]
            process.kill()
        manager: Any = self._pool._executor_manager_thread  # pyright: ignore[reportPrivateUsage]
        self._pool.shutdown(wait=False, cancel_futures=True)
        if manager is not None:  # it unlinks semaphores: an exit in the middle of that would leave a warning
            manager.join(JOIN_S)

    def _new_pool(self) -> ProcessPoolExecutor:
        # spawned, because a fork would copy the listening sockets and every client's connection
        return ProcessPoolExecutor(self._count, multiprocessing.get_context("spawn"), _exit_with_server)


def _exit_with_server() -> None:
    """Leave Ctrl-C to the API server, and exit when it has exited, even if it was killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    server = multiprocessing.parent_process()
    if server is not None:
        threading.Thread(target=lambda: (server.join(), os._exit(1)), daemon=True).start()


class Codec:
    """The processes that encode and decode: `encoder` runs `encoded`. folder: private, for pixels."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.encoder = Workers(1, "encodes images")
        self._decoders = Workers(DECODERS, "decodes images")
        self._turn = asyncio.Semaphore(DECODERS)
        self.waiting = 0  # requests whose images are decoded or wait for it, with up to 50 MB each
        self.encoder.start()

    async def decode(
        self, files: Sequence[bytes], check: Callable[[int], None], roles: Sequence[str] = ()
    ) -> InputFiles:
        """Decode a client's files; ValueError for other files, OSError if the process died or the disk is full.

        check: called with the bytes of all pixels before any are decoded; its errors are raised. roles: as for
        `InputFiles.of`.
        """
        self.waiting += 1
        try:
            async with self._turn:
                check(3 * await self._decoders.run(pixels_in, files))
                file = PixelFile(self._folder)
                found = await self._decoders.run(written, files, file.path, roles)
                if isinstance(found, InputLatents):
                    return InputFiles(latents=found, file=file)
                return InputFiles.having(found, roles, file)
        finally:
            self.waiting -= 1

    def close(self) -> None:
        self.encoder.close()
        self._decoders.close()


def encoded(
    size: tuple[int, int],
    pixels: bytes,
    how: Format,
    parameters: Mapping[str, Any],
    enlarged: tuple[int, int] | None = None,
) -> bytes:
    """The file of rows of RGB bytes; `seqpar sample` writes the same PNG for the same parameters.

    size: (height, width). parameters: kept by a PNG. enlarged: resize to this.
    """
    height, width = size
    image, file = Image.frombytes("RGB", (width, height), pixels), io.BytesIO()
    if enlarged is not None:
        image = image.resize((enlarged[1], enlarged[0]), Image.Resampling.BICUBIC)
    if how.kind in ("safetensors", "latents"):  # of which previews are images
        import numpy as np  # not in the API server's own process
        from safetensors.numpy import save

        return save({"image": np.array(image)}, {"seqpar": json.dumps(parameters)})
    if how.kind == "png":
        info = PngInfo()
        info.add_text("seqpar", json.dumps(parameters))
        info.add_text("Software", "seqpar")
        image.save(file, "png", pnginfo=info, compress_level=1)
    else:
        image.save(file, how.kind, quality=how.quality)
    return file.getvalue()


def pixels_in(files: Sequence[bytes]) -> int:
    """Pixels of all images by their headers, up to the first one that `written` refuses.

    ValueError for more than MOST_PIXELS together.
    """
    pixels = 0
    for file in files:
        try:
            if is_array(file):
                count = len(file) // 3
            else:
                with Image.open(io.BytesIO(file), formats=FORMATS) as image:
                    count = image.width * image.height
        except BROKEN:
            break
        if count > MOST_PIXELS:
            break
        pixels += count
        if pixels > MOST_PIXELS:
            raise ValueError(f"the images have more than {MOST_PIXELS} pixels together; make them smaller")
    return pixels


def written(files: Sequence[bytes], path: Path, roles: Sequence[str] = ()) -> tuple[InputImage, ...] | InputLatents:
    """Decode files of images, or one of latents, and write their values into a new file; ValueError for others.

    roles: as for `InputFiles.of`. A mask has the size of the first image, and is written as `decoded_mask` returns it.
    """
    images, plain = list[InputImage](), len(files) - len(roles)
    names = [*(f"image {number}" for number in range(1, plain + 1)), *roles]
    with path.open("xb") as out:
        for what, file in zip(names, files, strict=True):
            channels = 3
            if what == MASK:
                mask = decoded_mask(what, io.BytesIO(file))
                (height, width), pixels, channels = (mask.height, mask.width), mask.tobytes(), 1
                if (height, width) != (images[0].height, images[0].width):
                    size = f"{images[0].width}x{images[0].height}"
                    raise ValueError(f"got mask of {width}x{height} pixels, expected the image's {size}")
            elif is_array(file):
                (height, width, *more), pixels = array_of(what, file)
                if len(more) > 1:
                    if len(files) > 1:
                        raise ValueError(f"{what} has latents, which must be the only file")
                    out.write(pixels)
                    return InputLatents((height, width, *more), digest(pixels))
            else:
                image = decoded(what, io.BytesIO(file))
                (height, width), pixels = (image.height, image.width), image.tobytes()
            out.write(pixels)
            images.append(InputImage(height, width, digest(pixels), channels))
    return tuple(images)


def is_array(file: bytes) -> bool:
    """Whether this begins as a safetensors file does: with the length of a JSON object, which no image file has."""
    return file[8:9] == b"{" and int.from_bytes(file[:8], "little") <= len(file) - 8


def array_of(what: str, file: bytes) -> tuple[Any, bytes]:
    """Shape and bytes of a safetensors file: `image`, or `latents` with four or five dimensions.

    ValueError for other tensors.
    """
    from safetensors import SafetensorError, deserialize

    try:
        tensors = deserialize(file)
    except SafetensorError as error:
        raise ValueError(f"{what} is no safetensors file: {error}") from error
    found = [(name, tensor["dtype"], *tensor["shape"]) for name, tensor in tensors]
    match found:
        case [("image", "U8", int(), int(), 3) | ("latents", "F32", 1, _, _, _) | ("latents", "F32", 1, _, _, _, _)]:
            shape, data = tuple(tensors[0][1]["shape"]), bytes(tensors[0][1]["data"])
            if data:
                return shape, data
        case _:
            pass
    expected = "image of U8 [height, width, 3] or latents of F32 [1, channels, height, width]"
    raise ValueError(f"{what} has tensors {short(str(found))}, expected {expected}")
