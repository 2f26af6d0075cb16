"""Tests the comparison of two versions' calls: their ranks take turns, and results with other bits are told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch.benches import compare
from launch.benches.record import ROOT


def test_versions_take_turns(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "lines.jsonl"
    compare.main(compare.Compare((ROOT,), ("small",), gpus=2, rounds=1, calls=1, out=out))
    (line,) = map(json.loads, out.read_text().splitlines())
    assert line["ranks"] == 2
    assert len(line["digests"]) == 1
    assert all(ms > 0 for times in line["ms"].values() for ms in times)
    assert "same bits" in capfd.readouterr().out
