"""Tests which schedulers step on local tokens, and compares DDIM's coefficients and clipping with diffusers' step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from seqpar import DistributedDiT, Guidance, sample
from seqpar.loading.schedulers import steps_locally
from seqpar.loop.schedules import ddim_steps
from seqpar.mesh.mesh import Mesh
from tests.conftest import DEVICE
from tests.graphs.test_distributed import local
from tests.loop.test_sampling import LABELS, STEPS, by_hand, noise, scheduler
from tests.support.meshes import random
from tests.support.tiny import diffusers_dit


@pytest.mark.parametrize("prediction", ["epsilon", "sample", "v_prediction"])
@pytest.mark.parametrize("eta", [0.0, 0.7])
@pytest.mark.parametrize("steps", [1, 7, 25])
@pytest.mark.parametrize("zero_snr", [False, True])
def test_ddim_coefficients_are_diffusers(prediction: str, eta: float, steps: int, zero_snr: bool) -> None:
    """With zero terminal SNR the first state is pure noise, for which an epsilon prediction is meaningless."""
    options: Any = {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"} if zero_snr else {}
    sched = scheduler(prediction_type=prediction, **options)
    if zero_snr and prediction == "epsilon":
        sched.set_timesteps(steps)
        with pytest.raises(ValueError, match="'epsilon' with zero terminal SNR"):
            ddim_steps(sched, {"eta": eta})
        return
    sched.alphas_cumprod = sched.alphas_cumprod.double()
    sched.final_alpha_cumprod = sched.final_alpha_cumprod.double()
    sched.set_timesteps(steps)
    x, m, z = (random((2, 4, 4, 4), seed) for seed in range(3))
    for t, c in zip(sched.timesteps, ddim_steps(sched, {"eta": eta}).table_SK, strict=True):
        ours = c[5] * (c[0] * x + c[1] * m) + c[6] * (c[3] * x + c[4] * m) + c[7] * z
        theirs: Any = sched.step(m, int(t), x, eta=eta, variance_noise=z if eta else None)  # pyright: ignore
        assert torch.allclose(ours, theirs.prev_sample, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("config", "expected"), [({}, True), ({"thresholding": True}, False), ({"clip_sample": True}, True)]
)
def test_which_schedulers_step_locally(config: dict[str, Any], expected: bool) -> None:
    assert steps_locally(scheduler(**config)) == expected
    assert not steps_locally(scheduler("EulerDiscreteScheduler"))


def test_ddim_with_clipping_equals_diffusers() -> None:
    sched = scheduler(clip_sample=True, clip_sample_range=0.5)
    dit = DistributedDiT(diffusers_dit().to(DEVICE), Mesh.single(DEVICE), local=local(torch.device(DEVICE)))
    labels = {"class_labels": torch.tensor(LABELS)}
    got = sample(dit, sched, noise(), labels, steps=STEPS, guidance=Guidance(1.0)).cpu()
    truth = by_hand(noise(), STEPS, Guidance(1.0), scheduler(clip_sample=True, clip_sample_range=0.5))
    assert (got - truth).abs().max() < 1e-4
