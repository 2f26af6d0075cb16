"""The denoising loop: predict, guide, step, all on this rank's tokens.

DDIM steps where the tokens are. Any other diffusers scheduler is stepped whole, identically on every rank, from the
gathered prediction (latent-sized), then sliced again. Nothing in the DDIM loop waits on the host.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from diffusers.schedulers.scheduling_ddim import DDIMScheduler
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor

from seqpar.distributed import DistributedDiT
from seqpar.trajectory import Conditions, Guidance, Trajectory


class Stepper(Protocol):
    """Moves a trajectory's state from one step to the next."""

    def __call__(self, trajectory: Trajectory, prediction: Tensor, index: int, step: Tensor, /) -> None: ...


def sample(
    dit: DistributedDiT,
    scheduler: Any,
    noise_NCHW: Tensor,
    labels: Mapping[str, Tensor],
    *,
    steps: int,
    guidance: Guidance,
    eta: float = 0.0,
    generator: torch.Generator | None = None,
    on_step: Callable[[int], None] = lambda index: None,
) -> Tensor:
    """Latents (N, C, H, W) from noise of that shape, whole and equal on every rank.

    scheduler: diffusers'. eta > 0 adds noise at each step, drawn from `generator` (the same seed on every rank).
    on_step(index) is called when a step has been queued; on a GPU it may still be running.
    Raises ValueError for arguments that do not fit, and where the latents stop being finite (says at which step).
    """
    scheduler.set_timesteps(steps)
    timesteps = torch.as_tensor(scheduler.timesteps)
    conditions = Conditions(timesteps, labels)
    noise = noise_NCHW * float(getattr(scheduler, "init_noise_sigma", 1.0))
    trajectory = dit.trajectory(noise, conditions, guidance)
    advance: Stepper
    if steps_locally(scheduler):
        advance = DDIM(scheduler, steps, eta, trajectory, noise_NCHW.shape, generator)
    else:
        advance = Replicated(scheduler, eta, trajectory, noise, generator)
    bad = torch.full((), len(timesteps), dtype=torch.int64, device=dit.device)
    step = torch.zeros((), dtype=torch.int64, device=dit.device)
    with torch.inference_mode():
        for chunk in trajectory.chunks():
            for index in chunk:
                advance(trajectory, trajectory.predict(step), index, step)
                torch.where(trajectory.tokens.isfinite().all(), bad, torch.minimum(bad, step), out=bad)
                step += 1
                on_step(index)
        latents = advance.latents if isinstance(advance, Replicated) else trajectory.gather()
    check_finite(min(dit.mesh.collect(int(bad))), timesteps)
    return latents


def steps_locally(scheduler: Any) -> bool:
    """Whether this scheduler's step needs one token at a time: DDIM without dynamic thresholding."""
    return type(scheduler) is DDIMScheduler and not scheduler.config["thresholding"]


def draw_noise(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """fp32 noise on the CPU in one draw for all images: the same bits for any number and kind of ranks."""
    return randn_tensor(shape, generator=generator, device=torch.device("cpu"), dtype=torch.float32)


def digest(latents: Tensor) -> str:
    """16 hex digits that differ where a bit differs: to compare runs on other meshes or machines."""
    return hashlib.sha256(latents.cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def check_finite(first_bad: int, timesteps: Tensor) -> None:
    """Raise ValueError where a step produced NaN or infinity."""
    if first_bad < len(timesteps):
        raise ValueError(
            f"latents stopped being finite at step {first_bad + 1} of {len(timesteps)} (timestep "
            f"{timesteps[first_bad].item():g}); try dtype fp32, a lower guidance, or check the weights"
        )


class DDIM:
    """DDIM (arXiv 2010.02502, formulas 12 and 16) on tokens, with a diffusers scheduler's coefficients."""

    def __init__(
        self,
        scheduler: Any,
        steps: int,
        eta: float,
        trajectory: Trajectory,
        shape: tuple[int, ...],
        generator: torch.Generator | None,
    ) -> None:
        like = trajectory.tokens
        table = ddim_coefficients(scheduler, steps, eta)
        self._coefficients = table.to(like.device, like.dtype)
        self._clip = scheduler.config.clip_sample_range if scheduler.config.clip_sample else None
        # drawn whole and before the loop, then sliced: the same noise for any number of ranks
        self._noise = [
            trajectory.slice(randn_tensor(shape, generator=generator)) for _ in range(steps if eta > 0 else 0)
        ]

    def __call__(self, trajectory: Trajectory, prediction: Tensor, index: int, step: Tensor, /) -> None:
        """See `Stepper`; `step` picks the coefficients on the device (indexing with it would wait for the host)."""
        x0_x, x0_m, e_x, e_m, keep, direction, sigma = self._coefficients.index_select(0, step.view(1))[0].unbind()
        x0 = x0_x * trajectory.tokens + x0_m * prediction
        x0 = x0 if self._clip is None else x0.clamp(-self._clip, self._clip)
        tokens = keep * x0 + direction * (e_x * trajectory.tokens + e_m * prediction)
        trajectory.tokens.copy_(tokens + sigma * self._noise[index] if self._noise else tokens)


class Replicated:
    """Any diffusers scheduler: gather the prediction, step the whole latents on every rank alike, slice."""

    def __init__(
        self, scheduler: Any, eta: float, trajectory: Trajectory, noise: Tensor, generator: torch.Generator | None
    ) -> None:
        accepted = inspect.signature(scheduler.step).parameters
        if eta > 0 and "eta" not in accepted:
            raise ValueError(f"got eta={eta} with {type(scheduler).__name__}, expected 0: this scheduler has no eta")
        options = {"eta": eta, "generator": generator}
        self._scheduler, self._options = scheduler, {key: x for key, x in options.items() if key in accepted}
        self.latents = noise.to(trajectory.tokens.device, trajectory.tokens.dtype)
        self._show(trajectory, 0)

    def __call__(self, trajectory: Trajectory, prediction: Tensor, index: int, step: Tensor, /) -> None:
        """See `Stepper`; needs `index` on the host, as diffusers' schedulers do."""
        whole = trajectory.gather(prediction)
        timestep = self._scheduler.timesteps[index]
        self.latents = self._scheduler.step(whole, timestep, self.latents, **self._options).prev_sample
        if index + 1 < len(self._scheduler.timesteps):
            self._show(trajectory, index + 1)
        else:
            trajectory.tokens.copy_(trajectory.slice(self.latents))

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
        rows.append((*x0_e, before**0.5, (1 - before - sigma**2) ** 0.5, sigma))
    return torch.tensor(rows, dtype=torch.float64)


def _prediction(kind: str, a: float, b: float) -> tuple[float, float, float, float]:
    """How x0 and noise e follow from state x = a x0 + b e and model output m: (x0/x, x0/m, e/x, e/m)."""
    known = {"epsilon": (1 / a, -b / a, 0.0, 1.0), "sample": (0.0, 1.0, 1 / b, -a / b), "v_prediction": (a, -b, b, a)}
    if kind not in known:
        raise ValueError(f"got a scheduler with prediction_type {kind!r}, expected one of {', '.join(known)}")
    return known[kind]
