"""Tests the memory in which ranks of one machine exchange small values; `test_mesh.py` has real ranks."""

from __future__ import annotations

import os
import subprocess
from datetime import timedelta
from types import SimpleNamespace

import pytest

from seqpar.mesh import board
from seqpar.mesh.board import PLACE, Board, nbytes_for


def two(other: int) -> tuple[bytearray, list[Board]]:
    memory = bytearray(nbytes_for(2))
    return memory, [Board(rank, memoryview(memory), [os.getpid(), other]) for rank in range(2)]


def test_ranks_read_the_values_of_one_exchange() -> None:
    memory, (one, other) = two(os.getpid())
    for number in range(5):
        mine = one.post(b"one%d" % number)
        assert not mine.is_completed()
        with pytest.raises(RuntimeError, match="timed out"):
            mine.wait(timedelta(0))
        theirs = other.post(b"other%d" % number)
        theirs.wait()
        at = (1 + number) % 2 * 2 * PLACE + PLACE + 8
        memory[at] ^= 1  # as if it were read while it is written
        assert not mine.is_completed()
        memory[at] ^= 1
        mine.wait()
        assert [value.rstrip(b"\0") for value in mine.values] == [b"one%d" % number, b"other%d" % number]
        assert mine.values == theirs.values


def test_a_wait_ends_where_another_rank_gave_up_and_went_on() -> None:
    _, (one, other) = two(os.getpid())
    for _ in range(3):
        other.post(b"")  # the third one is where the first one was
    with pytest.raises(RuntimeError, match="gave up"):
        one.post(b"").wait(timedelta(seconds=9))


def test_a_wait_ends_with_the_process_of_another_rank() -> None:
    with subprocess.Popen(["sleep", "9"]) as process:
        _, (one, _) = two(process.pid)
        posting = one.post(b"")
        assert not posting.is_completed()
        process.kill()
        with pytest.raises(RuntimeError, match="connection closed"):
            posting.wait(timedelta(seconds=9))
        assert posting.is_completed()


def test_a_long_wait_takes_little_of_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    _, (one, _) = two(os.getpid())
    pauses = list[float]()
    monkeypatch.setattr(board, "time", SimpleNamespace(sleep=pauses.append, monotonic=lambda: sum(pauses)))
    with pytest.raises(RuntimeError, match="timed out"):
        one.post(b"").wait(timedelta(seconds=1))
    assert len(pauses) < 1000
    assert all(pause <= 1.01e-4 + 0.02 * sum(pauses[:at]) for at, pause in enumerate(pauses))  # none adds more
