"""DDIM on this rank's tokens, as a local update inside the CUDA graph: coefficients, noise and clipping.

When it wins: always; unlike traced schedulers it also clips, and it keeps its bits between versions of this project.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers.schedulers.scheduling_ddim import DDIMScheduler
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor

from seqpar.kernels.ddim import Update, guided_step
from seqpar.sampling.state import State


class DDIM:
    """DDIM (arXiv 2010.02502, formulas 12 and 16) on tokens."""

    def __init__(self, state: State, update: Update) -> None:
        self._state, self._update = state, update

    def __call__(self, cond: Tensor, uncond: Tensor | None, index: int, step: Tensor, bad: Tensor, /) -> None:
        """Step the state; see `Stepper`. `step` selects the coefficients on the device."""
        guided_step(self._state.tokens, cond, uncond, self._update, step, bad)

    def restart(self, update: Update) -> None:
        """Copy another run's coefficients and noise into the buffers that a captured step reads."""
        self._update.coefficients_S7.copy_(update.coefficients_S7)
        self._update.guidance_S.copy_(update.guidance_S)
        if self._update.noise_SnlC is not None and update.noise_SnlC is not None:
            self._update.noise_SnlC.copy_(update.noise_SnlC)


def ddim_update(
    state: State,
    scheduler: Any,
    options: Mapping[str, Any],
    begin: int,
    guidance_S: Tensor,
    shape: tuple[int, ...],
    generator: torch.Generator,
) -> Update:
    """Return all steps of a run by a diffusers DDIM scheduler, from its evaluation `begin` on.

    options: keyword arguments of its step. shape: the shape of the whole latents.
    """
    like = state.tokens
    eta, clipped = options.get("eta", 0.0), bool(options.get("use_clipped_model_output"))
    table = ddim_coefficients(scheduler, eta, clipped, begin).to(like.device, like.dtype)
    # drawn whole before the loop and then split, so that any number of ranks has the same noise
    draws = len(table) if eta > 0 else 0
    noise = [state.slice(randn_tensor(shape, generator=generator, dtype=like.dtype)) for _ in range(draws)]
    drawn = torch.stack(noise) if noise else None
    return Update(table, guidance_S, state.guided_width, clip(scheduler), drawn, clipped)


def steps_locally(scheduler: Any) -> bool:
    """Return whether this is DDIM without dynamic thresholding, which has a kernel of its own."""
    return type(scheduler) is DDIMScheduler and not scheduler.config["thresholding"]


def clip(scheduler: Any) -> float | None:
    """Return the range to which the predicted x0 is clipped, or None if it is not."""
    return scheduler.config.clip_sample_range if scheduler.config.clip_sample else None


def ddim_coefficients(scheduler: Any, eta: float, clipped: bool = False, begin: int = 0) -> Tensor:
    """Return DDIM's coefficients c, (S, 7) fp64.

    For state x and model output m: x0 = c0 x + c1 m, e = c2 x + c3 m, next x = c4 x0 + c5 e + c6 noise.
    clipped: e = c2 x + c3 x0 instead, from the clipped x0 (diffusers' use_clipped_model_output).
    A step ends one stride earlier, as in diffusers, or at the next timestep of a respaced schedule (`respace`).
    """
    rows, timesteps = [], scheduler.timesteps.tolist()
    stride = scheduler.config.num_train_timesteps // scheduler.num_inference_steps
    respaced = getattr(scheduler, "respaced", None) is scheduler.timesteps
    ends = [*timesteps[1:], -1] if respaced else [t - stride for t in timesteps]
    for t, end in list(zip(timesteps, ends, strict=True))[begin:]:
        now = float(scheduler.alphas_cumprod[t])
        before = float(scheduler.alphas_cumprod[end] if end >= 0 else scheduler.final_alpha_cumprod)
        sigma = eta * ((1 - before) / (1 - now) * (1 - now / before)) ** 0.5
        a, b = now**0.5, (1 - now) ** 0.5
        x0_x, x0_m, e_x, e_m = prediction_weights(scheduler.config.prediction_type, a, b)
        e_x, e_m = (1 / b, -a / b) if clipped else (e_x, e_m)
        rows.append((x0_x, x0_m, e_x, e_m, before**0.5, max(0.0, 1 - before - sigma**2) ** 0.5, sigma))
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
