"""The bench writes lines from which its tables can be made, and the committed lines make the committed tables."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from launch import table
from launch.bench import Args, layouts

ROOT = Path(__file__).parent.parent


def test_bench_writes_one_line_a_row(tmp_path: Path) -> None:
    out = tmp_path / "lines.jsonl"
    flags = ["--model", "dit-s/8", "--tokens", "16", "--steps", "1", "--rounds", "2", "--out", str(out)]
    done = subprocess.run([sys.executable, str(ROOT / "launch/bench.py"), *flags], capture_output=True, text=True,
                          timeout=120, check=False, env={"CUDA_VISIBLE_DEVICES": "", "PATH": ""})  # fmt: skip
    assert done.returncode == 0, done.stderr
    (line,) = [json.loads(text) for text in out.read_text().splitlines()]
    assert line["case"]["tokens"] == 16
    assert line["gpus"] == 1
    assert line["ms"]["min"] <= line["ms"]["median"] <= line["ms"]["max"]
    assert "16 tokens  1 x  ulysses" in done.stdout


@pytest.mark.parametrize(("world", "count"), [(1, 1), (2, 4), (3, 3), (4, 7)])
def test_layouts_use_all_ranks_once(world: int, count: int) -> None:
    found = layouts(Args(), world)
    assert len(set(found)) == len(found) == count
    assert all(x.cfg * x.ring * x.ulysses == world for x in found)


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "benchmarks").glob("*.jsonl")), ids=lambda path: path.stem)
def test_committed_tables_are_made_of_committed_lines(page: Path) -> None:
    lines = [json.loads(text) for text in page.read_text().splitlines()]
    steps = [line for line in lines if line["bench"] == "steps"]
    text = page.with_suffix(".md").read_text()
    assert table.best(steps) in text
    assert table.every(steps) in text
