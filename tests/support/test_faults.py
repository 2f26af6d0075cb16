"""Tests that the table of planted faults matches the tree: every text occurs once, and every test exists."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.faults import FAILED, FAULTS, ROOT, Fault, remove, run, verdict


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_can_be_planted_and_its_test_exists(fault: Fault) -> None:
    assert (ROOT / fault.file).read_text(encoding="utf-8").count(fault.old) == 1
    assert fault.new != fault.old
    file, function = fault.test.split("[")[0].split("::")
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_a_text_that_is_gone_or_there_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("one one two")
    with pytest.raises(ValueError, match="got 2 places of fault 'twice'"):
        Fault("twice", "a.py", "one", "1", "", "").apply(tmp_path)
    with pytest.raises(ValueError, match="got 0 places"):
        Fault("gone", "a.py", "three", "3", "", "").apply(tmp_path)
    Fault("once", "a.py", "two", "2", "", "").apply(tmp_path)
    assert (tmp_path / "a.py").read_text() == "one one 2"


def test_a_copy_goes_in_which_a_killed_rank_still_writes(tmp_path: Path) -> None:
    """A process makes files in a folder as fast as it can, and ends half a second later."""
    folder = tmp_path / "copy" / "compiled"
    folder.mkdir(parents=True)
    writes = (
        "import itertools, pathlib, sys, time\n"
        "folder, end = pathlib.Path(sys.argv[1]), time.monotonic() + 0.5\n"
        "for number in itertools.count():\n"
        "    folder.mkdir(parents=True, exist_ok=True)\n"
        "    (folder / str(number)).touch()\n"
        "    print(end='.' if number == 9 else '', flush=True)\n"
        "    if time.monotonic() > end: break\n"
    )
    with subprocess.Popen([sys.executable, "-c", writes, str(folder)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.read(1) == b"."
        remove(tmp_path / "copy")
        process.wait()
    remove(tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_what_a_run_says_is_told_apart(tmp_path: Path) -> None:
    """A failing, a passing and a missing test have different verdicts: a missing test catches nothing."""
    (tmp_path / "test_a.py").write_text("def test_fails(): raise ValueError\n")
    ends = [run(tmp_path, (f"test_a.py::{name}",)) for name in ("test_fails", "test_that_is_gone")]
    assert [status for status, _ in ends] == [FAILED, 5]
    assert [verdict(*end).split()[0] for end in (*ends, (0, ""))] == ["caught", "BROKEN", "SURVIVES"]
    assert verdict(FAILED, "NameError: name 'x' is not defined").startswith("BROKEN")


def test_a_slow_test_hangs_by_the_limit_of_a_fault_alone(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text("import time\ndef test_slow(): time.sleep(1.5)\n")
    ends = [run(tmp_path, ("test_a.py",), *flags) for flags in ((), ("--timeout=1",))]
    assert [verdict(*end) for end in ends] == ["SURVIVES", "caught, by a hang"]
