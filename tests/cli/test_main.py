"""The command and its help."""

from __future__ import annotations

import re

import pytest

from seqpar.cli.args import Args, PlanArgs
from seqpar.cli.main import command
from tests.cli.processes import seqpar


@pytest.mark.parametrize(("words", "flags"), [("sample", Args), ("plan", PlanArgs), ("", None)], ids=str)
def test_help_explains_every_flag_and_there_are_few(
    capsys: pytest.CaptureFixture[str], words: str, flags: type[Args | PlanArgs] | None
) -> None:
    with pytest.raises(SystemExit) as stop:
        command([*words.split(), "--help"])
    assert not stop.value.code
    shown = capsys.readouterr().out
    if flags is None:
        assert "seqpar sample --gpus 4" in shown
        assert re.search(r"plan +Print the predicted time", shown)
        assert re.search(r"fidelity +Compare every way", shown)
        return
    fields = flags.__dataclass_fields__
    assert len(fields) <= 34  # 25 that say what to do; 6 that say how (--transport ... --verify); 3 that start
    assert all(f"--{name.replace('_', '-')}" in shown for name in fields)


def test_a_wrong_flag_starts_no_rank() -> None:
    done = seqpar("sample", "--ranks", "2", "--step", "x")
    assert done.returncode == 2
    assert done.stderr.count("Unrecognized options:") == 1
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
