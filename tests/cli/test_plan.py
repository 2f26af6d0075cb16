"""`seqpar plan` and `--dry-run` rank every layout and load no weights; a model's name may stand for another one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from seqpar.cli.args import Args
from seqpar.cli.main import command
from seqpar.cli.sample import run
from seqpar.loading import names
from seqpar.loop.blueprint import Blueprint
from seqpar.types.flags import parsed
from tests.cli.processes import seqpar
from tests.cli.runs import parameters, pixels, shown
from tests.support.meshes import EXACT
from tests.support.pool import Pool

Captured = pytest.CaptureFixture[str]


def dry(*flags: str) -> None:
    run(parsed(Args, ["--dry-run", *flags], "plan"))


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("counts", [(), (1, 4)], ids=str)
def test_a_dry_run_ranks_layouts_and_loads_no_weights(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured, tmp_path: Path, counts: tuple[int, ...]
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(Blueprint, "build", refuse)
    run(Args(model="large-dit-600m", size="1024", classes=("1",), out=tmp_path / "x.png", dry_run=counts))
    tables = capsys.readouterr().out.split("\n\n")[1:]
    assert not list(tmp_path.iterdir())
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


@pytest.mark.usefixtures("no_gpu")
def test_a_plan_in_8_bits_counts_faster_gemms_and_copies_of_weights(capsys: Captured, tmp_path: Path) -> None:
    args, found = Args("large-dit-7b", ("1",), size="1024", out=tmp_path / "x.png", dry_run=(1,)), list[list[float]]()
    for asked in (args, replace(args, precision="fp8")):
        run(asked)
        out = capsys.readouterr().out
        assert ("GEMMs in fp8 at 1.7 times" in out) == (asked is not args)
        (row,) = (line for line in out.splitlines() if line.startswith("one rank"))
        found.append([float(number) for number in row.split()[3:]])
    (wide, gemm, *_, gib), (eight, gemm8, *_, gib8) = found
    assert (wide - eight, gib8 - gib) == (pytest.approx(gemm - gemm8, abs=0.02), pytest.approx(6.0, abs=0.1))
    assert 1.6 < gemm / gemm8 < 1.7  # but for the embedder and the final layer


def test_a_dry_run_on_two_processes_prints_once(ranks: Pool, tmp_path: Path) -> None:
    (first, _), (second, _) = ranks.run(2, shown, Args("dit-s/8", size="128", dry_run=(), out=tmp_path / "x.png"))
    assert first.count("\n2 x ") == first.count(": cfg 2, ") == 1
    assert first.count("does not fit") == 0
    assert second == ""
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("counts", ["", "1 4"])
def test_a_plan_prints_what_a_dry_run_prints_and_explains_itself_if_asked(capsys: Captured, counts: str) -> None:
    flags = ["--model", "large-dit-7b" if counts else "dit-xl/2", "--size", "1024", "--classes", "1"]
    gpus = ["--gpus", *counts.split()] if counts else []
    command(["plan", *flags, *gpus])
    plan = capsys.readouterr().out
    assert plan.count("ms per step") >= 2 * max(1, len(counts.split()))  # a plan and the head of a table for each
    assert "\nwhy " not in plan
    command(["sample", *flags, "--dry-run", *counts.split()])
    assert capsys.readouterr().out == plan
    command(["plan", *flags, *gpus, "--explain"])
    explained = capsys.readouterr().out
    assert set(plan.splitlines()) <= set(explained.splitlines())
    assert explained.count("\nwhy one rank:") == 1
    if counts:
        assert explained.count("\nwhy cfg 2 x ulysses 2 by kv_first:") == 1
        assert explained.count("ring 2 x ulysses 2 by usp: +") == 1


@pytest.mark.usefixtures("no_gpu")
def test_what_does_not_fit_is_listed_and_exact_mode_has_no_ring(capsys: Captured) -> None:
    dry("1", "4", "--model", "dit-xl/2", "--classes", "1", "--size", "32768")
    text = capsys.readouterr().out
    assert "1 x NVIDIA H200: nothing fits" in text
    assert "does not fit: needs" in text
    assert "4 x NVIDIA H200: cfg 2 x ulysses 2" in text
    dry("2", "--exact", "--out", "/nowhere/it/could/be.png")  # nothing is written
    text = capsys.readouterr().out
    assert "2 x NVIDIA H200: " in text
    assert "ring" not in text
    dry("2")
    assert "ring" in capsys.readouterr().out  # a negative control


def test_a_refused_plan_is_one_line_and_a_failure() -> None:
    done = seqpar("plan", "--gpus", "2", "--strategy", "foo")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("error: got strategy 'foo'")


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("name", ["flux", "sd3"])
def test_a_folder_is_planned_for_the_tokens_of_the_run(
    capsys: Captured, folders: Callable[[str], Path], name: str
) -> None:
    guided = ["--true-guidance", "2"] if name == "flux" else []
    for size, tokens in (("24x32", 48), ("32x32", 64)):
        dry("2", "--model", str(folders(name)), "--prompt", "x", "--size", size, *guided)
        text = capsys.readouterr().out
        assert f"1 picture(s) of {tokens} tokens" in text
        assert "2 x NVIDIA H200: cfg 2, " in text


@pytest.mark.usefixtures("no_gpu")
def test_a_plan_of_a_random_model_is_that_of_its_published_size(capsys: Captured) -> None:
    dry("1", "2", "--model", "random:FLUX.1-dev", "--prompt", "x", "--size", "1024")
    text = capsys.readouterr().out
    assert "1 picture(s) of 4096 tokens, guidance 3.5 as an input, bfloat16" in text
    assert "2 x NVIDIA H200: ulysses 2" in text
    assert "a step: 74" in text


# Built-in models: a tiny FLUX.1 stands in for the files of the model of texts ---------------------------------------


@pytest.fixture
def text_model(monkeypatch: pytest.MonkeyPatch, folders: Callable[[str], Path]) -> None:
    monkeypatch.setitem(names.NAMES, "builtin-text", folders("flux"))


@pytest.mark.usefixtures("no_gpu", "text_model")
@pytest.mark.parametrize(
    ("words", "head"),
    [
        (["--prompt", "a red cat"], "builtin-text: 1 picture(s) of 16 tokens, guidance 3.5 as an input"),
        (["--model", "builtin-text", "--prompt", "a", "b"], "builtin-text: 2 picture(s) of 16 tokens, guidance 3.5"),
        (["--classes", "cat", "rocket"], "builtin: 2 picture(s) of "),
        ([], "builtin: 12 picture(s) of "),
    ],
    ids=str,
)
def test_a_plan_names_the_model_that_the_flags_mean(capsys: Captured, words: list[str], head: str) -> None:
    """The size of a picture of a text is that of the decoder, 16 pixels, 4 tokens, along a side."""
    command(["plan", "--gpus", "2", *words])
    assert capsys.readouterr().out.startswith(head)


@pytest.mark.usefixtures("no_gpu", "text_model")
def test_a_prompt_alone_is_drawn_by_the_model_of_texts(tmp_path: Path, capsys: Captured) -> None:
    run(Args(prompt=("a red cat",), steps=1, out=tmp_path / "x.png"))
    assert capsys.readouterr().out.count("\nmodel     builtin-text\n") == 1
    assert pixels(tmp_path / "x.png").shape == (16, 16, 3)
    told = parameters(tmp_path / "x.png")
    assert (told["model"], told["chosen"]["size"]) == ("builtin-text", "16x16")
