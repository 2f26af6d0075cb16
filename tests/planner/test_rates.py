"""Tests of rates: between measured points, beyond them, and saved in the user's cache."""

from __future__ import annotations

import io
import json
import os
import sys
from contextlib import redirect_stdout
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from launch import bench
from seqpar.cli import sample
from seqpar.planner import rates
from seqpar.planner.predict import attention_us, gemm_us
from seqpar.planner.rates import CPU, H200, rate_at, time_at
from seqpar.types.facts import core
from tests.support.pool import Pool

POINTS = ((10.0, 100.0), (1000.0, 400.0))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SEQPAR_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize(("x", "rate"), [(10, 100), (1000, 400), (100, 200), (5, 50), (1, 10), (4000, 400)])
def test_rates_between_and_beyond_points(x: float, rate: float) -> None:
    """Rates are linear in the logarithms; below the first point its time holds, above the last point its rate."""
    assert rate_at(POINTS, x) == pytest.approx(rate)


@pytest.mark.parametrize(("x", "time"), [(10, 100), (1000, 400), (505, 250), (1, 100), (1990, 700)])
def test_times_between_and_beyond_points(x: float, time: float) -> None:
    assert time_at(POINTS, x) == pytest.approx(time)
    assert time_at(((10.0, 100.0),), 20) == 200


def test_a_product_waits_for_its_outputs_its_matrix_or_its_launch() -> None:
    assert gemm_us(H200, 8192, 4096, 4096, 2) == pytest.approx(2e-6 * 8192 * 4096**2 / 663, rel=0.01)
    assert gemm_us(H200, 128, 4096, 22016, 2) == pytest.approx(53, rel=0.02)  # reading the weights at 3.4 TB/s
    assert gemm_us(H200, 1, 64, 64, 2) == H200.kernel_us


def test_attention_takes_the_nearest_head_dim() -> None:
    call = core(2, 4096, 4096, 24, 64)
    assert attention_us(H200, 64, call) == pytest.approx(1e-6 * call.flops / 547, rel=1e-3)
    assert attention_us(H200, 8, call) == attention_us(H200, 64, call)
    assert attention_us(H200, 80, call) == attention_us(H200, 72, call) != attention_us(H200, 128, call)


def test_what_was_measured_comes_back_and_stands_for_its_own_machine_alone(cache: Path) -> None:
    mine = replace(CPU, source="measured here", exchange={**CPU.exchange, "gloo": ((1.0, 2.0), (3.0, 4.0))}, copy=0.5)
    path = rates.save(mine, 2)
    assert path.parent == cache
    assert list(cache.iterdir()) == [path]  # no unfinished file is left
    assert rates.load("CPU", 2, "float32") == mine
    for device, count, dtype in (("CPU", 3, "float32"), ("CPU", 2, "bfloat16"), ("NVIDIA H200", 2, "float32")):
        assert "nothing was measured here" in rates.load(device, count, dtype).source
    assert torch.__version__.split("+")[0] in path.name


def test_one_process_takes_the_exchanges_of_the_defaults() -> None:
    rates.save(replace(CPU, source="alone", exchange={}), 1)
    found = rates.load("CPU", 1, "float32")
    assert found.exchange == CPU.exchange
    assert found.source == "alone; exchanges: coarse defaults of a CPU"


def test_defaults_say_what_they_are_not() -> None:
    assert rates.load("NVIDIA H200", 4, "bfloat16").source == "defaults of an H200; nothing was measured here"
    assert "defaults of an H200, not of a NVIDIA L4" in rates.load("NVIDIA L4", 1, "bfloat16").source
    assert "defaults of an H200, in bfloat16" in rates.load("NVIDIA H200", 1, "float32").source


def test_a_known_card_has_rates_by_the_ratio_of_datasheets() -> None:
    a100, small = (rates.load(name, 2, "bfloat16") for name in ("NVIDIA A100-SXM4-80GB", "NVIDIA GeForce RTX 4090"))
    assert a100.source.startswith("an H200's, by datasheet (312 TFLOP/s, 2.04 TB/s, 300 GB/s); nothing was measured")
    assert a100.gemm[-1][1] == pytest.approx(670 * 312 / 989)
    assert a100.copy == pytest.approx(4.28 * 2.04 / 4.8)
    (nbytes, us), (_, before) = a100.exchange["peer"][-1], rates.H200.exchange["peer"][-1]
    assert (nbytes, us) == (rates.H200.exchange["peer"][-1][0], pytest.approx(6 + (before - 6) * 450 / 300))
    assert {*a100.exchange} - {*small.exchange} == {"peer"}


@pytest.mark.parametrize("text", ["", "{}", '{"gemm": 1}', "[1]"])
def test_a_broken_file_is_one_message(text: str) -> None:
    path = rates.save(CPU, 1)
    path.write_text(text)
    with pytest.raises(ValueError, match=r"which holds no rates .* delete it, or measure again"):
        rates.load("CPU", 1, "float32")
    for points in ([], [[2, 1], [1, 1]], [[1, 0]]):
        path.write_text(json.dumps({**asdict(CPU), "gemm": points}))
        with pytest.raises(ValueError, match="expected points of rising x and positive y"):
            rates.load("CPU", 1, "float32")


def test_the_cache_is_where_users_keep_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SEQPAR_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert rates.save(CPU, 1).parent == tmp_path / "xdg" / "seqpar"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert rates.save(CPU, 1).parent == tmp_path / "home" / ".cache" / "seqpar"


def shown(rank: int, world: int, device: torch.device, cache: str, command: str) -> str:
    """Return what a dry run, or the bench of rates, prints on this rank on CPUs with this user cache."""
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out):
        patch.setenv("SEQPAR_CACHE", cache)
        patch.setattr(torch.cuda, "is_available", lambda: False)
        if command == "rates":
            patch.setattr(sys, "argv", ["bench.py", "rates"])
            bench.run(rank)
        else:
            sample.run(sample.Args(dry_run=()))
    return out.getvalue()


def test_two_ranks_measure_once_and_the_planner_uses_it(ranks: Pool, cache: Path) -> None:
    assert "nothing was measured here" in ranks.run(2, shown, str(cache), "dry run")[0]
    told, silent = ranks.run(2, shown, str(cache), "rates")
    assert told.count("kept in") == 1
    assert silent == ""
    (path,) = cache.iterdir()
    found = rates.load("CPU", 2, "float32")
    assert os.fspath(path) in told
    assert len(found.gemm) == 4
    assert all(y > 0 for _, y in found.exchange["gloo"])
    assert set(found.attention) == {64, 72, 128}
    planned, silent = ranks.run(2, shown, str(cache), "dry run")
    assert "rates: measured here on" in planned
    assert silent == ""


def test_more_bytes_never_take_less_time_than_the_last_point() -> None:
    assert time_at(((1.0, 100.0), (2.0, 50.0)), 4.0) == 50.0


def test_a_file_of_the_cache_is_readable_as_others_are(tmp_path: Path) -> None:
    """Users that share $SEQPAR_CACHE read each other's files."""
    rates.keep(tmp_path / "new" / "x.json", b"{}")
    (plain := tmp_path / "plain").touch()
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["x.json"]
    assert (tmp_path / "new" / "x.json").stat().st_mode == plain.stat().st_mode
