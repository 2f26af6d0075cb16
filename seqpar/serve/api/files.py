"""Result files and job records, in the server's private folder or one that several servers mount (--jobs).

    OWNER/ID.json      the record of a job that has ended (--jobs); OWNER is a hash of the name of its key
    OWNER/NAME.mp4     a video, or an image behind a link

Results are kept for a time and within a bound of bytes; the oldest go first. Only a random name leads to a file, and
only with the key that made it. A file appears in the folder whole or not at all. Only names that a server made itself
become paths.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import time
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import msgspec
from fastapi import Response
from fastapi.responses import FileResponse
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from seqpar.serve.api import log
from seqpar.serve.api.codec import ImageKind
from seqpar.serve.api.errors import ProblemError, refused, short

Stored = ImageKind | Literal["mp4"]
NAME = re.compile(r"[A-Za-z0-9_-]{32}\.(png|jpeg|webp|safetensors|mp4)")
ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
MEDIA = {"mp4": "video/mp4", "safetensors": "application/octet-stream"}
LONGEST = 1 << 24  # bytes of a record: a prompt has at most 1 MB, or 6 MB with all of it escaped
HEADERS = {"cache-control": "private, no-store", "x-content-type-options": "nosniff"}


class JobRecord(msgspec.Struct, frozen=True):
    """A job as the API describes it. stored: name of a video's file. job, video: its JSON objects."""

    id: str
    arrived: float
    job: dict[str, Any]
    stored: str | None = None
    video: dict[str, Any] | None = None


class Download(FileResponse):
    """A file; a Range that cannot be sent, and a file that is deleted before it is opened, are errors of this API."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        held = list[Message]()  # the head of the answer, until the file is open

        async def checked(message: Message) -> None:
            if message["type"] != "http.response.start":
                while held:
                    await send(held.pop())
                await send(message)
            elif message["status"] < 400:
                held.append(message)
            else:
                raise self._refused(message["status"], Headers(scope=scope).get("range", ""))

        try:
            await super().__call__(scope, receive, checked)
        except FileNotFoundError as error:
            raise refused(404, "unknown_file", "file not found or expired; request it again") from error

    def _refused(self, status: int, asked: str) -> ProblemError:
        size = self.headers["content-length"]
        text = f"range {short(asked)!r} is not one of a file of {size} bytes; use a range such as bytes=0-"
        headers = {"content_range": f"bytes */{size}"} if status == 416 else {}
        return refused(status, "invalid_value", text, "range", **headers)


class JobFolder:
    """A folder of results and records. keep_bytes: bound of the whole folder, for all servers that mount it."""

    def __init__(self, root: Path, keep_s: float, keep_bytes: int) -> None:
        self._root, self._keep_s, self._keep_bytes = root, keep_s, keep_bytes
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._write(root / ".trial", b"")
            (root / ".trial").unlink(missing_ok=True)
        except OSError as error:
            raise ValueError(f"--jobs {root} is no folder to write in: {error.strerror}") from error

    async def keep(self, key: str, kind: Stored, contents: Sequence[bytes]) -> list[str]:
        """Keep the files of one job; return their new names. ProblemError if they are too large together."""
        need = sum(map(len, contents))
        if need > self._keep_bytes:
            instead = "b64_json for images, or a shorter or smaller video"
            text = f"the files have {need} bytes, but the server keeps at most {self._keep_bytes}; request {instead}"
            raise refused(400, "too_large", text, "response_format")
        ending = "safetensors" if kind == "latents" else kind
        names = [f"{secrets.token_urlsafe(24)}.{ending}" for _ in contents]

        def write() -> None:
            self.sweep(self._keep_bytes - need)
            for name, content in zip(names, contents, strict=True):
                self._write(self._of_key(key) / name, content)

        try:
            await asyncio.to_thread(write)
        except OSError as error:
            log.event("results cannot be stored", level=40, reason=str(error))
            raise refused(500, "failure", "the server cannot store the result; retry later") from error
        return names

    async def get(self, key: str, name: str) -> Response | None:
        """The HTTP response with a file of a key; None if it is missing or has expired."""
        match, path = NAME.fullmatch(name), self._of_key(key) / name
        if match is None or (found := await asyncio.to_thread(self._kept, path)) is None:
            return None
        media = MEDIA.get(match[1], f"image/{match[1]}")
        return Download(path, media_type=media, headers=HEADERS, stat_result=found)

    async def forget(self, key: str, name: str) -> None:
        if NAME.fullmatch(name):
            await asyncio.to_thread((self._of_key(key) / name).unlink, missing_ok=True)

    # records; these methods wait for the file system, so they are called in threads

    def keep_record(self, key: str, record: JobRecord) -> None:
        self._write(self._of_key(key) / f"{record.id}.json", msgspec.json.encode(record))

    def record(self, key: str, id_: str) -> JobRecord | None:
        """The record of a job of a key; None if it is missing or has expired."""
        path = self._of_key(key) / f"{id_}.json"
        return self._read(path) if ID.fullmatch(id_) and self._kept(path) else None

    def records(self, key: str) -> list[JobRecord]:
        records = (self.record(key, path.stem) for path in self._of_key(key).glob("*.json"))
        return [record for record in records if record is not None]

    def forget_record(self, key: str, id_: str) -> None:
        if ID.fullmatch(id_):
            (self._of_key(key) / f"{id_}.json").unlink(missing_ok=True)

    def sweep(self, most: int | None = None) -> None:
        """Delete what has expired, and the oldest result files until the rest have at most `most` bytes."""
        most = self._keep_bytes if most is None else most
        files = sorted(self._files())
        total = sum(size for _, size, path in files if NAME.fullmatch(path.name))
        for modified, size, path in files:
            is_result = NAME.fullmatch(path.name) is not None
            if time.time() - modified > self._keep_s or (is_result and total > most):
                path.unlink(missing_ok=True)
                total -= size if is_result else 0

    def _files(self) -> Iterator[tuple[float, int, Path]]:
        """Modification time, bytes and path of all files that servers have written, also of interrupted writes."""
        for path in self._root.glob("*/*"):
            is_ours = NAME.fullmatch(path.name) or re.fullmatch(rf"{ID.pattern}\.json|\.[0-9a-f]{{16}}", path.name)
            if is_ours and re.fullmatch(r"[0-9a-f]{32}", path.parent.name):
                try:
                    stat = path.stat()
                except FileNotFoundError:  # another server has deleted it
                    continue
                yield stat.st_mtime, stat.st_size, path

    def _of_key(self, key: str) -> Path:
        return self._root / sha256(key.encode()).hexdigest()[:32]

    def _kept(self, path: Path) -> os.stat_result | None:
        """The status of a file, None if it is missing or has expired."""
        try:
            found = path.stat()
        except FileNotFoundError:
            return None
        return found if time.time() - found.st_mtime < self._keep_s else None

    def _write(self, path: Path, content: bytes) -> None:
        """Write a file, whole or not at all."""
        path.parent.mkdir(mode=0o700, exist_ok=True)
        temporary = path.with_name(f".{secrets.token_hex(8)}")
        try:
            temporary.write_bytes(content)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)

    def _read(self, path: Path) -> JobRecord | None:
        """A record; a file with other content is logged and counts as missing."""
        try:
            if path.stat().st_size > LONGEST:
                raise ValueError(f"more than {LONGEST} bytes")
            return msgspec.json.decode(path.read_bytes(), type=JobRecord)
        except FileNotFoundError:
            return None
        except (ValueError, msgspec.MsgspecError) as error:
            log.event("a file of --jobs is no job record", level=30, file=str(path), error=str(error))
            return None
