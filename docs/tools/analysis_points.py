"""The models of docs/analysis.md, what was measured of them (lines of docs/benchmarks), and what is planned."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from seqpar.cli.args import Args
from seqpar.cli.job import check
from seqpar.mesh.mesh import Mesh
from seqpar.planner.predict import Load
from seqpar.planner.rates import H200
from seqpar.planner.search import Preferences, search
from seqpar.types.facts import Work

ROOT = Path(__file__).parents[2]
# the model's flags, and the files with its lines: a step of one picture, with guidance where the model has two branches
MODELS = {
    "large-dit-7b": {"classes": ("1",), "size": "1024"},
    "dit-xl/2": {"classes": ("1",), "size": "1024"},
    "flux.1-dev": {"model": "random:FLUX.1-dev", "prompt": ("a lighthouse",)},
}
SHARES = ("2026-11-20-h200-sustained", "2026-11-21-2xh200", "2026-11-22-h200-flux")
TIMES = ("2026-11-20-h200-engine", "2026-11-21-2xh200", "2026-11-21-4xh200", "2026-11-22-h200-flux")
TIMED = (("large-dit-7b", 256), ("large-dit-7b", 4096), ("dit-xl/2", 4096), ("flux.1-dev", 4096))


@dataclass(frozen=True)
class Point:
    """A measurement: attention's share of the time of a step, or ms per step; and the file whose line it is."""

    model: str
    tokens: int
    gpus: int
    value: float
    file: str


@cache
def run_of(model: str) -> tuple[Work, Load]:
    """Return the work of a model and the load of one picture, as `seqpar plan` has them."""
    settings: Any = {"model": model, **MODELS[model]}
    job = check(Args(dry_run=(1,), **settings), Mesh.single())
    return job.work, job.load


def _lines(names: tuple[str, ...]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name in names:
        for text in (ROOT / "docs" / "benchmarks" / f"{name}.jsonl").read_text().splitlines():
            yield f"{name}.jsonl", json.loads(text)


def _is_ours(line: dict[str, Any]) -> bool:
    case = line.get("case")
    if not isinstance(case, dict) or case.get("model") not in MODELS or case.get("images", 1) != 1:
        return False
    ways = ("generic", "adapter", "both branches", "call with modulation", "ceiling", "two kernels")
    return case.get("kind", "ours") == "ours" and not any(word in case.get("way", "") for word in ways)


def measured_shares() -> tuple[Point, ...]:
    """Return attention's share of the kernels' time on one GPU, or on one GPU a branch of guidance."""
    found = []
    for file, line in _lines(SHARES):
        split = line.get("split_ms")
        case = line.get("case", {})
        alone = line.get("gpus") == 1 or case.get("layout") == "ulysses cfg2 ring1 ulysses1"
        if isinstance(split, dict) and _is_ours(line) and alone:
            share = split["attention"] / sum(split.values())
            found.append(Point(case["model"], case["tokens"], line["gpus"], share, file))
    return tuple(found)


def measured_times() -> tuple[Point, ...]:
    least: dict[tuple[str, int, int], Point] = {}
    for file, line in _lines(TIMES):
        if line.get("bench") not in ("steps", "scale", "calls") or not line.get("ms") or not _is_ours(line):
            continue
        case = line["case"]
        point = Point(case["model"], case["tokens"], line["gpus"], line["ms"]["median"], file)
        key = point.model, point.tokens, point.gpus
        if key[:2] in TIMED and (key not in least or point.value < least[key].value):
            least[key] = point
    return tuple(least[key] for key in sorted(least))


def planned_ms(point: Point) -> float:
    """Return the ms of a step that are predicted for the best layout on as many GPUs as were measured."""
    work, load = run_of(point.model)
    load = replace(load, tokens=point.tokens)
    return search(work, load, point.gpus, Preferences(), H200, "peer", None).ranked[0].ms
