"""Tests of pipelines whose runs are given up: on all ranks at the same place, and the next picture is the same."""

from __future__ import annotations

import pytest
import torch

import seqpar
from seqpar.mesh.boundary import CancelledError, Reason, StepBoundary
from seqpar.transformer.parallelize import passing
from tests.support.meshes import mesh as make_mesh
from tests.support.pool import Pool
from tests.transformer.test_pipelines import CASES

pytestmark = pytest.mark.slow


class Wants:
    """Wants a run to end when it is asked for the time `place`; None: never."""

    def __init__(self, place: int | None) -> None:
        self.asked, self._place = 0, place

    def __call__(self) -> Reason | None:
        self.asked += 1
        return "cancelled" if self.asked == self._place else None


def given_up(rank: int, world: int, device: torch.device, name: str, cfg: int) -> tuple[int, list[int], list[bool]]:
    """Give a pipeline's calls up at places from the first to the last, as the last rank wants it.

    Returns how many boundaries a whole call passes, where each call ended, and whether the call after it has the bits
    of the first one.
    """
    case, mesh = CASES[name], make_mesh(device, cfg=cfg)
    pipe, passes = seqpar.parallelize(case.pipe(), mesh), list[int]()
    case.pictures(pipe, rank)  # from now on it is known whether a step has two calls
    with passing(pipe, lambda: passes.append(0)):
        first = case.pictures(pipe, rank)
    count, ends, same = len(passes), list[int](), list[bool]()
    for place in sorted({1, count // 2 + 1, count}):
        wants = Wants(place if rank == world - 1 else None)
        with pytest.raises(CancelledError), passing(pipe, StepBoundary(mesh, wants)):
            case.pictures(pipe, rank)
        ends.append(wants.asked)
        same.append(torch.equal(first, case.pictures(pipe, rank)))
    seqpar.release(pipe)
    return count, ends, same


PLACES = [
    (1, 1, "sd3"),
    (2, 1, "flux"),
    (2, 2, "flux, true guidance"),
    (2, 2, "wan"),
    (2, 1, "wan, two experts"),
    (2, 2, "qwen-image"),
    (3, 1, "pixart"),
    (2, 1, "image to image"),
]


@pytest.mark.parametrize(("world", "cfg", "name"), PLACES)
def test_a_pipeline_ends_at_any_place_and_goes_on_with_the_same_bits(
    ranks: Pool, world: int, cfg: int, name: str
) -> None:
    for count, ends, same in ranks.run(world, given_up, name, cfg):
        assert count >= 3  # a call of the transformer in each step
        assert ends == sorted({1, count // 2 + 1, count})
        assert all(same), same


def test_a_pipeline_that_is_not_parallelized_is_refused() -> None:
    with pytest.raises(ValueError, match="is not parallelized"), passing(CASES["flux"].pipe(), lambda: None):
        pass
