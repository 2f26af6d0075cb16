"""API keys: who may ask, and whose job is whose. They come from a file that only its owner can read."""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

OTHERS = 0o077  # the bits of a file's mode by which anyone but its owner gets at it


@dataclass(frozen=True)
class Keys:
    """Names and the SHA-256 of their keys: the keys themselves are not kept."""

    digests: tuple[tuple[str, bytes], ...]

    def name_of(self, key: str) -> str | None:
        """Return whose key it is, or None; the time that this takes does not depend on the key."""
        found, digest = None, sha256(key.encode()).digest()
        for name, known in self.digests:
            found = name if hmac.compare_digest(known, digest) else found
        return found


def read_keys(path: Path) -> Keys:
    """Read a file of lines `name:key`; ValueError if it is not such a file, or if others can read it."""
    try:
        mode, text = path.stat().st_mode, path.read_text()
    except OSError as error:
        raise ValueError(f"got --keys {path}, expected a file that can be read: {error.strerror}") from error
    if mode & OTHERS:
        raise ValueError(f"got --keys {path} with mode {mode & 0o777:o}, expected 600; run: chmod 600 {path}")
    pairs: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.startswith("#"):
            name, colon, key = (part.strip() for part in line.partition(":"))
            if not (name and colon and key) or name in pairs or key in pairs.values():
                # without the line itself, which may hold a key
                raise ValueError(f"got line {number} of --keys {path}, expected NAME:KEY, each name and key once")
            pairs[name] = key
    if not pairs:
        raise ValueError(f"got --keys {path} without a key, expected lines NAME:KEY; add one")
    return Keys(tuple((name, sha256(key.encode()).digest()) for name, key in pairs.items()))
