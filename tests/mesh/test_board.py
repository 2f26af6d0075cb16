"""Tests the memory in which ranks of one machine exchange small values; `test_mesh.py` has real ranks."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import SimpleNamespace
from typing import Any

import pytest

from seqpar.mesh import board
from seqpar.mesh.board import PLACE, RECORD, Board, anonymous, name_of, nbytes_for, path_of
from seqpar.mesh.watch import LostRankError


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


def test_a_number_that_is_read_while_it_is_written_is_no_later_exchange() -> None:
    memory, (one, other) = two(os.getpid())
    one._count = other._count = 255
    posting = one.post(b"")
    RECORD.pack_into(memory, PLACE, 511, b"", 0)  # one byte of 256, and one of 254 or 255
    assert not one.passed()
    other.post(b"").wait()
    posting.wait(timedelta(seconds=9))


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


def test_memory_of_another_job_is_not_opened_by_a_name_that_was_sent_before() -> None:
    with anonymous() as file:
        name = name_of(file)
        assert os.path.samefile(path_of(name), f"/proc/self/fd/{file.fileno()}")
        with anonymous() as later:  # as in another container, where the same process number is another rank's
            os.dup2(later.fileno(), file.fileno())
            with pytest.raises(LostRankError, match="is not shared memory of a rank"):
                path_of(name)
    for strange in ("", "1/fd/1", f"../{name}", f"{os.getpid()}/fd/0/{'0' * 16}"):
        with pytest.raises(LostRankError):
            path_of(strange)


# Processes --------------------------------------------------------------------------------------------------------

NEAR_32_BITS = (1 << 32) - 100  # exchanges: a checksum begins with the last 32 bits of their number
LIMIT = timedelta(seconds=60)


def exchanging(rank: int, memory: mmap.mmap, first: int, count: int, stays: bool, parent: Connection) -> None:
    # a rank that makes so many exchanges, sends the numbers of the right ones, and then why it ended
    board, number = Board(rank, memoryview(memory), parent.recv()), first
    board._count = first
    try:
        for number in range(first, first + count):
            posting = board.post(b"%d of rank %d" % (number, rank))
            posting.wait(LIMIT)
            values = [value.rstrip(b"\0") for value in posting.values]
            assert values == [b"%d of rank %d" % (number, other) for other in board.ranks], values
            parent.send(number)
        parent.send("")
        if stays:
            time.sleep(LIMIT.total_seconds())
    except (RuntimeError, AssertionError) as error:
        parent.send(f"{type(error).__name__}: {error}")


class Rank:
    """A process of a job. numbers: of its exchanges. ended: why they ended, "" if it made all."""

    def __init__(self, start: Callable[[Connection], BaseProcess]) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        self.process, self.numbers = start(theirs), list[int]()
        self.ended: str | None = None

    def begin(self, pids: list[int]) -> None:
        self._pipe.send(pids)

    def follow(self, until: int | None = None) -> None:
        """Read what it sends, up to a number of exchanges, or to its end."""
        while self.ended is None and (until is None or len(self.numbers) < until):
            assert self._pipe.poll(LIMIT.total_seconds()), "a rank waits without end"
            match self._pipe.recv():
                case int(number):
                    self.numbers.append(number)
                case why:
                    self.ended = str(why)


@contextmanager
def ranks_of(
    memory: mmap.mmap, size: int, count: int, first: int = 0, which: tuple[int, ...] = (), stays: bool = False
) -> Iterator[list[Rank]]:
    context = multiprocessing.get_context("fork")

    def started(rank: int) -> Callable[[Connection], BaseProcess]:
        def start(pipe: Connection) -> BaseProcess:
            arguments: Any = (rank, memory, first, count, stays, pipe)
            process = context.Process(target=exchanging, args=arguments, daemon=True)
            process.start()
            return process

        return start

    made = [Rank(started(rank)) for rank in which or range(size)]
    pids = [rank.process.pid or 0 for rank in made]
    pids += [os.getpid()] * (size - len(pids))
    try:
        for rank in made:
            rank.begin(pids)
        yield made
    finally:
        for rank in made:
            rank.process.kill()
            rank.process.join()


def test_ranks_that_are_stopped_and_go_on_exchange_every_value() -> None:
    draw, count = random.Random(0), 400
    with ranks_of(mmap.mmap(-1, nbytes_for(3)), 3, count, NEAR_32_BITS) as ranks:
        for until in range(20, count, 20):
            for rank in ranks:
                rank.follow(until)
            pid = draw.choice(ranks).process.pid
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)
            time.sleep(draw.choice((0.0, 0.002, 0.02)))
            os.kill(pid, signal.SIGCONT)
        for rank in ranks:
            rank.follow()
            assert rank.ended == ""
            assert rank.numbers == [*range(NEAR_32_BITS, NEAR_32_BITS + count)]


def test_a_rank_waits_for_a_stopped_one_and_ends_with_a_killed_one() -> None:
    with ranks_of(mmap.mmap(-1, nbytes_for(3)), 3, 1 << 20) as ranks:
        *others, victim = ranks
        for rank in ranks:
            rank.follow(50)
        assert victim.process.pid is not None
        os.kill(victim.process.pid, signal.SIGSTOP)
        time.sleep(0.2)
        assert all(rank.process.is_alive() for rank in others)
        victim.process.kill()
        for rank in others:
            rank.follow()
            assert rank.ended == "RuntimeError: connection closed: the process of another rank has exited"
            assert rank.numbers == [*range(len(rank.numbers))]


def test_a_restarted_rank_is_not_taken_for_the_one_before() -> None:
    memory = mmap.mmap(-1, nbytes_for(2))
    with ranks_of(memory, 2, 7) as ranks:
        for rank in ranks:
            rank.follow()
            assert rank.ended == ""
    old = Board(0, memoryview(memory), [os.getpid()] * 2)
    old._count = 7
    posting = old.post(b"8 of the old job")
    with ranks_of(memory, 2, 1, which=(1,)) as (new,):  # which begins to count again
        new.follow()
        assert new.ended == "RuntimeError: another rank gave up this exchange and a later one"
    assert not posting.is_completed()
    assert len(posting.values) == 1
