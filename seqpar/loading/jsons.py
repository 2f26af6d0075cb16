"""Reads JSON files, which are bounded before they are read: a config of a stranger can have any length."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

CONFIG_BYTES = 1 << 22  # that of a published model has some kilobytes, with the labels of its classes a megabyte
INDEX_BYTES = 1 << 24  # of an index of 100,000 tensors

# the name of a file in the same folder, which is no index itself
Beside = Annotated[str, Meta(pattern=r"^(?!\.{0,2}$)[^/\\\x00]{1,255}(?<!\.json)$")]
WeightMap = Annotated[dict[str, Beside], Meta(min_length=1)]


def read_json(path: Path, most: int = CONFIG_BYTES) -> dict[str, Any]:
    """Return the JSON object in a file of at most `most` bytes.

    Raises ValueError if the file is missing, no regular file or too long, or if it holds no JSON object.
    """
    try:
        if not path.is_file():
            raise ValueError("there is no such file" if not path.exists() else "it is no regular file")
        with open(path, "rb") as file:
            data = file.read(most + 1)
        if len(data) > most:
            raise ValueError(f"it has more than {most} bytes")
        value = json.loads(data)
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"got {path}, expected a readable JSON file: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"got {path} holding a {type(value).__name__}, expected a JSON object")
    return value


def read_index(path: Path) -> dict[str, str]:
    """Return key -> file name of a sharded checkpoint's index; `ValueError` if it is none, or names other folders."""
    try:
        return msgspec.convert(read_json(path, INDEX_BYTES).get("weight_map"), WeightMap)
    except msgspec.ValidationError as error:
        expected = "a weight_map of keys to names of weight files beside it"
        raise ValueError(f"got index {path}, expected {expected}: {error}") from error
