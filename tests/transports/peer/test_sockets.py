"""Tests of what a killed process leaves in the folder of temporary files."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from seqpar.transports._sockets import FOLDERS, remove_dead_sockets


def test_only_sockets_of_no_process_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in FOLDERS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TMP", str(tmp_path))
    made = {name: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) for name in ("symm_mem-1", "symm_mem-2", "other")}
    for name, one in made.items():
        one.bind(str(tmp_path / name))
    (tmp_path / "symm_mem-3").write_text("a file")
    for name in ("symm_mem-1", "other"):
        made[name].close()
    remove_dead_sockets()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "symm_mem-2", "symm_mem-3"]
    made["symm_mem-2"].close()
    remove_dead_sockets()
    assert not (tmp_path / "symm_mem-2").exists()
