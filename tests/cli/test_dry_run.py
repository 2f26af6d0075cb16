"""`seqpar plan` and `--dry-run` rank every layout, load no weights, and refuse the flags that a run refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import tyro

from seqpar.cli.args import Args
from seqpar.cli.main import command
from seqpar.cli.sample import run
from seqpar.loop.blueprint import Blueprint
from tests.cli.processes import seqpar
from tests.cli.test_sample import printed
from tests.support.meshes import EXACT
from tests.support.pool import Pool


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
    *rows, counted = tables[-1].splitlines()[2:]
    assert counted.startswith("a step: 10.7 TFLOP, ")
    assert ("the busiest rank sends" in counted) == bool(counts)
    assert len(rows) == (9 if counts else 1)
    assert all("GiB" not in row for row in rows)
    times = [float(row[46:56]) for row in rows]
    assert times[1:] == sorted(times[1:])
    unasked = [time for time, row in zip(times, rows, strict=True) if row.split()[-8] in ("-", *EXACT)]
    assert times[0] <= 1.01 * min(unasked)


def test_a_dry_run_on_two_processes_prints_once(ranks: Pool, tmp_path: Path) -> None:
    first, second = ranks.run(2, printed, Args("dit-s/8", size="128", dry_run=(), out=tmp_path / "x.png"))
    assert first.count("\n2 x ") == first.count(": cfg 2, ") == 1
    assert first.count("does not fit") == 0
    assert second == ""
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("counts", ["", "1 4"])
def test_a_plan_prints_what_a_dry_run_prints(capsys: pytest.CaptureFixture[str], counts: str) -> None:
    flags = ["--model", "dit-xl/2", "--classes", "1", "2", "--mesh", "cfg=1", "--strategy", "ulysses"]
    command(["plan", *flags, *(["--gpus", *counts.split()] if counts else [])])
    plan = capsys.readouterr().out
    assert plan.count("ms per step") >= 2 * max(1, len(counts.split()))  # a plan and the head of a table for each
    command(["sample", *flags, "--dry-run", *counts.split()])
    assert capsys.readouterr().out == plan


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
    [
        ("--strategy foo", "got strategy 'foo'"),
        ("--transport nccl", "got transport 'nccl'"),
        ("--local-attention foo", "got local attention 'foo'"),
        ("--exact --mesh ring=2", "with ring=2"),
    ],
    ids=["strategy", "transport", "local attention", "exact"],
)
def test_a_dry_run_refuses_what_a_run_would(capsys: pytest.CaptureFixture[str], flags: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dry("2", *flags.split())
    assert capsys.readouterr().out == ""


@pytest.mark.usefixtures("no_gpu")
def test_hosts_are_checked_where_nothing_is_split(capsys: pytest.CaptureFixture[str]) -> None:
    for flags, message in (
        ("--hosts 0", "got --hosts=0, expected a whole number from 1 to 512"),
        ("--hosts -1 --gpus 2", "got --hosts=-1, expected a whole number from 1"),
        ("--hosts 2", "--hosts 2 needs the number of all their GPUs; add --gpus, such as --gpus 16"),
        ("--hosts 3 --gpus 8", "got --hosts 3 for 8 GPUs, expected hosts with equally many"),
    ):
        with pytest.raises(ValueError, match=message):
            command(["plan", *flags.split()])
        assert capsys.readouterr().out == ""


def test_a_refused_plan_is_one_line_and_a_failure() -> None:
    done = seqpar("plan", "--gpus", "2", "--strategy", "foo")
    assert done.returncode == 2
    assert done.stderr.startswith("error: got strategy 'foo'")
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


@pytest.mark.usefixtures("no_gpu")
def test_an_exact_dry_run_has_no_ring_and_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    dry("2", "--exact", "--out", "/nowhere/it/could/be.png")
    shown = capsys.readouterr().out
    assert "2 x NVIDIA H200: " in shown
    assert "ring" not in shown
    dry("2")
    assert "ring" in capsys.readouterr().out  # a negative control


@pytest.mark.usefixtures("no_gpu")
def test_a_plan_explains_itself_if_asked(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", "large-dit-7b", "--size", "1024", "--classes", "1", "--gpus", "1", "4"]
    command(["plan", *flags])
    plain = capsys.readouterr().out
    command(["plan", *flags, "--explain"])
    shown = capsys.readouterr().out
    assert "\nwhy " not in plain
    assert shown.count("\nwhy one rank:") == shown.count("\nwhy cfg 2 x ulysses 2 by kv_first:") == 1
    assert shown.count("ring 2 x ulysses 2 by usp: +") == 1
    assert set(plain.splitlines()) <= set(shown.splitlines())
