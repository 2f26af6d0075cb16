"""The command and its help."""

from __future__ import annotations

import re
import sys

import pytest
import tyro
from tyro import _fmtlib

from seqpar import __version__
from seqpar.cli import entry
from seqpar.cli.args import Args, PlanArgs
from seqpar.cli.main import command
from seqpar.serve.api.command import main as serve
from tests.cli.processes import seqpar

LINES, COLUMNS = 24, 90  # of one screen


@pytest.mark.parametrize(("words", "flags"), [("sample", Args), ("plan", PlanArgs)], ids=str)
def test_help_explains_every_flag_and_there_are_few(
    capsys: pytest.CaptureFixture[str], words: str, flags: type[Args | PlanArgs]
) -> None:
    with pytest.raises(SystemExit) as stop:
        command([*words.split(), "--help"])
    assert not stop.value.code
    shown = capsys.readouterr().out
    fields = flags.__dataclass_fields__
    assert len(fields) <= 37  # 28 that say what to do; 6 that say how (--transport ... --verify); 3 that start
    assert all(f"--{name.replace('_', '-')}" in shown for name in fields)


def test_help_is_one_screen_with_the_commands_of_users() -> None:
    lines = entry.HELP.splitlines()
    assert len(lines) <= LINES
    assert max(map(len, lines)) <= COLUMNS
    listed = re.findall(r"^  ([a-z]+) ", entry.HELP.partition("options:")[0], re.MULTILINE)
    assert listed == ["sample", "serve", "plan", "profile", "verify", "convert"]


@pytest.mark.parametrize("name", entry.COMMANDS)
def test_every_command_that_help_lists_exists(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["seqpar", name, "--help"])
    monkeypatch.setattr("seqpar.cli.main.guarded", lambda work: work(0))
    with pytest.raises(SystemExit) as stop:
        entry.main()
    assert not stop.value.code
    assert f"usage: seqpar {name} " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "code", "out", "error"),
    [
        ("--help", 0, entry.HELP, ""),
        ("-h", 0, entry.HELP, ""),
        ("--version", 0, f"seqpar {__version__}", ""),
        ("", 2, "", entry.HELP),
        ("smaple --help", 2, "", "error: 'smaple' is not a command; did you mean sample?"),
        ("server", 2, "", "error: 'server' is not a command; did you mean serve?"),
        ("replicas", 2, "", "error: 'replicas' is not a command; seqpar --help lists the commands"),
        ("fidelity --gpus 2", 2, "", "error: seqpar fidelity is now seqpar verify"),
        ("--prompt cat", 2, "", "error: '--prompt' is not a command; seqpar --help lists the commands"),
    ],
    ids=str,
)
def test_help_version_and_unknown_commands(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: str, code: int, out: str, error: str
) -> None:
    for rank, expected in (("0", (out, error)), ("1", ("", ""))):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setattr(sys, "argv", ["seqpar", *words.split()])
        with pytest.raises(SystemExit) as stop:
            entry.main()
        shown = capsys.readouterr()
        assert (stop.value.code, shown.out.rstrip("\n"), shown.err.rstrip("\n")) == (code, *expected)


def test_a_wrong_flag_starts_no_rank() -> None:
    done = seqpar("sample", "--ranks", "2", "--step", "x")
    assert done.returncode == 2
    assert done.stderr == "error: Unrecognized options: --step, x; did you mean --steps?\n"
    assert done.stdout == ""


@pytest.mark.parametrize("utf8", [False, True])
@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("sample --steps nan", "got --steps nan, expected a whole number"),
        ("sample --steps=1.5", "got --steps 1.5, expected a whole number"),
        ("sample --guidance it's", "got --guidance it's, expected a number"),
        ("sample --dry-run 1 x --steps 2", "got --dry-run 1 x, expected a whole number"),
        (f"sample --seed {'9' * 5000}", f"got --seed {'9' * 60}, expected a whole number"),
        ("sample --deadline_s x", "got --deadline-s x, expected a number"),
        ("sample --dtype fp2", "got --dtype fp2, expected one of auto, fp64, fp32, bf16, fp16"),
        ("sample --dtype=INT8", "got --dtype INT8, which no weights have here; use --precision fp8, which computes"),
        ("plan --dtype nf4", "got --dtype nf4, which no weights have here; use --precision fp8"),
        ("convert a b --dtype fp8", "got --dtype fp8, expected one of same, fp32, bf16, fp16"),
        ("sample --precision fp4", "got --precision fp4, expected one of "),
        ("plan --hosts x", "got --hosts x, expected a whole number"),
        ("sample --gpus", "Missing value for argument '--gpus'. Expected 1 values; see seqpar sample --help"),
        ("sample extra", "Unrecognized options: extra; see seqpar --help"),
        ("convert a", "Missing from seqpar convert: PATH Folder to write; it must not exist. (required); see seqpar"),
    ],
    ids=lambda value: value[:30],
)
def test_words_that_do_not_parse_are_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: str, line: str, utf8: bool
) -> None:
    """tyro draws boxes in two ways."""
    monkeypatch.setattr(_fmtlib, "_should_use_utf8_drawing_chars", lambda: utf8)
    with pytest.raises(ValueError, match=re.escape(line)) as error:
        command(words.split())
    assert "\n" not in str(error.value)
    assert capsys.readouterr() == ("", "")
    with pytest.raises(SystemExit) as stop:  # of other ranks under torchrun, which say nothing
        command(words.split(), rank=1)
    assert (stop.value.code, capsys.readouterr()) == (2, ("", ""))


def test_local_is_short_for_local_attention() -> None:
    for flag in ("--local", "--local-attention"):
        assert tyro.cli(Args, args=[flag, "flash"]) == Args(local="flash")


def test_words_of_a_server_that_do_not_parse_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert serve(["--port", "x"]) == 2
    assert capsys.readouterr() == ("", "error: got --port x, expected a whole number\n")
    assert serve(["builtin", "--dtype", "fp8"]) == 2
    assert "use --precision fp8" in capsys.readouterr().err
