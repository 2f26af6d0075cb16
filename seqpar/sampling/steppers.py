"""How a diffusers scheduler moves a trajectory one step on.

DDIM steps where the tokens are. Any other scheduler is stepped whole, identically on every rank, from the gathered
prediction (latent-sized), then sliced again.
"""

from __future__ import annotations

import inspect
from typing import Any, Protocol

import torch
from diffusers.schedulers.scheduling_ddim import DDIMScheduler
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor

from seqpar.kernels.ddim import Update, guided_step
from seqpar.sampling.trajectory import Trajectory


class Stepper(Protocol):
    """Moves a trajectory's state one step on, and lowers `bad` to the step where it stops being finite."""

    def __call__(self, trajectory: Trajectory, index: int, step: Tensor, bad: Tensor, /) -> None: ...


class DDIM:
    """DDIM (arXiv 2010.02502, formulas 12 and 16) on tokens."""

    def __init__(self, update: Update) -> None:
        self._update = update

    def __call__(self, trajectory: Trajectory, index: int, step: Tensor, bad: Tensor, /) -> None:
        """See `Stepper`; `step` picks the coefficients on the device."""
        cond, uncond = trajectory.branches(step)
        guided_step(trajectory.tokens, cond, uncond, self._update, step, bad)

    def restart(self, update: Update) -> None:
        """Take another run's coefficients and noise into the buffers that a captured step reads."""
        self._update.coefficients_S7.copy_(update.coefficients_S7)
        if self._update.noise_SnlC is not None and update.noise_SnlC is not None:
            self._update.noise_SnlC.copy_(update.noise_SnlC)


def ddim_update(
    trajectory: Trajectory, scheduler: Any, steps: int, eta: float, noise_NCHW: Tensor, generator: torch.Generator
) -> Update:
    """All steps of a run with a diffusers scheduler's coefficients; noise is drawn like `noise_NCHW`."""
    like = trajectory.tokens
    table = ddim_coefficients(scheduler, steps, eta).to(like.device, like.dtype)
    # drawn whole and before the loop, then sliced: the same noise for any number of ranks
    shape = tuple(noise_NCHW.shape)
    noise = [trajectory.slice(randn_tensor(shape, generator=generator)) for _ in range(steps if eta > 0 else 0)]
    drawn = torch.stack(noise) if noise else None
    return Update(table, trajectory.scale, trajectory.guided_width, clip(scheduler), drawn)


def clip(scheduler: Any) -> float | None:
    """How far from zero a predicted picture may go, None where it is not clipped."""
    return scheduler.config.clip_sample_range if scheduler.config.clip_sample else None


class Replicated:
    """Any diffusers scheduler: gather the prediction, step the whole latents on every rank alike, slice."""

    def __init__(
        self, scheduler: Any, eta: float, trajectory: Trajectory, noise: Tensor, generator: torch.Generator
    ) -> None:
        accepted = inspect.signature(scheduler.step).parameters
        options = {"eta": eta, "generator": generator}
        self._scheduler, self._options = scheduler, {key: x for key, x in options.items() if key in accepted}
        self.latents = noise.to(trajectory.tokens.device, trajectory.tokens.dtype)
        self._show(trajectory, 0)

    def __call__(self, trajectory: Trajectory, index: int, step: Tensor, bad: Tensor, /) -> None:
        """See `Stepper`; needs `index` on the host, as diffusers' schedulers do."""
        whole = trajectory.gather(trajectory.predict(step))
        timestep = self._scheduler.timesteps[index]
        self.latents = self._scheduler.step(whole, timestep, self.latents, **self._options).prev_sample
        if index + 1 < len(self._scheduler.timesteps):
            self._show(trajectory, index + 1)
        else:
            trajectory.tokens.copy_(trajectory.slice(self.latents))
        torch.where(self.latents.isfinite().all(), bad, torch.minimum(bad, step), out=bad)

    def _show(self, trajectory: Trajectory, index: int) -> None:
        """Put what the model sees at a step into the trajectory."""
        seen = self._scheduler.scale_model_input(self.latents, self._scheduler.timesteps[index])
        trajectory.tokens.copy_(trajectory.slice(seen))


def ddim_coefficients(scheduler: Any, steps: int, eta: float) -> Tensor:
    """(steps, 7) fp64: x0 = c0 x + c1 m, e = c2 x + c3 m, next = c4 x0 + c5 e + c6 noise, for model output m."""
    rows = []
    stride = scheduler.config.num_train_timesteps // steps
    for t in scheduler.timesteps.tolist():
        now = float(scheduler.alphas_cumprod[t])
        before = float(scheduler.alphas_cumprod[t - stride] if t >= stride else scheduler.final_alpha_cumprod)
        sigma = eta * ((1 - before) / (1 - now) * (1 - now / before)) ** 0.5
        x0_e = _prediction(scheduler.config.prediction_type, now**0.5, (1 - now) ** 0.5)
        rows.append((*x0_e, before**0.5, max(0.0, 1 - before - sigma**2) ** 0.5, sigma))
    return torch.tensor(rows, dtype=torch.float64)


def _prediction(kind: str, a: float, b: float) -> tuple[float, float, float, float]:
    """How x0 and noise e follow from state x = a x0 + b e and model output m: (x0/x, x0/m, e/x, e/m)."""
    if kind == "epsilon":
        if a == 0:
            raise ValueError("got prediction_type 'epsilon' with zero terminal SNR, expected 'v_prediction' or "
                             "'sample': pure noise says nothing of the picture")  # fmt: skip
        return 1 / a, -b / a, 0.0, 1.0
    if kind == "sample":
        return 0.0, 1.0, 1 / b, -a / b
    if kind == "v_prediction":
        return a, -b, b, a
    raise ValueError(f"got a scheduler with prediction_type {kind!r}, expected epsilon, sample or v_prediction")


def steps_locally(scheduler: Any) -> bool:
    """Whether this scheduler's step needs one token at a time: DDIM without dynamic thresholding."""
    return type(scheduler) is DDIMScheduler and not scheduler.config["thresholding"]


def check_eta(scheduler: Any, eta: float) -> None:
    """Raise ValueError for an amount of noise that is none, or that this scheduler does not know."""
    if not 0 <= eta <= 1:
        raise ValueError(f"got eta {eta:g}, expected 0 (deterministic) to 1 (DDPM's noise)")
    if eta > 0 and "eta" not in inspect.signature(scheduler.step).parameters:
        raise ValueError(f"got eta {eta:g} with {type(scheduler).__name__}, expected 0: this scheduler has no eta")
