"""Tests of what a killed process leaves in the folder of temporary files."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from seqpar.transports._sockets import FOLDERS, remove_sockets


def test_only_sockets_of_these_processes_are_removed_that_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in FOLDERS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TMP", str(tmp_path))
    made = {number: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) for number in (1, 2, 3)}
    for number, one in made.items():
        one.bind(str(tmp_path / f"symm_mem-{number}"))
    (tmp_path / "symm_mem-4").write_text("a file")
    for number in (1, 3):
        made[number].close()
    remove_sockets([1, 2, 4, 5])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["symm_mem-2", "symm_mem-3", "symm_mem-4"]
    made[2].close()
    remove_sockets([2])
    assert not (tmp_path / "symm_mem-2").exists()
