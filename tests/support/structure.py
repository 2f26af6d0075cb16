"""Counts of how the code is built, written into docs/structure.md between two markers.

    python -m tests.support.structure            # print them
    python -m tests.support.structure --write    # write them into the page
    python -m tests.support.structure --calls    # print the calls of the recorded run, to correct the walkthrough

`ast` reads the counts from the source, except the calls between `run` and a kernel, which are recorded while a picture
is made. `tests/test_structure.py` compares the page with these counts, and the counts with `LIMITS`.
"""

from __future__ import annotations

import argparse
import ast
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tests.support.pool import Pool
from tests.support.walk import ROOT, Place, recorded

PAGE = ROOT / "docs" / "structure.md"
BEGIN, END = "<!-- counts: python -m tests.support.structure --write -->", "<!-- end of counts -->"
CODE = ("seqpar", "launch")
ROOMS = {
    "strategy": "attention",
    "transport": "transports",
    "local attention": "local",
    "kernel": "kernels",
    "model": "models",
}
# files that name members without being a list of them
NOT_LISTS = {}


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
    """Return the Python files below these folders of the repository."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def relative(path: Path) -> str:
    """Return the path relative to the repository, as the page writes it."""
    return path.relative_to(ROOT).as_posix()


def members(room: str) -> list[str]:
    """Return the members of a room: names of its files or folders that do not start with an underscore."""
    found = (path for path in (ROOT / "seqpar" / room).iterdir() if not path.name.startswith("_"))
    return sorted(path.stem for path in found if path.suffix == ".py" or (path / "__init__.py").is_file())


def named(path: Path, room: str, members: Iterable[str]) -> set[str]:
    """Return the members of a room that a file names in an import, or as a whole string."""
    package, found, known = f"seqpar.{room}", set[str](), set(members)
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ImportFrom) and node.module == package:
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{package}."):
            found.add((node.module or "").split(".")[2])
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[2] for alias in node.names if alias.name.startswith(f"{package}.")}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return found & known


def registers(room: str) -> list[str]:
    """Return the files outside a room that list its members, so that a new member must be added there.

    A file lists them if it names more than half. Code that names one or two of them (a model that calls a kernel, a
    strategy that is built on another one) does not grow with the room.
    """
    known, folder = members(room), ROOT / "seqpar" / room
    # members of a room may name each other if one is built on another
    candidates = (path for path in files(*CODE) if folder not in path.parents or path.name.startswith("_"))
    lists = (relative(path) for path in candidates if 2 * len(named(path, room, known)) > len(known))
    return [path for path in lists if path not in NOT_LISTS]


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


def unformatted() -> int:
    """Return the number of statements that are excluded from formatting."""
    mark = "# fmt:" + " skip"
    return sum(path.read_text(encoding="utf-8").count(mark) for path in files(*CODE, "tests", "examples"))


def deepest(stacks: Iterable[tuple[Place, ...]]) -> tuple[Place, ...]:
    """Return the longest chain of calls from `run` to a kernel of a step, not of the decoder.

    diffusers' own modules call the decoder's kernels, through rules that take the place of torch's functions.
    """
    steps = (stack for stack in stacks if not any(place.file.startswith("seqpar/vae/") for place in stack))
    return max(steps, key=lambda stack: (len(stack), stack))


def lines_a_folder() -> dict[str, int]:
    """Return the lines of Python in each folder of the code, rounded to tens."""
    counts: dict[str, int] = {}
    for path in files(*CODE, "tests"):
        parts = path.relative_to(ROOT).parts
        folder = "/".join(parts[:2] if parts[0] != "tests" and len(parts) > 2 else parts[:1])
        counts[folder] = counts.get(folder, 0) + len(path.read_text(encoding="utf-8").splitlines())
    return {folder: round(count, -1) for folder, count in counts.items()}


def record() -> tuple[list[tuple[Place, Place]], list[tuple[Place, ...]]]:
    """Return rank 0's calls and stacks while two ranks make a picture."""
    pool = Pool("cpu")
    try:
        with tempfile.TemporaryDirectory() as folder:
            return pool.run(2, recorded, f"{folder}/picture.png")[0]
    finally:
        pool.close()


def checked_counts(stacks: Iterable[tuple[Place, ...]]) -> str:
    """Return the part of the counts that the test compares with the page."""
    rows = [
        f"| files that a new {kind} touches, besides its test | {1 + len(lists)} |"
        + (f" also {', '.join(f'`{path}`' for path in lists)} |" if lists else " its own |")
        for kind, room in ROOMS.items()
        for lists in [registers(room)]
    ]
    way, long, wide = deepest(stacks), longest(), widest()
    rows += [
        f"| calls from `run` to a kernel of a step | {len(way) - 1} | {' > '.join(place.function for place in way)} |",
        f"| lines of the longest function outside `kernels/` | {long.lines} | `{long.place}` |",
        f"| parameters of the widest function outside `kernels/` | {wide.parameters} | `{wide.place}` |",
        f"| statements kept from the formatter | {unformatted()} | |",
    ]
    return "\n".join(("| what | count | where |", "| --- | --- | --- |", *rows))


def block(stacks: Iterable[tuple[Place, ...]]) -> str:
    """Return the text between the markers; no test compares lines a folder, because every edit changes them."""
    rows = [f"| `{folder}/` | {count} |" for folder, count in lines_a_folder().items()]
    lines = "\n".join(("| folder | lines |", "| --- | --- |", *rows))
    return f"{BEGIN}\n\n{checked_counts(stacks)}\n\n{lines}\n\n{END}"


def written(text: str, new: str) -> str:
    """Return the page with a new block between its markers; `ValueError` unless each marker occurs once."""
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"got a page without one pair of markers, expected {BEGIN!r} and {END!r}")
    return text[: text.index(BEGIN)] + new + text[text.index(END) + len(END) :]


def main() -> None:
    """Print the counts or write them into the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write them into {relative(PAGE)}")
    parser.add_argument("--calls", action="store_true", help="print what called what, in order of the first calls")
    arguments: Any = parser.parse_args()
    calls, stacks = record()
    if arguments.calls:
        print(*(f"{' '.join(caller)} -> {' '.join(called)}" for caller, called in calls), sep="\n")
        return
    made = block(stacks)
    if arguments.write:
        PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), made), encoding="utf-8")
    print(made)


if __name__ == "__main__":
    main()
