"""The command and its help."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from seqpar import __version__
from seqpar.cli import entry
from seqpar.cli.args import GROUPS, Args, PlanArgs
from seqpar.cli.main import command
from seqpar.serve.api.command import ServeArgs
from seqpar.serve.api.command import main as serve
from seqpar.types.flags import WIDTH, parsed
from tests.cli.processes import seqpar

LINES = 24  # of one screen


@pytest.mark.parametrize(("words", "flags"), [("sample", Args), ("plan", PlanArgs)], ids=str)
def test_help_explains_every_flag_and_there_are_few(
    capsys: pytest.CaptureFixture[str], words: str, flags: type[Args | PlanArgs]
) -> None:
    with pytest.raises(SystemExit) as stop:
        command([*words.split(), "--help"])
    assert not stop.value.code
    shown = capsys.readouterr().out
    fields = flags.__dataclass_fields__
    assert len(fields) <= 43  # 33 that say what to do; 7 that say how (--transport ... --verify); 3 that start
    assert all(f"--{name.replace('_', '-')}" in shown for name in fields)
    assert set(fields) - {name for names in GROUPS.values() for name in names} <= {"explain"}


def test_help_is_one_screen_with_the_commands_of_users() -> None:
    lines = entry.HELP.splitlines()
    assert len(lines) <= LINES
    assert max(map(len, lines)) <= WIDTH
    listed = re.findall(r"^  ([a-z]+) ", entry.HELP.partition("options:")[0], re.MULTILINE)
    assert listed == ["sample", "serve", "plan", "profile", "verify", "convert", "doctor"]


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


@pytest.mark.parametrize("module", ["seqpar", "seqpar.cli"])
def test_the_package_is_the_command(module: str) -> None:
    words = [sys.executable, "-m", module, "--version"]
    assert subprocess.run(words, capture_output=True, text=True, check=True).stdout == f"seqpar {__version__}\n"


def test_help_whose_reader_has_left_ends_without_a_traceback() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as closed:
        words = [sys.executable, "-m", "seqpar", "--help"]
        done = subprocess.run(words, stdout=closed, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_help_imports_nothing_that_takes_long() -> None:
    code = f"""
import subprocess
import sys
from seqpar.cli import entry
for name in {list(entry.COMMANDS)}:
    sys.argv = ["seqpar", name, "--help"]
    try:
        entry.main()
    except SystemExit as stop:
        assert not stop.code
loaded = {{"torch", "diffusers", "transformers", "numpy", "fastapi"}} & sys.modules.keys()
assert not loaded, loaded
"""
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert max(map(len, shown.splitlines())) <= WIDTH


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
    assert done.stderr == "error: --step is not a flag of seqpar sample; did you mean --steps?\n"
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("sample --steps nan", "got --steps nan, expected a whole number"),
        ("sample --steps=1.5", "got --steps 1.5, expected a whole number"),
        ("sample --guidance it's", "got --guidance it's, expected a number"),
        ("sample --dry-run 1 x --steps 2", "got --dry-run x, expected a whole number"),
        (f"sample --seed {'9' * 5000}", f"got --seed {'9' * 60}, expected a whole number"),
        ("sample --deadline_s x", "got --deadline-s x, expected a number"),
        ("sample --dtype fp2", "got --dtype fp2, expected one of auto, fp64, fp32, bf16, fp16"),
        ("sample --dtype=INT8", "got --dtype INT8; use --precision fp8, which computes"),
        ("plan --dtype nf4", "got --dtype nf4; use --precision fp8"),
        ("convert a b --dtype fp8", "got --dtype fp8, expected one of same, fp32, bf16, fp16"),
        ("sample --precision fp4", "got --precision fp4, expected one of "),
        ("plan --hosts x", "got --hosts x, expected a whole number"),
        ("sample --gpus --steps 2", "--gpus needs a value (N); see seqpar sample --help"),
        ("sample extra", "got 'extra', which belongs to no flag; see seqpar sample --help"),
        ("sample --promt cat", "--promt is not a flag of seqpar sample; did you mean --prompt?"),
        ("plan --xyz", "--xyz is not a flag of seqpar plan; see seqpar plan --help"),
        ("sample --exact=yes", "got --exact=yes, but --exact takes no value"),
        ("convert a", "FOLDER is missing: folder to write; it must not exist. See seqpar convert --help"),
    ],
    ids=lambda value: value[:30],
)
def test_words_that_do_not_parse_are_one_line(capsys: pytest.CaptureFixture[str], words: str, line: str) -> None:
    with pytest.raises(ValueError, match=re.escape(line)) as error:
        command(words.split())
    assert "\n" not in str(error.value)
    assert capsys.readouterr() == ("", "")
    with pytest.raises(SystemExit) as stop:  # of other ranks under torchrun, which say nothing
        command(words.split(), rank=1)
    assert (stop.value.code, capsys.readouterr()) == (2, ("", ""))


@pytest.mark.parametrize(
    ("words", "args"),
    [
        ("--local flash", Args(local="flash")),
        ("--local-attention flash", Args(local="flash")),
        ("--prompt a b --deadline_s=1.5 --steps 3 --steps 2", Args(prompt=("a", "b"), deadline_s=1.5, steps=2)),
        ("--exact --verify --no-exact --guidance -1", Args(verify=True, guidance=-1.0)),
        ("--prompt --dry-run --out x.png", Args(dry_run=(), out=Path("x.png"))),
    ],
    ids=str,
)
def test_words_become_flags(words: str, args: Args) -> None:
    assert parsed(Args, words.split(), "sample") == args


def test_flags_may_stand_before_and_after_models() -> None:
    for words in (
        "a b --port 1 --warm auto 64x64",
        "--port 1 a b --warm auto 64x64",
        "--port 1 --warm auto 64x64 -- a b",
        "a b --warm auto --port 1 --warm 64x64",
    ):
        assert parsed(ServeArgs, words.split(), "serve") == ServeArgs(("a", "b"), port=1, warm=("auto", "64x64"))


def test_requests_name_a_folder_by_its_last_part_or_an_alias(tmp_path: Path) -> None:
    folders = [str(tmp_path / name) for name in ("first", "second")]
    for folder in folders:
        Path(folder).mkdir()
    args = ServeArgs(
        (*folders, "org/model", "org/model"),
        name=("server", *(f"{name}={folders[1]}" for name in ("Own/name-2.0", "b"))),
    ).checked()
    assert (args.server, args.public_names()) == ("server", ["first", "Own/name-2.0", "org/model"])
    words = args.replica
    assert words[words.index("--names") + 1 :] == ["first", "Own/name-2.0", "org/model"]
    assert "--names" not in ServeArgs().checked().replica


def test_words_of_a_server_that_do_not_parse_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert serve(["--port", "x"]) == 2
    assert capsys.readouterr() == ("", "error: got --port x, expected a whole number\n")
    assert serve(["builtin", "--dtype", "fp8"]) == 2
    assert "use --precision fp8" in capsys.readouterr().err
