"""Tests of Ctrl-C during a run: every rank ends at the same boundary, whichever the signal reached."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from seqpar.cli.args import Args
from seqpar.cli.stopping import stoppable
from seqpar.mesh.mesh import Mesh
from tests.support.pool import Pool

STEPS, AT = 8, 5


@contextmanager
def handler(wanted: Any) -> Iterator[None]:
    """Let SIGINT be handled in this way."""
    before = signal.signal(signal.SIGINT, wanted)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def interrupted(rank: int, world: int, device: torch.device, reached: int) -> tuple[int, bool, bool]:
    """Return how many steps a rank made, whether it was stopped, and whether its handler is back."""
    done, stopped, wanted = 0, False, signal.default_int_handler
    with handler(wanted):
        try:
            with stoppable(Args(), Mesh.from_env(device=device)) as boundary:
                for step in range(STEPS):
                    if (rank, step) == (reached, AT):
                        os.kill(os.getpid(), signal.SIGINT)
                    boundary()
                    done += 1
        except KeyboardInterrupt:
            stopped = True
        return done, stopped, signal.getsignal(signal.SIGINT) is wanted


@pytest.mark.parametrize(("world", "reached"), [(1, 0), (3, 0), (3, 2)])
def test_all_ranks_end_after_the_same_step(ranks: Pool, world: int, reached: int) -> None:
    assert ranks.run(world, interrupted, reached) == [(AT, True, True)] * world


def ignored(rank: int, world: int, device: torch.device) -> bool:
    """Return whether a handler of someone else stays, and decides."""
    with handler(signal.SIG_IGN), stoppable(Args(), Mesh.from_env(device=device)) as boundary:
        os.kill(os.getpid(), signal.SIGINT)
        boundary()
        return signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_another_handler_stays(ranks: Pool) -> None:
    assert ranks.run(2, ignored) == [True] * 2
