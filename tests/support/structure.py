"""The structure of the code, read with `ast`."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from tests.support.walk import ROOT

CODE = ("seqpar", "launch")
CALLS = 10  # from the entry of a driver to a kernel
ROOMS = {
    "strategy": "attention",
    "transport": "transports",
    "local attention": "local",
    "kernel": "kernels",
    "model": "loop/models",
    "family": "families",
}


@cache
def parsed(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


def files(*folders: str) -> list[Path]:
    """Return the Python files below these folders, or these files, of the repository."""
    paths = [ROOT / folder for folder in folders]
    return sorted(file for path in paths for file in ([path] if path.is_file() else path.rglob("*.py")))


def relative(path: Path) -> str:
    """Return the path relative to the repository, as the page writes it."""
    return path.relative_to(ROOT).as_posix()


def members(room: str) -> list[str]:
    """Return the members of a room: names of its files or folders that do not start with an underscore."""
    paths = (path for path in (ROOT / "seqpar" / room).iterdir() if not path.name.startswith("_"))
    return sorted(path.stem for path in paths if path.suffix == ".py" or (path / "__init__.py").is_file())


def named(path: Path, room: str, members: Iterable[str]) -> set[str]:
    """Return the members of a room that a file names in an import, or as a whole string."""
    package, names = f"seqpar.{room}", set[str]()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ImportFrom) and node.module == package:
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{package}."):
            names.add((node.module or "").split(".")[2])
        elif isinstance(node, ast.Import):
            names |= {alias.name.split(".")[2] for alias in node.names if alias.name.startswith(f"{package}.")}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)
    return names & set(members)


def registers(room: str) -> list[str]:
    """Return the files outside a room that list its members, so that a new member must be added there.

    A file lists them if it names more than half. Code that names one or two of them (a model that calls a kernel, a
    strategy that is built on another one) does not grow with the room.
    """
    known, folder = members(room), ROOT / "seqpar" / room
    # members of a room may name each other if one is built on another
    candidates = (path for path in files(*CODE) if folder not in path.parents or path.name.startswith("_"))
    lists = (relative(path) for path in candidates if 2 * len(named(path, room, known)) > len(known))
    return list(lists)


def shared_names() -> dict[str, list[str]]:
    """Return the names of public classes in seqpar/ that are defined more than once, with their files.

    Members of a folder that the code reads share the names of their protocol: `Config`, `Model`, `Transport` ...
    """
    places: dict[str, list[str]] = {}
    for path in files("seqpar"):
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(relative(path))
    rooms = tuple(f"seqpar/{room}/" for room in (*ROOMS.values(), "pipelines"))
    return {
        name: where
        for name, where in places.items()
        if len(where) > 1 and len({place for place in where if not place.startswith(rooms)}) > 0
    }
