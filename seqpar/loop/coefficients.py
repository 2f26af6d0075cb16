"""The steps of DDIM, and of DDPM with the model's variances, as coefficients for one kernel (`seqpar.kernels.ddim`).

The authors of DiT and Large-DiT sample by the latter, in 250 steps. A diffusers `DDPMScheduler` with variance_type
"learned_range" selects it.
When it wins: always; unlike traced schedulers these also clip, and keep their bits between versions of this project.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import log
from typing import Any

import torch
from torch import Tensor

LEAST = 1e-20  # of a variance whose logarithm is taken, as in diffusers


@dataclass(frozen=True, eq=False)
class Coefficients:
    """The coefficients of S steps, (S, K) fp64, as `seqpar.kernels.ddim.Update` names them.

    noisy: whether each step draws noise. clipped: DDIM's use_clipped_model_output. learned: whether this is DDPM.
    """

    table_SK: Tensor
    noisy: tuple[bool, ...]
    clipped: bool = False
    learned: bool = False


def ddim_steps(scheduler: Any, options: Mapping[str, Any], begin: int) -> Coefficients:
    """Return the steps from the scheduler's evaluation `begin` on; options: keyword arguments of its step."""
    eta, clipped = options.get("eta", 0.0), bool(options.get("use_clipped_model_output"))
    table = ddim_coefficients(scheduler, eta, clipped, begin)
    return Coefficients(table, (eta > 0,) * len(table), clipped)


def clip(scheduler: Any) -> float:
    """Return the range to which the predicted x0 is clipped; infinity if it is not."""
    return scheduler.config.clip_sample_range if scheduler.config.clip_sample else float("inf")


def ddim_coefficients(scheduler: Any, eta: float, clipped: bool = False, begin: int = 0) -> Tensor:
    """Return DDIM's coefficients c of the steps from the scheduler's evaluation `begin` on, (S, 8) fp64.

    For state x, model output m and noise z: x0 = c0 x + c1 m, clipped to +-c2, e = c3 x + c4 m, next x = c5 x0 + c6 e +
    c7 z. clipped: e = c3 x + c4 x0 instead, from the clipped x0 (diffusers' use_clipped_model_output).
    A step ends one stride earlier, as in diffusers, or at the next timestep of a respaced schedule (`respace`).
    """
    rows, timesteps = [], scheduler.timesteps.tolist()
    stride = scheduler.config.num_train_timesteps // scheduler.num_inference_steps
    respaced = getattr(scheduler, "respaced", None) is scheduler.timesteps
    ends = [*timesteps[1:], -1] if respaced else [t - stride for t in timesteps]
    for t, end in list(zip(timesteps, ends, strict=True))[begin:]:
        alpha = float(scheduler.alphas_cumprod[t])
        before = float(scheduler.alphas_cumprod[end] if end >= 0 else scheduler.final_alpha_cumprod)
        sigma = eta * ((1 - before) / (1 - alpha) * (1 - alpha / before)) ** 0.5
        a, b = alpha**0.5, (1 - alpha) ** 0.5
        x0_x, x0_m, e_x, e_m = prediction_weights(scheduler.config.prediction_type, a, b)
        e_x, e_m = (1 / b, -a / b) if clipped else (e_x, e_m)
        keep, direction = before**0.5, max(0.0, 1 - before - sigma**2) ** 0.5
        rows.append((x0_x, x0_m, clip(scheduler), e_x, e_m, keep, direction, sigma))
    return torch.tensor(rows, dtype=torch.float64)


def prediction_weights(kind: str, a: float, b: float) -> tuple[float, float, float, float]:
    """Return the weights (x0/x, x0/m, e/x, e/m) that give x0 and noise e from state x = a x0 + b e and output m."""
    if kind == "epsilon":
        if a == 0:
            raise ValueError(
                "got prediction_type 'epsilon' with zero terminal SNR, expected 'v_prediction' or 'sample': the noise "
                "in a state of pure noise does not determine the picture"
            )
        return 1 / a, -b / a, 0.0, 1.0
    if kind == "sample":
        return 0.0, 1.0, 1 / b, -a / b
    if kind == "v_prediction":
        return a, -b, b, a
    raise ValueError(f"got a scheduler with prediction_type {kind!r}, expected epsilon, sample or v_prediction")


def ddpm_steps(scheduler: Any, begin: int) -> Coefficients:
    """Return the steps from the scheduler's evaluation `begin` on; one at timestep 0 adds no noise, as in diffusers."""
    noisy = tuple(t > 0 for t in scheduler.timesteps[begin:].tolist())
    return Coefficients(ddpm_coefficients(scheduler, begin), noisy, learned=True)


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
