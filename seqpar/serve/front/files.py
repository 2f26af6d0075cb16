"""Videos, and pictures asked for as links: kept in memory for a while, within a bound of bytes, oldest gone first."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from seqpar.serve.front.errors import Problem, ProblemError
from seqpar.serve.front.pictures import Kind

Stored = Kind | Literal["mp4"]


@dataclass(frozen=True)
class File:
    """A file of one key. until: when it expires."""

    key: str
    kind: Stored
    content: bytes
    until: float

    @property
    def media(self) -> str:
        """Return its type for HTTP."""
        return f"video/{self.kind}" if self.kind == "mp4" else f"image/{self.kind}"


class FileStore:
    """The files that can be fetched. Only a random name leads to one, and only with the key that made it."""

    def __init__(self, keep_s: float, keep_bytes: int, now: Callable[[], float] = time.monotonic) -> None:
        self._keep_s, self._keep_bytes, self._now = keep_s, keep_bytes, now
        self._files: dict[str, File] = {}  # in the order in which they were kept

    def keep(self, key: str, kind: Stored, contents: Sequence[bytes]) -> list[str]:
        """Return new names of the files of one request; ProblemError if they do not fit together."""
        need = sum(map(len, contents))
        if need > self._keep_bytes:
            instead = "a shorter or smaller video" if kind == "mp4" else "b64_json"
            text = f"got files of {need} bytes, expected at most {self._keep_bytes} (--keep-bytes); ask for {instead}"
            raise ProblemError(Problem(400, "too_large", text, "response_format"))
        self._drop(self._keep_bytes - need)
        until = self._now() + self._keep_s
        names = [f"{secrets.token_urlsafe(24)}.{kind}" for _ in contents]
        self._files |= {name: File(key, kind, each, until) for name, each in zip(names, contents, strict=True)}
        return names

    def get(self, key: str, name: str) -> File | None:
        """Return a file, or None if there is none of that name, or no longer, or only another key's."""
        self._drop(self._keep_bytes)
        file = self._files.get(name)
        return file if file is not None and file.key == key else None

    def forget(self, key: str, name: str) -> None:
        """Drop a file of a key, if it is still there."""
        if self.get(key, name) is not None:
            del self._files[name]

    def _drop(self, most: int) -> None:
        """Forget what has expired, and the oldest files until the rest have at most `most` bytes."""
        held, now = sum(len(file.content) for file in self._files.values()), self._now()
        for name, file in [*self._files.items()]:
            if held <= most and file.until > now:
                break
            held -= len(file.content)
            del self._files[name]
