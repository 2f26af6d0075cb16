# pyright cannot infer the types of diffusers' modules
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
"""Tests of long Python sessions: what stays of pipelines that are parallelized, called and released or dropped."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import seqpar
from tests.support.pool import Pool
from tests.support.tiny_flux import arguments, theirs, tiny

ROUNDS = 20
KEPT = ("descriptors", "threads", "process groups", "mappings")


def kept() -> list[int]:
    """Return how many things of each kind of `KEPT` this process has."""
    groups = len(dist.distributed_c10d._world.pg_map)
    lines = Path("/proc/self/maps").read_bytes().count(b"\n")
    return [*(len(os.listdir(f"/proc/self/{name}")) for name in ("fd", "task")), groups, lines]


def by_release(module: nn.Module, rank: int, number: int) -> None:
    seqpar.release(module)


def by_collection(module: nn.Module, rank: int, number: int) -> None:
    """Rank 1 collects later than rank 0, after its next call."""


def by_another_thread(module: nn.Module, rank: int, number: int) -> None:
    """Collect what the round before has left in another thread, as a group of NCCL is: its ranks end it together."""
    thread = threading.Thread(target=gc.collect)
    thread.start()
    thread.join()


def by_error(module: nn.Module, rank: int, number: int) -> None:
    """After the release, a call that finds an argument wrong only when its mesh is there."""
    seqpar.release(module)
    with pytest.raises(ValueError, match="got native"):
        seqpar.parallelize(tiny(), native=rank == 0)


ENDS: dict[str, Callable[[nn.Module, int, int], None]] = {
    "released": by_release,
    "collected": by_collection,
    "collected by another thread": by_another_thread,
    "refused": by_error,
}


def grown(rank: int, world: int, device: torch.device, how: str, transport: str) -> dict[str, int]:
    """Return how much more is kept after many rounds than after the first ones."""
    before = list[int]()
    for number in range(ROUNDS + 4):
        module = tiny(num_layers=1, num_single_layers=1).to(device)
        seqpar.parallelize(module, transport=transport)
        theirs(module, arguments("dev", device=device))
        ENDS[how](module, rank, number)
        del module
        if how != "collected" or rank == 0 or number % 2:
            gc.collect()
        if number == 3:
            before = kept()
    return {name: new - old for name, new, old in zip(KEPT, kept(), before, strict=True)}


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads /proc")
@pytest.mark.parametrize("how", ENDS)
def test_nothing_stays_of_a_session(ranks: Pool, how: str) -> None:
    """A socket, a thread or a group that stayed of every round would be there 20 times."""
    for more in ranks.run(2, grown, how, "peer" if how == "released" else "collective"):
        assert max(more.values()) < ROUNDS // 2, more
        assert more["process groups"] <= 1  # that which the next `parallelize` ends
