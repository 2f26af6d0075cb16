"""Lines about a run do not end up on the line of a progress bar."""

from __future__ import annotations

import sys

import pytest
from tqdm import tqdm

from seqpar.types.say import say


def test_a_line_is_printed_above_a_bar(capsys: pytest.CaptureFixture[str]) -> None:
    with tqdm(total=2, file=sys.stderr) as bar:
        say("one")
        bar.update(2)
    shown = capsys.readouterr()
    assert shown.out == "seqpar: one\n"
    first, cleared, again, *_ = filter(None, shown.err.split("\r"))
    assert ("0/2" in first, cleared.strip(), "0/2" in again) == (True, "", True)
    assert shown.err.endswith("\n")
