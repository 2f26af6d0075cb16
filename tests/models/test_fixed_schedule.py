"""A model that keeps one schedule's modulation instead of the weights that make it: same results, less memory."""

from __future__ import annotations

import pytest
import torch

from seqpar import DistributedDiT, Guidance, sample
from seqpar.mesh import Mesh
from seqpar.models._label_dit import LabelDiT
from seqpar.weights.find import from_diffusers
from tests.sampling.test_sampling import LABELS, STEPS, noise, scheduler
from tests.support.tiny import diffusers_dit


def build() -> LabelDiT:
    model = from_diffusers(diffusers_dit()).build(torch.float64, torch.device("cpu"))
    assert isinstance(model, LabelDiT)
    return model


def latents(model: LabelDiT, steps: int = STEPS, labels: list[int] = LABELS) -> torch.Tensor:
    dit = DistributedDiT(model, Mesh.single())
    given = {"class_labels": torch.tensor(labels)}
    return sample(dit, scheduler(), noise(), given, steps=steps, guidance=Guidance(3.0))


def test_a_fixed_schedule_changes_no_bit_and_frees_what_it_says() -> None:
    model, schedule = build(), scheduler()
    whole, before = latents(model), sum(p.numel() for p in model.parameters())
    schedule.set_timesteps(STEPS)
    freed = model.fix_schedule(schedule.timesteps, torch.tensor(LABELS))
    after, rows = sum(p.numel() for p in model.parameters()), STEPS * 3  # two classes, and none
    assert freed == 8 * (before - after - rows * (3 * 6 + 2) * model.config.width)
    assert torch.equal(latents(model), whole)


@pytest.mark.parametrize(("steps", "labels"), [(5, LABELS), (STEPS, [3, 7, 4])])
def test_what_the_schedule_was_not_fixed_for_is_refused(steps: int, labels: list[int]) -> None:
    model, schedule = build(), scheduler()
    schedule.set_timesteps(STEPS)
    model.fix_schedule(schedule.timesteps, torch.tensor(LABELS))
    with pytest.raises(ValueError, match=r"outside the fixed schedule, .* timesteps \[0\.0, .* labels \[3, 7, 10\]"):
        latents(model, steps, labels)
