"""Tests of the start bench: it makes the real picture, and the parts of its timeline add up to the whole time."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from launch.benches import start, table
from launch.benches.first_picture import Marks
from launch.benches.start import Start
from seqpar.mesh import Mesh
from seqpar.pipelines.class_labels import Files, Pipeline
from seqpar.sampling.guidance import Guidance
from seqpar.sampling.loop import digest

TINY = Start("dit-s/8", steps=3, rounds=1)
PARTS = [
    "python",
    "import torch",
    "import diffusers",
    "import seqpar",
    "device",
    "weights",
    "modulation",
    "first step",
    "steps",
    "picture",
]


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the JSON line of one run on the CPU, and as `waited` the seconds that the calling process waited."""
    out, began = tmp_path_factory.mktemp("start") / "lines.jsonl", time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.setenv("OMP_NUM_THREADS", "1")  # the order of sums on CPUs depends on the number of threads
        start.main(replace(TINY, out=out))
    waited = time.monotonic() - began
    return json.loads(out.read_text()) | {"waited": waited}


def test_the_parts_are_a_picture_and_its_floor(line: dict[str, Any]) -> None:
    assert line["bench"] == "start"
    assert line["case"] == {
        "model": "dit-s/8",
        "tokens": 16,
        "steps": 3,
        "parameters": 33142016,
        "dtype": "float32",
        "local": "sdpa",
    }
    assert list(line["seconds"]) == PARTS
    assert list(line["floor_seconds"]) == [part for part in PARTS if part in line["floor_seconds"]]
    assert set(PARTS) - set(line["floor_seconds"]) == {"import seqpar", "modulation", "steps", "picture"}
    assert all(seconds >= 0 for seconds in (*line["seconds"].values(), *line["floor_seconds"].values()))


def test_the_parts_are_all_of_the_time(line: dict[str, Any]) -> None:
    assert line["total"]["median"] == pytest.approx(sum(line["seconds"].values()))
    assert line["total"]["median"] + line["floor_total"]["median"] < line["waited"]
    # the rest is the exit of two processes and the work of this one
    assert line["total"]["median"] > 0.2 * line["waited"]


def test_what_is_timed_is_the_picture_that_sampling_makes(line: dict[str, Any]) -> None:
    pipeline, threads = Pipeline.load(Files.locate("dit-s/8"), Mesh.single()), torch.get_num_threads()
    torch.set_num_threads(1)
    same, other = (digest(pipeline.latents([label], steps=3, guidance=Guidance(4.0))) for label in (0, 1))
    torch.set_num_threads(threads)
    assert same == line["digest"]
    assert other != line["digest"]


def test_caches_of_the_timed_process_are_new_and_its_failure_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"got exit code 1 from the timed process(?s:.*)got model 'dit-xs'"):
        start.child({"model": "dit-xs", "steps": 3, "out": "x.png"}, tmp_path / "caches")
    assert sorted(path.name for path in (tmp_path / "caches").iterdir()) == sorted(x.lower() for x in start.CACHES)


def test_marks_end_where_the_next_begin() -> None:
    began = time.monotonic()
    mark = Marks(began)
    time.sleep(0.02)
    mark("one")
    time.sleep(0.01)
    mark("two")
    assert mark.seconds["one"] >= 0.02
    assert 0.01 <= mark.seconds["two"] <= time.monotonic() - began - mark.seconds["one"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (replace(TINY, steps=1), "got --steps 1 --rounds 1, expected at least 2 and 1"),
        (replace(TINY, rounds=0), "got --steps 3 --rounds 0"),
        (replace(TINY, model="dit-xs"), "got model 'dit-xs'"),
    ],
    ids=["steps", "rounds", "model"],
)
def test_what_cannot_be_timed_is_refused(args: Start, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        start.main(args)


def test_more_processes_than_one_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="got 2 processes, expected one"):
        start.main(TINY)


def test_the_table_says_what_is_ours() -> None:
    made = {"bench": "start", "case": {"model": "m", "tokens": 16}, "seconds": {"python": 1.0, "steps": 2.0}}
    made |= {"floor_seconds": {"python": 0.75}, "total": {"median": 3.0, "min": 2.5, "max": 4.0}}
    (text,) = table.tables([made | {"floor_total": {"median": 0.75, "min": 0.5, "max": 1.0}}])
    assert text.splitlines()[2:] == [
        "| m, 16 tokens | python | 1.00 | 0.75 | 0.25 |",
        "| m, 16 tokens | steps | 2.00 |  | 2.00 |",
        "| m, 16 tokens | total (2.5 - 4.0) | 3.00 | 0.75 | 2.25 |",
    ]
