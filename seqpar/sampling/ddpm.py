"""DDPM with the variances that the model predicts, as coefficients for the kernel that it shares with DDIM.

The authors of DiT and Large-DiT sample so, in 250 steps. A diffusers `DDPMScheduler` with variance_type "learned_range"
selects it. When it wins: always; the alternative is to gather every prediction and step whole latents on every rank.
"""

from __future__ import annotations

from math import log
from typing import Any

import torch
from diffusers.schedulers.scheduling_ddpm import DDPMScheduler
from torch import Tensor

from seqpar.sampling.ddim import clip, prediction_weights
from seqpar.sampling.one_step import Coefficients

LEAST = 1e-20  # of a variance whose logarithm is taken, as in diffusers


def ddpm_steps(scheduler: Any, begin: int) -> Coefficients:
    """Return the steps from the scheduler's evaluation `begin` on; one at timestep 0 adds no noise, as in diffusers."""
    noisy = tuple(t > 0 for t in scheduler.timesteps[begin:].tolist())
    return Coefficients(ddpm_coefficients(scheduler, begin), noisy, learned=True)


def learns_range(scheduler: Any) -> bool:
    """Return whether this is DDPM whose variance the model interpolates, without dynamic thresholding."""
    config = scheduler.config
    return type(scheduler) is DDPMScheduler and config.variance_type == "learned_range" and not config.thresholding


def ddpm_coefficients(scheduler: Any, begin: int = 0) -> Tensor:
    """Return DDPM's coefficients c of the steps from the scheduler's evaluation `begin` on, (S, 7) fp64.

    They come from fp64 products of the scheduler's betas. For state x, model output m, its v and noise z: x0 = c0 x +
    c1 m, clipped to +-c2, next x = c3 x0 + c4 x + exp(c5 + c6 v) z. A step ends at the next timestep of the schedule,
    the last one at x0.
    """
    rows, timesteps = [], scheduler.timesteps.tolist()
    alphas = torch.cumprod(1 - scheduler.betas.double(), 0).tolist()
    for t, end in list(zip(timesteps, [*timesteps[1:], -1], strict=True))[begin:]:
        alpha, before = alphas[t], alphas[end] if end >= 0 else 1.0
        beta = 1 - alpha / before
        x0_x, x0_m, _, _ = prediction_weights(scheduler.config.prediction_type, alpha**0.5, (1 - alpha) ** 0.5)
        keep, stay = before**0.5 * beta / (1 - alpha), (alpha / before) ** 0.5 * (1 - before) / (1 - alpha)
        # the logarithm of sigma is half that of the variance, and v = -1 and 1 stand for its bounds
        low, high = log(max((1 - before) / (1 - alpha) * beta, LEAST)) / 2, log(beta) / 2
        rows.append((x0_x, x0_m, clip(scheduler), keep, stay, (high + low) / 2, (high - low) / 2))
    return torch.tensor(rows, dtype=torch.float64)


def check_variances(config: Any) -> None:
    """Raise ValueError if a model of this config predicts no variances; config: has in_channels and out_channels."""
    if config.out_channels < 2 * config.in_channels:
        raise ValueError(
            f"got variance_type 'learned_range' with a model of {config.out_channels} output channels, expected "
            f"{2 * config.in_channels}, half of them variances; take variance_type 'fixed_small'"
        )
