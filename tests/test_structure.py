"""Tests that the code keeps the limits of docs/structure.md: few calls to a kernel, and short functions."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.pool import Pool
from tests.support.structure import GLOSSARY, LIMITS, ROOMS, longest, registers, shared_names, unformatted, widest
from tests.support.walk import DRIVERS, KERNELS, recorded


def test_from_a_drivers_entry_to_a_kernel_are_few_calls(ranks: Pool, tmp_path: Path) -> None:
    if ranks.device != "cpu":
        pytest.skip("a GPU replays a graph, and calls nothing in it")
    ways = ranks.run(2, recorded, str(tmp_path / "picture.png"))[0]
    assert list(ways) == list(DRIVERS)
    for driver, way in ways.items():
        assert way[0] == DRIVERS[driver]
        assert way[-1].file.startswith(KERNELS)
        assert all(a != b for a, b in pairwise(way))
        assert len(way) - 1 <= LIMITS["calls"], " > ".join(step.function for step in way)


def test_functions_are_short_and_narrow_and_formatted() -> None:
    assert widest().parameters <= LIMITS["parameters"], widest()
    assert longest().lines <= LIMITS["lines of a function"], longest()
    assert unformatted() <= LIMITS["kept from the formatter"]


def test_no_two_classes_have_one_name() -> None:
    assert shared_names() == {}


@pytest.mark.parametrize("kind", ROOMS)
def test_what_is_new_touches_its_own_file_alone(kind: str) -> None:
    assert registers(ROOMS[kind]) == []


def test_the_glossary_is_in_order() -> None:
    terms = re.findall(r"^\| ([^|]+) \| [^|]+ \|$", GLOSSARY.read_text(encoding="utf-8"), re.MULTILINE)[2:]
    assert len(terms) >= 20
    assert terms == sorted(terms, key=str.lower)
