"""The Python files of the repository, and what they say."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def files(*folders: str) -> list[Path]:
    """Return the Python files below these folders, or these files, of the repository."""
    paths = [ROOT / folder for folder in folders]
    return sorted(file for path in paths for file in ([path] if path.is_file() else path.rglob("*.py")))


def relative(path: Path) -> str:
    """Return the path relative to the repository."""
    return path.relative_to(ROOT).as_posix()
