"""`--dry-run`: every layout ranked without a weight loaded, and what a run would refuse refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import tyro

from seqpar.cli.sample import Args, run
from seqpar.weights.find import Blueprint
from tests.cli.test_sample import launch
from tests.support.meshes import EXACT


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("counts", [(), (1, 4)], ids=str)
def test_a_dry_run_ranks_layouts_and_loads_no_weights(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, counts: tuple[int, ...]
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(Blueprint, "build", refuse)
    run(Args(model="large-dit-600m", size="1024", classes=("1",), out=tmp_path / "x.png", dry_run=counts))
    shown = capsys.readouterr().out
    assert not list(tmp_path.iterdir())
    tables = shown.split("\n\n")[1:]
    assert [table.split(" x ")[0] for table in tables] == ([str(count) for count in counts] or ["1"])
    assert all(("NVIDIA H200" if counts else "CPU") in table for table in tables)
    rows = tables[-1].splitlines()[2:]
    assert len(rows) == (9 if counts else 1)
    assert all("GiB" not in row for row in rows)
    times = [float(row[46:56]) for row in rows]
    assert times[1:] == sorted(times[1:])
    unasked = [time for time, row in zip(times, rows, strict=True) if row.split()[-8] in ("-", *EXACT)]
    assert times[0] <= 1.01 * min(unasked)


def test_a_dry_run_on_two_processes_prints_once_and_ends_well(tmp_path: Path) -> None:
    done = launch("--model", "dit-s/8", "--size", "128", "--dry-run", "--out", tmp_path / "x.png", ranks=2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("2 x CPU: cfg 2, ") == 1
    assert done.stdout.count("does not fit") == 0
    assert not list(tmp_path.iterdir())


def dry(*flags: str) -> None:
    """As one process without a GPU does it."""
    run(tyro.cli(Args, args=["--dry-run", *flags]))


@pytest.mark.usefixtures("no_gpu")
def test_a_dry_run_says_what_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    dry("1", "4", "--model", "dit-xl/2", "--classes", "1", "--size", "32768")
    shown = capsys.readouterr().out
    assert "1 x NVIDIA H200: nothing fits" in shown
    assert "does not fit: needs" in shown
    assert "4 x NVIDIA H200: cfg 2 x ulysses 2" in shown


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    ("flags", "message"),
    [("--strategy foo", "got strategy 'foo'"), ("--transport nccl", "got transport 'nccl'"),
     ("--local-attention foo", "got local attention 'foo'"), ("--exact --mesh ring=2", "with ring=2")],
    ids=["strategy", "transport", "local attention", "exact"],
)  # fmt: skip
def test_a_dry_run_refuses_what_a_run_would(capsys: pytest.CaptureFixture[str], flags: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dry("2", *flags.split())
    assert capsys.readouterr().out == ""


def test_a_refused_dry_run_is_one_message_and_a_failure() -> None:
    done = launch("--dry-run", "2", "--strategy", "foo")
    assert done.returncode == 1
    assert done.stderr.count("error: got strategy 'foo'") == 1
    assert done.stdout == ""


@pytest.mark.usefixtures("no_gpu")
def test_an_exact_dry_run_has_no_ring_and_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    dry("2", "--exact", "--out", "/nowhere/it/could/be.png")
    shown = capsys.readouterr().out
    assert "2 x NVIDIA H200: " in shown
    assert "ring" not in shown
    dry("2")
    assert "ring" in capsys.readouterr().out  # a negative control
