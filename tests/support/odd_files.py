"""Writes files of weights that are wrong, and tells what opening them does."""

from __future__ import annotations

import json
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

from hypothesis import HealthCheck, settings

from seqpar.loading.checkpoint import Checkpoint, open_checkpoint

Write = Callable[[Path], object]
ALTERED = settings(
    max_examples=300, database=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def opened_or_refused(path: Path) -> Checkpoint | None:
    """Return the checkpoint in a file, or None after one short ValueError that names the file."""
    try:
        return open_checkpoint(path)
    except ValueError as error:
        message = str(error)
    assert path.name in message
    assert len(message) < 700 + len(str(path))
    return None


def archive(pickled: bytes, **records: bytes) -> Write:
    """Write an archive of torch with this pickle and these storages."""

    def write(path: Path) -> None:
        with zipfile.ZipFile(path, "w") as file:
            file.writestr("archive/data.pkl", pickled)
            file.writestr("archive/version", b"3\n")
            for name, data in records.items():
                file.writestr(f"archive/data/{name}", data)

    return write


def write_safetensors(header: object, data: bytes) -> Write:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return lambda path: path.write_bytes(struct.pack("<Q", len(text)) + text + data)
