"""A folder in which several fronts keep what is known of their jobs, so that each of them answers for all.

    fronts/FRONT        touched by a front as long as it lives
    marks/ID.WISH       what a front asks of the one that has the job: cancel or delete
    owners/OWNER/ID.json    what is known of a job; OWNER is a hash of the name of its key
    owners/OWNER/NAME.mp4   a video, or a picture behind a link (see `files`)

A file is written beside its place and then renamed, so that no front reads half of one. Ages are differences of times
of files, which one file system gives, so that clocks of machines need not agree.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, cast, get_args

import msgspec

from seqpar.serve.front import log

LOST_S = 30.0  # after which a front that has not touched its file is taken for dead
LONGEST = 1 << 24  # bytes of what is known of a job: a prompt has at most 1 MB, or 6 MB with all of it escaped
ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
MARK = re.compile(rf"({ID.pattern})\.(cancel|delete)")
OURS = re.compile(rf"{MARK.pattern}|{ID.pattern}(\.[a-z0-9]+)?|\.[0-9a-f]{{16}}")  # names that are ours to drop
PLACES = ("fronts/*", "marks/*", "owners/*/*")
Wish = Literal["cancel", "delete"]


class JobRecord(msgspec.Struct, frozen=True):
    """What is known of a job, as answers tell it. front: whose job it is. stored: the name of a video's file."""

    id: str
    front: str
    arrived: float
    job: dict[str, Any]
    ended: bool = False
    stored: str | None = None
    video: dict[str, Any] | None = None


class JobFolder:
    """The folder as one front sees it. Its methods wait for the file system: call them in a thread."""

    def __init__(self, root: Path) -> None:
        self.root, self.front = root, secrets.token_hex(8)
        self._beat = root / "fronts" / self.front
        self.writing = asyncio.Lock()  # held from looking at a job to having written it, so that no older look is last

    def open(self) -> None:
        """Make what is missing; ValueError if this user cannot write there."""
        try:
            for name in ("fronts", "marks", "owners"):
                (self.root / name).mkdir(mode=0o700, parents=True, exist_ok=True)
            self.beat()
        except OSError as error:
            raise ValueError(f"got --jobs {self.root}, expected a folder to write in: {error.strerror}") from error

    def beat(self) -> None:
        """Tell the other fronts that this one lives."""
        self._beat.touch()

    def leave(self) -> None:
        """Tell the other fronts that this one has ended."""
        self._beat.unlink(missing_ok=True)

    def age_s(self, path: Path) -> float:
        """Return how long before the last beat of this front a file was written; OSError if it is not there."""
        return self._beat.stat().st_mtime - path.stat().st_mtime

    def lives(self, front: str) -> bool:
        """Return whether another front has touched its file lately."""
        try:
            return front == self.front or self.age_s(self.root / "fronts" / front) < LOST_S
        except FileNotFoundError:
            return False

    def of_key(self, key: str) -> Path:
        """Return the folder of a key."""
        return self.root / "owners" / sha256(key.encode()).hexdigest()[:32]

    def write(self, path: Path, content: bytes) -> None:
        """Write a file, whole or not at all."""
        path.parent.mkdir(mode=0o700, exist_ok=True)
        beside = path.with_name(f".{secrets.token_hex(8)}")
        try:
            beside.write_bytes(content)
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)

    def keep(self, key: str, record: JobRecord) -> None:
        """Write what is known of a job."""
        self.write(self.of_key(key) / f"{record.id}.json", msgspec.json.encode(record))

    def get(self, key: str, id_: str) -> JobRecord | None:
        """Return what is known of a job of a key; None if there is no such job, or it is to be deleted."""
        if not ID.fullmatch(id_) or (self.root / "marks" / f"{id_}.delete").exists():
            return None
        return self._read(self.of_key(key) / f"{id_}.json")

    def records(self, key: str) -> Iterator[JobRecord]:
        """Return what is known of all jobs of a key that are not to be deleted."""
        found = (self.get(key, path.stem) for path in self.of_key(key).glob("*.json"))
        return (record for record in found if record is not None)

    def forget(self, key: str, id_: str) -> None:
        """Drop what is known of a job, and what is asked of it."""
        (self.of_key(key) / f"{id_}.json").unlink(missing_ok=True)
        self.unmark(id_)

    def mark(self, id_: str, wish: Wish) -> None:
        """Ask the front that has a job to end it."""
        (self.root / "marks" / f"{id_}.{wish}").touch(mode=0o600)

    def unmark(self, id_: str) -> None:
        """Drop what is asked of a job."""
        for wish in get_args(Wish):
            (self.root / "marks" / f"{id_}.{wish}").unlink(missing_ok=True)

    def marks(self) -> set[tuple[str, Wish]]:
        """Return all jobs that are to be ended, and how."""
        matches = (MARK.fullmatch(path.name) for path in (self.root / "marks").iterdir())
        return {(match[1], cast("Wish", match[2])) for match in matches if match}

    def sweep(self, keep_s: float) -> None:
        """Drop files that are older than `keep_s`; what is known of a job only if it has ended, or its front has."""
        for path in [path for pattern in PLACES for path in self.root.glob(pattern) if OURS.fullmatch(path.name)]:
            try:
                if path.is_file() and self.age_s(path) > max(keep_s, LOST_S) and not self._runs(path):
                    path.unlink(missing_ok=True)
            except FileNotFoundError:  # another front was faster
                continue

    def _runs(self, path: Path) -> bool:
        record = self._read(path) if path.suffix == ".json" else None
        return record is not None and not record.ended and self.lives(record.front)

    def _read(self, path: Path) -> JobRecord | None:
        """Return what is known of a job. A file that holds something else is named in the log, and counts as none."""
        try:
            if path.stat().st_size > LONGEST:
                raise ValueError(f"got more than {LONGEST} bytes")
            return msgspec.json.decode(path.read_bytes(), type=JobRecord)
        except FileNotFoundError:
            return None
        except (ValueError, msgspec.MsgspecError) as error:
            log.event("a file of --jobs tells of no job", level=30, file=str(path), error=str(error))
            return None
