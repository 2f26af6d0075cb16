"""Reads JSON files of which nothing is known: regular files alone, bounded before they are read.

A config can be a pipe that never ends, a device, a link to itself, gigabytes of brackets, or text that no terminal can
print; each of these is one message here.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

CONFIG_BYTES = 1 << 22  # that of a published model has some kilobytes, with the labels of its classes a megabyte
INDEX_BYTES = 1 << 24  # of an index of 100,000 tensors
DEPTH = 32  # of objects and lists in each other

# the name of a file in the same folder, which is no index itself
Beside = Annotated[str, Meta(pattern=r"^(?!\.{0,2}$)[^/\\\x00]{1,255}(?<!\.json)$")]


class Index(msgspec.Struct, frozen=True):
    """The index of a sharded checkpoint. weight_map: key -> name of the file beside the index that has the tensor."""

    weight_map: Annotated[dict[str, Beside], Meta(min_length=1)]


def read_json(path: Path, most: int = CONFIG_BYTES) -> dict[str, Any]:
    """Return the JSON object in a file of at most `most` bytes.

    Raises ValueError if the file is missing, no regular file or too long, or if it holds no JSON object, or one with
    text that is no Unicode or with more than `DEPTH` levels.
    """
    try:
        value = json.loads(read_bytes(path, most))
        _check_text(value)
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"got {path}, expected a readable JSON file: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"got {path} holding a {type(value).__name__}, expected a JSON object")
    return value


def read_index(path: Path) -> dict[str, str]:
    """Return key -> file name of a sharded checkpoint's index; `ValueError` if it is none, or names other folders."""
    try:
        return msgspec.json.decode(read_bytes(path, INDEX_BYTES), type=Index).weight_map
    except (OSError, ValueError, RecursionError) as error:  # those of msgspec are ValueErrors
        expected = "a weight_map of keys to names of weight files beside it"
        raise ValueError(f"got index {path}, expected {expected}: {error}") from error


def read_bytes(path: Path, most: int) -> bytes:
    """Return what is in a regular file of at most `most` bytes; `ValueError` for another one, without reading it."""
    check_regular(path, most)
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # does not wait if it has become a pipe
    with open(file, "rb") as opened:
        found = opened.read(most + 1)
    if len(found) > most:
        raise ValueError(f"it has more than {most} bytes")
    return found


def check_regular(path: Path, most: int | None = None) -> None:
    """Raise ValueError if a path, or what it links to, is missing or no regular file, or has more than `most` bytes."""
    try:
        found = path.stat()
    except OSError as error:  # also for links in a circle
        raise ValueError(f"there is no such file ({error.strerror})") from error
    if not stat.S_ISREG(found.st_mode):
        raise ValueError("it is no regular file")
    if most is not None and found.st_size > most:
        raise ValueError(f"it has {found.st_size} bytes, more than {most}")


def _check_text(value: object, depth: int = 0) -> None:
    """Raise ValueError if a text in a value has halves of surrogate pairs, or if values are nested too deeply."""
    if depth > DEPTH:
        raise ValueError(f"it has more than {DEPTH} levels")
    if isinstance(value, str):
        value.encode()  # UnicodeEncodeError is a ValueError
    elif isinstance(value, dict):
        for key, each in value.items():
            _check_text(key)
            _check_text(each, depth + 1)
    elif isinstance(value, list):
        for each in value:
            _check_text(each, depth + 1)
