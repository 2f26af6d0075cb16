"""How the code is built, read by `ast`: `tests/test_structure.py` compares it with `LIMITS`."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.support.walk import ROOT

GLOSSARY = ROOT / "docs" / "glossary.md"
CODE = ("seqpar", "launch")
LIMITS = {"calls": 10, "parameters": 9, "lines of a function": 60, "kept from the formatter": 0}
ROOMS = {
    "strategy": "attention",
    "transport": "transports",
    "local attention": "local",
    "kernel": "kernels",
    "model": "loop/models",
    "family": "pipelines",
}


@dataclass(frozen=True)
class Function:
    """A function of the code: its place, its number of lines, and its number of parameters without self."""

    place: str
    lines: int
    parameters: int
    kernel: bool


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


def functions() -> Iterator[Function]:
    """Yield all functions and methods below seqpar/ and launch/."""
    for path in files(*CODE):
        yield from _functions(parsed(path), relative(path), "")


def _functions(node: ast.AST, file: str, prefix: str) -> Iterator[Function]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield _function(child, f"{file} {prefix}{child.name}", "/kernels/" in file)
        name = f"{prefix}{child.name}." if isinstance(child, ast.ClassDef) else prefix
        yield from _functions(child, file, name)


def _function(node: ast.FunctionDef | ast.AsyncFunctionDef, place: str, kernel: bool) -> Function:
    parameters = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    count = sum(parameter.arg not in ("self", "cls") for parameter in parameters)
    jitted = any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
    return Function(place, (node.end_lineno or 0) - node.lineno + 1, count, kernel and jitted)


def longest() -> Function:
    """The function with the most lines outside seqpar/kernels/: kernels and their launches have an argument a line."""
    return max((f for f in functions() if "/kernels/" not in f.place), key=lambda f: (f.lines, f.place))


def widest() -> Function:
    """Return the function with the most parameters outside seqpar/kernels/."""
    return max((f for f in functions() if "/kernels/" not in f.place), key=lambda f: (f.parameters, f.place))


def shared_names() -> dict[str, list[str]]:
    """Return the names of public classes in seqpar/ that are defined more than once, with their files.

    Members of a folder that the code reads share the names of their protocol: `Config`, `Model`, `Transport` ...
    """
    places: dict[str, list[str]] = {}
    for path in files("seqpar"):
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(relative(path))
    rooms = tuple(f"seqpar/{room}/" for room in ROOMS.values())
    return {
        name: where
        for name, where in places.items()
        if len(where) > 1 and len({place for place in where if not place.startswith(rooms)}) > 0
    }


def unformatted() -> int:
    """Return the number of statements that are excluded from formatting."""
    mark = "# fmt:" + " skip"
    return sum(path.read_text(encoding="utf-8").count(mark) for path in files(*CODE, "tests", "examples"))
