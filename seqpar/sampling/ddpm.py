"""DDPM with the variances that the model predicts, on this rank's tokens, as a local update inside the CUDA graph.

The authors of DiT and Large-DiT sample so, in 250 steps. A diffusers `DDPMScheduler` with variance_type "learned_range"
selects it. Noise is drawn whole on the CPU, in the order of the steps, and every rank keeps its share, so that any
number of ranks has the same noise; a long run of large latents draws it in chunks, before the first step of each.
When it wins: always; the alternative is to gather every prediction and step whole latents on every rank.
"""

from __future__ import annotations

from math import log
from typing import Any

import torch
from diffusers.schedulers.scheduling_ddpm import DDPMScheduler
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor

from seqpar.kernels.ddpm import Steps, guided_ddpm
from seqpar.sampling.ddim import clip, prediction_weights
from seqpar.sampling.state import State

NOISE_BYTES = 256 * 2**20  # most that a rank keeps of a run's noise at a time
LEAST = 1e-20  # of a variance whose logarithm is taken, as in diffusers


class DDPM:
    """DDPM (arXiv 2006.11239) with learned variances (arXiv 2102.09672, formula 15) on tokens."""

    def __init__(
        self, state: State, scheduler: Any, begin: int, guidance_S: Tensor, generator: torch.Generator
    ) -> None:
        """Set up the steps from the scheduler's evaluation `begin` on."""
        self._state = state
        table, like = ddpm_coefficients(scheduler, begin), state.tokens
        rows = NOISE_BYTES // max(1, like.numel() * like.element_size())
        noise = like.new_zeros((max(1, min(len(table), rows)), *like.shape))
        first = torch.zeros((), dtype=torch.int64, device=like.device)
        self._steps = Steps(table.to(like.device), guidance_S, noise, first, state.guided_width)
        self._begin(scheduler, begin, generator)

    def __call__(self, cond: Tensor, uncond: Tensor | None, index: int, step: Tensor, bad: Tensor, /) -> None:
        """Step the state; see `Stepper`. `step` selects coefficients and noise on the device."""
        guided_ddpm(self._state.tokens, cond, uncond, self._steps, step, bad)

    def restart(self, scheduler: Any, begin: int, guidance_S: Tensor, generator: torch.Generator) -> None:
        """Copy another run's coefficients and noise into the buffers that a captured step reads."""
        self._steps.coefficients_S7.copy_(ddpm_coefficients(scheduler, begin))
        self._steps.guidance_S.copy_(guidance_S)
        self._begin(scheduler, begin, generator)

    def load(self, index: int) -> None:
        """Draw the noise of the chunk of steps that holds this one, unless it is loaded already.

        Chunks are drawn in order; the first one starts the same sequence again.
        """
        noise = self._steps.noise_TnlC
        first = index // len(noise) * len(noise)
        if first == self._loaded:
            return
        if first == 0:
            self._generator.set_state(self._before)
        for row, noisy in zip(noise, self._noisy[first : first + len(noise)], strict=False):
            if noisy:
                row.copy_(self._drawn())
            else:
                row.zero_()
        self._steps.first.fill_(first)
        self._loaded = first

    def _drawn(self) -> Tensor:
        """Return this rank's share of the next noise of the whole latents."""
        state = self._state
        return state.slice(randn_tensor(state.shape, generator=self._generator, dtype=state.tokens.dtype))

    def _begin(self, scheduler: Any, begin: int, generator: torch.Generator) -> None:
        self._generator, self._before, self._loaded = generator, generator.get_state(), -1
        self._noisy = [t > 0 for t in scheduler.timesteps[begin:].tolist()]
        self.load(0)


def learns_range(scheduler: Any) -> bool:
    """Return whether this is DDPM whose variance the model interpolates, without dynamic thresholding."""
    config = scheduler.config
    return type(scheduler) is DDPMScheduler and config.variance_type == "learned_range" and not config.thresholding


def ddpm_coefficients(scheduler: Any, begin: int = 0) -> Tensor:
    """Return DDPM's coefficients c, (S, 7) fp64, from fp64 products of the scheduler's betas.

    For state x, model output m, its v and noise z: x0 = c0 x + c1 m, clipped to +-c6, next x = c2 x0 + c3 x +
    exp(c4 + c5 v) z. A step ends at the next timestep of the schedule, the last one at x0.
    """
    rows, timesteps = [], scheduler.timesteps.tolist()
    alphas, bound = torch.cumprod(1 - scheduler.betas.double(), 0).tolist(), clip(scheduler)
    for t, end in list(zip(timesteps, [*timesteps[1:], -1], strict=True))[begin:]:
        now, before = alphas[t], alphas[end] if end >= 0 else 1.0
        beta = 1 - now / before
        x0_x, x0_m, _, _ = prediction_weights(scheduler.config.prediction_type, now**0.5, (1 - now) ** 0.5)
        keep, stay = before**0.5 * beta / (1 - now), (now / before) ** 0.5 * (1 - before) / (1 - now)
        # the logarithm of sigma is half that of the variance, and v = -1 and 1 stand for its bounds
        low, high = log(max((1 - before) / (1 - now) * beta, LEAST)) / 2, log(beta) / 2
        rows.append(
            (x0_x, x0_m, keep, stay, (high + low) / 2, (high - low) / 2, float("inf") if bound is None else bound)
        )
    return torch.tensor(rows, dtype=torch.float64)


def check_variances(config: Any) -> None:
    """Raise ValueError if a model of this config predicts no variances; config: has in_channels and out_channels."""
    if config.out_channels < 2 * config.in_channels:
        raise ValueError(
            f"got variance_type 'learned_range' with a model of {config.out_channels} output channels, expected "
            f"{2 * config.in_channels}, half of them variances; take variance_type 'fixed_small'"
        )
