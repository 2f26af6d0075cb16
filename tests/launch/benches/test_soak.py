"""Tests of the soak: its parts run, and its verdicts see memory that grows, pictures that slow down and other bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from launch.benches import soak
from launch.benches.soak import Soak
from tests.support.pool import Pool

pytestmark = pytest.mark.bench
Line = dict[str, Any]
SETTINGS = Soak(pictures=2, sizes=2, calls=1, replays=4, steps=1)


def lines_of(rank: int, world: int, device: torch.device) -> list[Line]:
    return list(soak.measured(SETTINGS, device))


def verdicts(lines: list[Line]) -> list[bool]:
    return [right for _, right in soak.verdicts(lines)]


def test_all_parts_run_on_two_ranks(ranks: Pool) -> None:
    first, second = ranks.run(2, lines_of)
    parts = [line["part"] for line in first]
    assert {part: parts.count(part) for part in dict.fromkeys(parts)} == {
        "mixed": 2,
        "sizes": 2,
        "calls fused": 2,
        "calls generic": 2,
        "replays": 8,  # ulysses, kv_gather, kv_first and ring by both transports
    }
    bits = {line["digest"] for line in first if line["part"] == "replays"}
    assert [line["digest"] for line in first] == [line["digest"] for line in second]
    assert len(bits) == 2  # ring adds in another order
    assert all(verdicts(first))


def mixed(count: int = 40) -> list[Line]:
    """Lines of pictures of four kinds that come in turn, as they must be."""
    numbers = [*(index % 4 for index in range(count - 1)), 0]
    seen = [numbers[: index + 1].count(kind) for index, kind in enumerate(numbers)]
    return [
        {"part": "mixed", "picture": index, "kind": kind, "time": seen[index], "seconds": 1.0, "digest": f"{kind}"}
        | {"allocated": 10**9, "used": 0, "host": 2 * 10**9}
        for index, kind in enumerate(numbers)
    ]


def late(line: Line, **other: Any) -> Line:
    """Return a line that has other values in the second half of the pictures."""
    return line | other if line["picture"] >= 20 else line


@pytest.mark.parametrize(
    ("spoil", "wrong"),
    [
        (lambda line: line, 0),
        (lambda line: line | {"allocated": 10**9 + 10**7 * line["picture"]}, 1),
        (lambda line: late(line, host=3 * 10**9) if line["picture"] > 35 else line, 1),
        (lambda line: late(line, seconds=1.2), 1),
        (lambda line: line | {"digest": "other"} if line["picture"] == 39 else line, 1),
        (lambda line: line | {"digest": "other"} if line["picture"] == 20 else line, 1),
        (lambda line: line | {"part": "sizes", "allocated": 10**9 + 10**7 * line["picture"]}, 1),
        (lambda line: line | {"part": "calls fused", "digest": str(line["picture"])}, 1),
        (
            lambda line: (
                {"part": "replays", "strategy": "ulysses", "transport": "peer", "replays": 25, "graph": True}
                | {"seconds": 1.0, "digest": "0", "bits": 1 + (line["picture"] == 7)}
            ),
            1,
        ),
    ],
    ids=["right", "memory", "host", "slower", "last bits", "bits", "sizes", "calls", "replays"],
)
def test_the_verdicts_see_what_is_wrong(spoil: Callable[[Line], Line], wrong: int) -> None:
    assert verdicts([spoil(line) for line in mixed()]).count(False) == wrong
