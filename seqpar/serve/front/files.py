"""Videos, and pictures asked for as links: kept for a while, within a bound of bytes, oldest gone first."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, cast

from fastapi import Response
from fastapi.responses import FileResponse

from seqpar.serve.front.errors import Problem, ProblemError
from seqpar.serve.front.folder import JobFolder
from seqpar.serve.front.pictures import Kind

Stored = Kind | Literal["mp4"]
NAME = re.compile(r"[A-Za-z0-9_-]{32}\.(png|jpeg|webp|mp4)")
HEADERS = {"cache-control": "private, no-store", "x-content-type-options": "nosniff"}


@dataclass(frozen=True)
class File:
    """A file that is kept: its bytes, or where they are."""

    kind: Stored
    content: bytes | Path

    def response(self) -> Response:
        """Return the file as an answer."""
        media = f"video/{self.kind}" if self.kind == "mp4" else f"image/{self.kind}"
        if isinstance(self.content, Path):
            return FileResponse(self.content, media_type=media, headers=HEADERS)
        return Response(self.content, media_type=media, headers=HEADERS)


class KeptFiles(Protocol):
    """The files that can be fetched. Only a random name leads to one, and only with the key that made it."""

    async def keep(self, key: str, kind: Stored, contents: Sequence[bytes]) -> list[str]:
        """Return new names of the files of one request; ProblemError if they do not fit together."""
        ...

    async def get(self, key: str, name: str) -> File | None:
        """Return a file, or None if there is none of that name, or no longer, or only another key's."""
        ...

    async def forget(self, key: str, name: str) -> None:
        """Drop a file of a key, if it is still there."""
        ...


@dataclass(frozen=True)
class _Held:
    """A file of a key, until it expires."""

    key: str
    until: float
    content: bytes
    kind: Stored


class FileStore:
    """Files in the memory of this front."""

    def __init__(self, keep_s: float, keep_bytes: int, now: Callable[[], float] = time.monotonic) -> None:
        self._keep_s, self._keep_bytes, self._now = keep_s, keep_bytes, now
        self._files: dict[str, _Held] = {}  # in the order in which they were kept

    async def keep(self, key: str, kind: Stored, contents: Sequence[bytes]) -> list[str]:
        """Return new names; see `KeptFiles`."""
        names = _names(kind, contents, self._keep_bytes)
        self._drop(self._keep_bytes - sum(map(len, contents)))
        until = self._now() + self._keep_s
        self._files |= {name: _Held(key, until, each, kind) for name, each in zip(names, contents, strict=True)}
        return names

    async def get(self, key: str, name: str) -> File | None:
        """Return a file; see `KeptFiles`."""
        self._drop(self._keep_bytes)
        held = self._files.get(name)
        return File(held.kind, held.content) if held is not None and held.key == key else None

    async def forget(self, key: str, name: str) -> None:
        """Drop a file; see `KeptFiles`."""
        if await self.get(key, name) is not None:
            del self._files[name]

    def _drop(self, most: int) -> None:
        """Forget what has expired, and the oldest files until the rest have at most `most` bytes."""
        sizes, now = sum(len(each.content) for each in self._files.values()), self._now()
        for name, held in [*self._files.items()]:
            if sizes <= most and held.until > now:
                break
            sizes -= len(held.content)
            del self._files[name]


class FolderStore:
    """Files in a folder that fronts share. The bound of bytes is of the whole folder."""

    def __init__(self, folder: JobFolder, keep_s: float, keep_bytes: int) -> None:
        self._folder, self._keep_s, self._keep_bytes = folder, keep_s, keep_bytes

    async def keep(self, key: str, kind: Stored, contents: Sequence[bytes]) -> list[str]:
        """Return new names; see `KeptFiles`."""
        names = _names(kind, contents, self._keep_bytes)
        try:
            await asyncio.to_thread(self._write, key, names, contents)
        except OSError as error:
            text = f"got a file that was not written into --jobs: {error.strerror}; tell who runs the server"
            raise ProblemError(Problem(500, "failure", text)) from error
        return names

    async def get(self, key: str, name: str) -> File | None:
        """Return a file; see `KeptFiles`."""
        match, path = NAME.fullmatch(name), self._folder.of_key(key) / name
        if match is None or not await asyncio.to_thread(self._is_kept, path):
            return None
        return File(cast("Stored", match[1]), path)

    async def forget(self, key: str, name: str) -> None:
        """Drop a file; see `KeptFiles`."""
        if NAME.fullmatch(name):
            await asyncio.to_thread((self._folder.of_key(key) / name).unlink, missing_ok=True)

    def _is_kept(self, path: Path) -> bool:
        try:
            return self._folder.age_s(path) < self._keep_s
        except FileNotFoundError:
            return False

    def _write(self, key: str, names: Sequence[str], contents: Sequence[bytes]) -> None:
        self._drop(self._keep_bytes - sum(map(len, contents)))
        for name, content in zip(names, contents, strict=True):
            self._folder.write(self._folder.of_key(key) / name, content)

    def _drop(self, most: int) -> None:
        """Remove the oldest files of all keys until the rest have at most `most` bytes."""
        found: list[tuple[float, int, Path]] = []
        for path in self._folder.root.glob("owners/*/*"):
            try:
                if NAME.fullmatch(path.name):
                    about = path.stat()
                    found.append((about.st_mtime, about.st_size, path))
            except FileNotFoundError:  # another front has removed it
                continue
        sizes = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if sizes <= most:
                break
            sizes -= size
            path.unlink(missing_ok=True)


def _names(kind: Stored, contents: Sequence[bytes], most: int) -> list[str]:
    """Return new names for files; ProblemError if they have more than `most` bytes together."""
    need = sum(map(len, contents))
    if need > most:
        instead = "a shorter or smaller video" if kind == "mp4" else "b64_json"
        text = f"got files of {need} bytes, expected at most {most} (--keep-bytes); ask for {instead}"
        raise ProblemError(Problem(400, "too_large", text, "response_format"))
    return [f"{secrets.token_urlsafe(24)}.{kind}" for _ in contents]
