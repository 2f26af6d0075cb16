"""Tests of the sampler that keeps its run: a call has a new run's bits, and compatible calls reuse the kept run."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from diffusers.schedulers.scheduling_ddim import DDIMScheduler
from torch import Tensor

from seqpar import DistributedDiT, Guidance, Sampler, sample
from seqpar.loop import loop
from seqpar.loop.loop import draw_noise
from seqpar.loop.request import Request
from seqpar.loop.run import begin
from seqpar.loop.steppers import Traced
from tests.conftest import DEVICE
from tests.graphs.test_distributed import local
from tests.loop.test_sampling import ALONE, NAMED, NOISY, STEPS, Layout, engine, scheduler
from tests.loop.test_sampling import settings as settings_of
from tests.support.meshes import mesh_for
from tests.support.pool import Pool
from tests.support.tiny import diffusers_dit

# noise seed, labels, guidance, the scheduler's beta_end; another schedule changes only numbers
Order = tuple[int, tuple[int, ...], Guidance, float]
FIRST: Order = (2, (3, 7, 3), Guidance(3.0), 0.02)
SAME_KIND: list[Order] = [(5, (1, 1, 4), Guidance(2.0), 0.02), (2, (7, 3, 3), Guidance(3.0), 0.01), FIRST]
OTHERS: list[Order] = [
    (2, (3, 7, 1), Guidance(3.0), 0.02),
    (2, (3, 7, 3), Guidance(3.0, 3), 0.02),
    (2, (3, 7), Guidance(3.0), 0.02),
]


def arguments(order: Order, eta: float = 0.0) -> tuple[tuple[Any, ...], dict[str, Any]]:
    seed, labels, guidance, beta_end = order
    noise = draw_noise((len(labels), 4, 6, 10), torch.Generator().manual_seed(seed))
    generator = torch.Generator().manual_seed(seed)
    settings = {"steps": STEPS, "guidance": guidance, "eta": eta, "generator": generator}
    return (scheduler(beta_end=beta_end), noise, {"class_labels": torch.tensor(labels)}), settings


def run(
    rank: int, world: int, device: torch.device, layout: Layout, eta: float, orders: list[Order]
) -> list[tuple[bool, Tensor, Tensor]]:
    """For each order: whether the kept run served it, its latents, and the latents of a new run."""
    model = diffusers_dit().to(device, torch.bfloat16 if device.type == "cuda" else torch.float64)
    dit = DistributedDiT(model, mesh_for(layout[0], world, device, layout[1]), layout[0], local(device))
    found = []
    with Sampler(dit) as sampler:
        for order in orders:
            before = sampler._run
            (given, settings), (same, again) = arguments(order, eta), arguments(order, eta)
            got = sampler(*given, **settings)
            found.append((sampler._run is before, got, sample(dit, *same, **again)))
    assert sampler._run is None  # the end of the `with` block releases the run
    return found


@pytest.mark.parametrize(
    ("world", "layout", "eta"),
    [(1, ALONE, 1.0), (2, ("ulysses", 2, 1), 1.0), (3, ("kv_gather", 1, 1), 1.0), (4, ("usp", 1, 1), 0.0)],
)
def test_a_kept_run_has_the_bits_of_a_new_one(ranks: Pool, world: int, layout: Layout, eta: float) -> None:
    for found in ranks.run(world, run, layout, eta, [FIRST, *SAME_KIND]):
        assert [kept for kept, _, _ in found] == [False, True, True, True]
        assert all(torch.equal(got, alone) for _, got, alone in found)
        first, *others = (got for _, got, _ in found)
        assert [torch.equal(first, other) for other in others] == [False, False, True]


def test_a_run_of_another_kind_begins_again(ranks: Pool) -> None:
    """Of other distinct labels, guidance or number of images."""
    found = ranks.run(1, run, ALONE, 0.0, [order for other in OTHERS for order in (FIRST, other)])[0]
    assert not any(kept for kept, _, _ in found)
    assert all(torch.equal(got, alone) for _, got, alone in found)


@pytest.mark.parametrize("name", ["UniPC", "DPM++ 2M", "Heun", "SDE-DPM++ 2M", "Euler"])
def test_a_kept_run_has_the_bits_of_a_new_one_whatever_the_history_holds(name: str) -> None:
    case, found = (NAMED | NOISY)[name], []
    with Sampler(engine(1, torch.device(DEVICE), ALONE, case)) as sampler:
        for _ in range(2):
            labels = {"class_labels": torch.tensor([3, 7])}
            found.append(sampler(case.scheduler(), case.noise(), labels, **settings_of(case)))
            assert sampler._run is not None
            stepper = sampler._run.steppers["image"]
            assert isinstance(stepper, Traced)
            for ring in (stepper.history.states_PnlC, stepper.history.outputs_QnlC):
                if ring is not None:
                    ring.fill_(float("nan"))
    assert torch.equal(*found)


def test_a_schedule_is_traced_again_where_its_scheduler_may_have_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = [type("DDIMScheduler", (DDIMScheduler,), {"__module__": "x", "__qualname__": "x"}) for _ in range(2)]
    traced = Mock(side_effect=lambda *_: object())
    monkeypatch.setattr(loop, "decide", traced)
    sampler = Sampler(DistributedDiT(diffusers_dit(), mesh_for("ulysses", 1, torch.device("cpu"))))

    def is_traced(kind: Any, **change: Any) -> bool:
        before, made = traced.call_count, kind(timestep_spacing="trailing")
        vars(made).update(change)
        sampler._decided(made, {"eta": None})
        return traced.call_count > before

    assert [is_traced(kind) for kind in (kinds[0], kinds[0], kinds[1], kinds[1])] == [True, False, True, False]
    first, other = torch.zeros(2, 2000, dtype=torch.bfloat16)
    other[1000] = 1.0
    assert [is_traced(kinds[1], x=x) for x in (first, first.clone(), other)] == [True, False, True]
    held = [deque([x]) for x in (first, other)] + [SimpleNamespace(x=x) for x in (first, other)]
    assert all(is_traced(kinds[1], x=x) for x in held)


def latents(rank: int, world: int, device: torch.device, pictures: slice) -> Tensor:
    """Latents in fp32 of some of two images of one token each, which the ranks share."""
    dit = DistributedDiT(diffusers_dit().to(device), mesh_for("ulysses", world, device, data=world), "ulysses")
    noise = draw_noise((2, 4, 2, 2), torch.Generator().manual_seed(1))[pictures]
    prompt = {"class_labels": torch.full((len(noise),), 3)}
    return sample(dit, scheduler(), noise, prompt, steps=STEPS, guidance=Guidance(1.0))


def test_pictures_of_one_token_have_the_bits_of_one_rank_that_computes_as_many_rows(ranks: Pool) -> None:
    """Splitting rows changes how many a matrix product has, and nothing else."""
    both, apart = slice(2), [ranks.run(1, latents, slice(one, one + 1))[0] for one in range(2)]
    for got in ranks.run(2, latents, both):
        assert torch.equal(got, torch.cat(apart))
    (alone,) = ranks.run(1, latents, both)
    torch.testing.assert_close(torch.cat(apart), alone, rtol=1e-5, atol=1e-6)


def test_a_scheduler_that_steps_on_the_host_is_never_kept() -> None:
    dit = DistributedDiT(diffusers_dit(), mesh_for("ulysses", 1, torch.device("cpu")))
    (_, noise, labels), settings = arguments(FIRST)
    with Sampler(dit) as sampler:
        runs = []
        for _ in range(2):
            sampler(scheduler(thresholding=True), noise, labels, **settings)
            runs.append(sampler._run)
    assert runs[0] is not runs[1]


def test_a_graph_is_not_replayed_after_its_buffers_were_freed() -> None:
    dit = DistributedDiT(diffusers_dit())
    given, settings = arguments(FIRST)
    run = begin(dit, Request(*given, **settings))
    run._graph = graph = Mock()
    run.step()
    dit.release()
    with pytest.raises(ValueError, match=r"cannot step after DistributedDiT\.release"):
        run.step()
    assert graph.replay.call_count == 1
