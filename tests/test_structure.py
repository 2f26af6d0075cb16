"""Tests that docs/structure.md matches the code: its walkthrough, its counts and its list of files."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.pool import Pool
from tests.support.structure import (
    BEGIN,
    CODE,
    END,
    PAGE,
    ROOMS,
    checked_counts,
    deepest,
    files,
    longest,
    registers,
    relative,
    unformatted,
    widest,
    written,
)
from tests.support.walk import KERNELS, ROOT, START, Place, recorded

LIMITS = {"hops": 9, "parameters": 9, "kept from the formatter": 0, "lines of a function": 30}
Calls = list[tuple[Place, Place]]
Stacks = list[tuple[Place, ...]]


@pytest.fixture(scope="module")
def record(ranks: Pool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Calls, Stacks]:
    """Return the calls and stacks of rank 0 while two ranks make a picture."""
    if ranks.device != "cpu":
        pytest.skip("the page describes a run on CPUs: a GPU replays a graph, and calls nothing in it")
    return ranks.run(2, recorded, str(tmp_path_factory.mktemp("walk") / "picture.png"))[0]


def walk() -> list[tuple[int, Place]]:
    """Return the indentation depth and the function of each line of the walkthrough."""
    text = PAGE.read_text(encoding="utf-8")
    lines = text[text.index("<!-- walk -->") : text.index("<!-- end of walk -->")].splitlines()[1:]
    found = [re.fullmatch(r"( *)- `([^`]+)` `([^`]+)`: .+\.", line) for line in lines]
    assert all(found), "every line is: - `file` `function`: a sentence."
    return [(len(match[1]) // 2, Place(match[2], match[3])) for match in found if match]


def untrue(steps: list[tuple[int, Place]], calls: Calls) -> list[str]:
    """Return the statements of the walkthrough that the run contradicts: missing calls, and calls in another order."""
    first = {call: index for index, call in enumerate(calls)}
    wrong, above, before = [], list[Place](), dict[Place, int]()
    for depth, place in steps:
        if depth > len(above):
            wrong.append(f"{place}: indented below nothing")
            continue
        del above[depth:]
        if above:
            at = first.get((above[-1], place), -1)
            if at < 0:
                wrong.append(f"{above[-1]} does not call {place}")
            elif at < before.get(above[-1], -1):
                wrong.append(f"{above[-1]} calls {place} earlier")
            before[above[-1]] = at
        above.append(place)
    return wrong


def test_the_walkthrough_is_what_calls_what(record: tuple[Calls, Stacks]) -> None:
    steps = walk()
    assert steps[0] == (0, START)
    assert [depth for depth, _ in steps].count(0) == 1
    assert len(steps) > 20
    assert untrue(steps, record[0]) == []


def test_negative_control_a_walkthrough_that_is_untrue_is_noticed() -> None:
    a, b, c, d = (Place("a.py", name) for name in "abcd")
    calls = [(a, b), (b, c), (a, d)]
    assert untrue([(0, a), (1, b), (2, c), (1, d)], calls) == []
    assert untrue([(0, a), (1, b), (1, c)], calls) == [f"{a} does not call {c}"]
    assert untrue([(0, a), (1, d), (1, b)], calls) == [f"{a} calls {b} earlier"]
    assert untrue([(0, a), (2, c)], calls) == [f"{c}: indented below nothing"]


def test_the_counts_on_the_page_are_those_of_the_code(record: tuple[Calls, Stacks]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert checked_counts(record[1]) in text[text.index(BEGIN) : text.index(END)], "run the command beside the counts"


def test_from_run_to_a_kernel_are_few_calls(record: tuple[Calls, Stacks]) -> None:
    way = deepest(record[1])
    assert way[0] == START
    assert way[-1].file.startswith(KERNELS)
    assert all(pair in record[0] for pair in pairwise(way))
    assert len(way) - 1 <= LIMITS["hops"]


def test_functions_are_short_and_narrow_and_formatted() -> None:
    assert widest().parameters <= LIMITS["parameters"], widest()
    assert longest().lines <= LIMITS["lines of a function"], longest()
    assert unformatted() <= LIMITS["kept from the formatter"]


@pytest.mark.parametrize("kind", ROOMS)
def test_what_is_new_touches_its_own_file_alone(kind: str) -> None:
    assert registers(ROOMS[kind]) == []


def listed() -> list[str]:
    """Return the files that the page lists."""
    text = PAGE.read_text(encoding="utf-8")
    section = text[text.index("\n## Files\n") : text.index("\n## Glossary\n")]
    return re.findall(r"^    (\S+)  +\S.*$", section, re.MULTILINE)


def test_every_file_is_listed_once_and_exists() -> None:
    code = [relative(path) for path in files(*CODE) if path.name != "__init__.py"]
    assert sorted(listed()) == code


def test_the_glossary_is_short_and_in_order() -> None:
    text = PAGE.read_text(encoding="utf-8")
    terms = re.findall(r"^\| ([^|]+) \| [^|]+ \|$", text[text.index("\n## Glossary\n") :], re.MULTILINE)[2:]
    assert 20 <= len(terms) <= 30
    assert terms == sorted(terms, key=str.lower)


def test_a_page_without_markers_is_refused() -> None:
    assert written(f"a {BEGIN} b {END} c", "new") == "a new c"
    with pytest.raises(ValueError, match="without one pair of markers"):
        written("a", "new")


@pytest.mark.parametrize("page", [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")], ids=lambda page: page.name)
def test_pages_name_files_that_exist(page: Path) -> None:
    named = re.findall(r"`((?:seqpar|launch|tests|docs|examples)/[\w./-]+)`", page.read_text(encoding="utf-8"))
    assert [path for path in named if not (ROOT / path).exists() and "NAME" not in path] == []
