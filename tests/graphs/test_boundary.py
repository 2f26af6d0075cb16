"""Tests of the step boundary: ranks end a run together, whoever wants it, and go on with the next one."""

from __future__ import annotations

import pytest
import torch
from diffusers.schedulers.scheduling_ddim import DDIMScheduler

from seqpar.loading.errors import FAILURES
from seqpar.loop.distributed import DistributedDiT
from seqpar.loop.loop import Sampler
from seqpar.mesh.boundary import CancelledError, Reason, StepBoundary
from seqpar.mesh.mesh import gathered
from seqpar.mesh.watch import LostRankError
from seqpar.types.guidance import Guidance
from tests.support.meshes import mesh_for
from tests.support.pool import Pool
from tests.support.tiny import diffusers_dit

Wants = tuple[Reason | None, ...]


def passed(rank: int, world: int, device: torch.device, every: tuple[Wants, ...]) -> tuple[int, str]:
    """Return how many boundaries this rank has passed, and why it did not pass the next. every: by place and rank."""
    places = iter(every)
    boundary, count = StepBoundary(mesh_for("ulysses", world, device), lambda: next(places)[rank]), 0
    try:
        for count in range(len(every)):  # noqa: B007 (the last one counts)
            boundary()
    except CancelledError as error:
        return count, error.reason
    return len(every), "none"


@pytest.mark.parametrize("world", [1, 2, 3])
def test_all_ranks_end_where_one_of_them_wants_it(ranks: Pool, world: int) -> None:
    nobody: Wants = (None,) * world
    last: Wants = (*nobody[1:], "cancelled")
    assert ranks.run(world, passed, (nobody, nobody, last, last)) == [(2, "cancelled")] * world
    assert ranks.run(world, passed, (nobody, nobody)) == [(2, "none")] * world
    assert ranks.run(world, passed, ((*nobody[1:], "deadline"), last)) == [(0, "deadline")] * world


def odd(rank: int, world: int, device: torch.device) -> str:
    """Return the error of a boundary at which rank 1 sends a reason that nobody knows, as another version would."""
    mesh = mesh_for("ulysses", world, device)
    if rank == 1:
        gathered(mesh.world, device, torch.tensor([200], dtype=torch.uint8), "the step boundary")
        return ""
    with pytest.raises(LostRankError) as error:
        StepBoundary(mesh, lambda: None)()
    return str(error.value)


def test_a_reason_that_nobody_knows_is_an_error_of_its_own(ranks: Pool) -> None:
    told, *_ = ranks.run(2, odd)
    assert told.startswith("got reason 200 at the step boundary, expected 0 to 2; another process took the place")


def runs(rank: int, world: int, device: torch.device, cfg: int, at: int) -> tuple[int, bool]:
    """Give a run of our loop up after a step; return its number of steps, and whether the next has a first one's bits.

    Rank 0 hears of it, as the rank of a server that speaks with the front.
    """
    mesh, steps = mesh_for("ulysses", world, device, cfg=cfg), list[int]()
    dit = DistributedDiT(diffusers_dit().to(device), mesh, "ulysses", "reference", "collective")
    boundary = StepBoundary(mesh, lambda: "cancelled" if rank == 0 and len(steps) == at else None)

    def on_step(index: int) -> None:
        steps.append(index)
        boundary()

    noise, labels = torch.ones(2, 4, 8, 8, dtype=torch.float64), {"class_labels": torch.tensor([1, 3])}
    told = {"steps": 5, "guidance": Guidance(3.0)}
    with Sampler(dit) as sampler:
        first = sampler(DDIMScheduler(), noise, labels, **told)
        with pytest.raises(CancelledError):
            sampler(DDIMScheduler(), noise, labels, on_step=on_step, **told)
        again = sampler(DDIMScheduler(), noise, labels, **told)
    return len(steps), torch.equal(first, again)


@pytest.mark.parametrize(("world", "cfg", "at"), [(1, 1, 1), (2, 1, 3), (2, 2, 4), (3, 1, 5)])
def test_a_run_ends_after_a_step_and_the_next_one_has_the_same_bits(ranks: Pool, world: int, cfg: int, at: int) -> None:
    assert ranks.run(world, runs, cfg, at) == [(at, True)] * world


def test_nothing_takes_a_run_that_was_given_up_for_a_fault() -> None:
    assert not issubclass(CancelledError, (Exception, *FAILURES))
