"""Tests that the table of planted faults matches the tree: every text occurs once, and every test exists."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.support.faults import FAILED, FAULTS, ROOT, Fault, verdict


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


@pytest.mark.parametrize(
    ("status", "text", "found"),
    [
        (FAILED, "ValueError: planted", "caught"),
        (FAILED, "Timeout (>1.0s) from pytest-timeout", "caught, by a hang"),
        (FAILED, "rank 1 did not answer in time", "caught, by a hang"),
        (0, "", "SURVIVES"),
        (5, "", "BROKEN ENTRY (pytest's exit status 5)"),  # a test that does not exist catches nothing
        (FAILED, "NameError: name 'x' is not defined", "BROKEN ENTRY (NameError: the edited program does not run)"),
    ],
)
def test_only_a_test_that_failed_has_caught_a_fault(status: int, text: str, found: str) -> None:
    assert verdict(status, text) == found
