"""The file of API keys and what each may use; it is read again when it changes, without a restart.

ada: 5c9f01   weight=2 rate=60 places=16 priority=normal
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from seqpar.serve.api import log

Priority = Literal["high", "normal", "low"]
PRIORITIES: Mapping[Priority, int] = {"high": 0, "normal": 1, "low": 2}
OTHERS = 0o077  # mode bits that let anyone but the owner access a file
POLL_S = 1.0  # between looks at the file
FORM = "NAME:KEY [weight=0.001...1000] [rate=JOBS_PER_MINUTE] [places=N] [priority=high|normal|low] [admin=true]"


class KeyTerms(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a key may use, as the words after it. weight: its share of the ranks. rate: jobs per minute. places: most
    jobs that wait; None for as many as are free. priority: the highest of its requests. admin: whether it may load and
    unload models.
    """

    weight: Annotated[float, Meta(ge=0.001, le=1000)] = 1.0
    rate: Annotated[int, Meta(ge=1, le=10**6)] | None = None
    places: Annotated[int, Meta(ge=1)] | None = None
    priority: Priority = "high"
    admin: bool = False


@dataclass(frozen=True)
class ApiKeys:
    """The SHA-256 of each key with its name, and the terms of each name: the keys themselves are not kept."""

    digests: tuple[tuple[str, bytes], ...]
    terms: Mapping[str, KeyTerms]

    def name_of(self, key: str) -> str | None:
        """The name of a key, or None; the time that this takes does not depend on the key."""
        name, digest = None, sha256(key.encode()).digest()
        for other, stored in self.digests:
            name = other if hmac.compare_digest(stored, digest) else name
        return name


def read_keys(path: Path) -> ApiKeys:
    """Read a file of keys; ValueError for other content, or if others can read the file."""
    try:
        mode, text = path.stat().st_mode, path.read_text()
    except OSError as error:
        raise ValueError(f"--keys {path} cannot be read: {error.strerror}") from error
    if mode & OTHERS:
        raise ValueError(f"--keys {path} has mode {mode & 0o777:o}, expected 600; run: chmod 600 {path}")
    keys, terms = dict[str, str](), dict[str, KeyTerms]()
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.startswith("#"):
            name, _, rest = (part.strip() for part in line.partition(":"))
            key, *words = rest.split() or [""]
            options = {option: value for option, _, value in (word.partition("=") for word in words)}
            try:
                if not (name and key) or key in keys or name in terms or len(options) < len(words):
                    raise ValueError
                terms[name] = msgspec.convert(options, KeyTerms, strict=False)
            except ValueError:  # without the line or the error's text, which may hold a key
                text = f"line {number} of --keys {path} is not {FORM}"
                raise ValueError(f"{text}, with a new name and a new key without spaces") from None
            keys[key] = name
    if not keys:
        raise ValueError(f"--keys {path} has no key; add lines NAME:KEY")
    return ApiKeys(tuple((name, sha256(key.encode()).digest()) for key, name in keys.items()), terms)


class KeyFile:
    """A file of keys. keys: the last valid content. ValueError if the file is not valid at first."""

    def __init__(self, path: Path) -> None:
        self._path, self._seen = path, _stamp(path)
        self.keys = read_keys(path)

    def reload(self) -> None:
        """Read the file again; one that is not valid changes nothing, and the log has the reason."""
        self._seen = _stamp(self._path)
        try:
            self.keys = read_keys(self._path)
        except ValueError as error:
            log.event("keys not reloaded, the former ones stay valid", level=40, reason=str(error))
        else:
            log.event("keys reloaded", keys=len(self.keys.digests))

    async def watch(self) -> None:
        """Reload the file whenever it has changed and then stayed as it is for a moment."""
        changing = False
        while True:
            await asyncio.sleep(POLL_S)
            stamp = await asyncio.to_thread(_stamp, self._path)
            if changing and stamp == self._seen:
                self.reload()
            changing, self._seen = stamp != self._seen, stamp


def _stamp(path: Path) -> tuple[int, ...] | None:
    """What changes with a file, None while it is missing."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size
