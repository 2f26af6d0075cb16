"""Benches that start a server, with a few requests. A file of its own, so that they run beside the other jobs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from launch.benches import latency, serve
from launch.benches.latency import Latency
from launch.benches.serve import Serve
from tests.support.forked_benches import fork

pytestmark = pytest.mark.bench
GROWN = 32  # MiB


@pytest.fixture(autouse=True)
def _forked(monkeypatch: pytest.MonkeyPatch) -> None:
    fork(monkeypatch)


@pytest.mark.timeout(600)
def test_a_server_loses_no_request_while_jobs_are_cancelled_and_ranks_killed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "lines.jsonl"
    serve.main(Serve(requests=16, clients=8, cancels=3, kills=1, stops=0, swaps=1, reloads=1, commands=1, out=out))
    (line,) = [json.loads(text) for text in out.read_text().splitlines()]
    assert line["restarts"] == 1
    before, *_, after = (used["memory"] for used in line["used"])
    assert after - before < GROWN  # a forked server has torch, so that the bench's share of its memory is more
    assert all(verdict["right"] for verdict in line["verdicts"])
    assert "FAILED" not in capsys.readouterr().out


@pytest.mark.hand
@pytest.mark.timeout(600)
def test_what_a_server_costs_is_measured_by_part(tmp_path: Path) -> None:
    out = tmp_path / "lines.jsonl"
    args = Latency(
        model="flux.1-dev", folder=tmp_path / "flux", steps=4, size="64x64", pictures=2, lora_rank=2, out=out
    )
    latency.main(replace(args, waiting=20, cancels=2, arrivals=4))
    parts = {line["part"]: line for line in map(json.loads, out.read_text().splitlines())}
    assert list(parts) == ["start", "alone", "busy", "full", "cancelled", "switched", "killed", "open"]
    assert 0 < parts["alone"]["front_s"] < parts["alone"]["seconds"]
    assert parts["full"]["waiting"] == 20
    switched = parts["switched"]
    assert ["lora" in each["parts_s"] for each in switched["other"]] == [True] * 4
    assert ["lora" in each["parts_s"] for each in switched["same"]] == [False] * 4
    assert 0 < parts["killed"]["noticed_s"] < parts["killed"]["ready_s"] < parts["killed"]["picture_s"]
    assert len(parts["open"]["every"]) == 4


@pytest.mark.hand
@pytest.mark.timeout(600)
def test_swapped_models_have_the_same_bits_and_leave_nothing(tmp_path: Path) -> None:
    out = tmp_path / "lines.jsonl"
    latency.main(Latency(steps=4, swap="builtin", swaps=20, parts=("swapped",), out=out))
    _, line = map(json.loads, out.read_text().splitlines())
    assert [len(every) for every in line["every_s"].values()] == [10, 10]
    before, after = ([look["front"], *look["ranks"]] for look in line["used"][1:])
    for old, new in zip(before, after, strict=True):
        assert new[0] - old[0] < GROWN
        assert (new[1] <= old[1] + 2, new[2] <= old[2] + 2) == (True, True)
