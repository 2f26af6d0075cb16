"""New members of the folders of `seqpar`, a file each, as a contributor would write them; `tests/test_one_file.py` adds
them to a copy of the package."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FOLDER = Path(__file__).parent
DELAYED = "delayed"  # a transport that delays ranks and poisons memory


def members() -> dict[str, tuple[str, ...]]:
    """Return room -> the names of its new members."""
    rooms = sorted(path for path in FOLDER.iterdir() if path.is_dir() and not path.name.startswith("_"))
    return {room.name: tuple(sorted(path.stem for path in room.glob("*.py"))) for room in rooms}


@contextmanager
def added(room: str) -> Iterator[None]:
    """Let this process find the new members of one room, for a test that needs one of them beside the others."""
    package, path = importlib.import_module(f"seqpar.{room}"), str(FOLDER / room)
    package.__path__.append(path)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        package.__path__.remove(path)
