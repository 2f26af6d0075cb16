"""Tests of how the code is built: few calls to a kernel, names with one meaning, and new members in one file."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.pool import Pool
from tests.support.structure import CALLS, ROOMS, registers, shared_names
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
        assert len(way) - 1 <= CALLS, " > ".join(step.function for step in way)


def test_no_two_classes_have_one_name() -> None:
    assert shared_names() == {}


@pytest.mark.parametrize("kind", ROOMS)
def test_what_is_new_touches_its_own_file_alone(kind: str) -> None:
    assert registers(ROOMS[kind]) == []
