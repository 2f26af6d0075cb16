"""Tests of `seqpar serve` as a command: its exit codes, and that no other command takes its place."""

from __future__ import annotations

import sys

import pytest

from seqpar.cli import entry

WRONG = [
    (["--gpus", "1", "--ranks", "2"], "got --gpus 1 and --ranks 2, expected one of them"),
    (["--host", "0.0.0.0"], "--host 0.0.0.0 is reachable from other machines and requires --keys"),
    (["--port", "70000"], "got --port 70000, expected at most 65535"),
    (["--jobs", __file__], f"--jobs {__file__} is no folder to write in"),
    (["--name", "a-b"], "got --name a-b, expected 1 to 32 letters and digits"),
    (["--queue", "0"], "got --queue 0, expected at least 1"),
]


@pytest.mark.parametrize(("words", "text"), WRONG)
def test_a_mistake_is_one_line_and_exit_code_2(
    words: list[str], text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["seqpar", "serve", *words])
    with pytest.raises(SystemExit) as ended:
        entry.main()
    said = capsys.readouterr().err.strip()
    assert (ended.value.code, said.startswith(f"error: {text}"), "\n" in said) == (2, True, False)
