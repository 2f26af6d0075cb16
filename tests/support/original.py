"""The arithmetic of the original DiT's diffusion, written from the papers' formulas in fp64: an oracle of samplers.

DDPM (arXiv 2006.11239), learned variances (arXiv 2102.09672, formula 15), DDIM (arXiv 2010.02502); a respaced process
is a process of its own, whose betas keep the cumulated products at the chosen timesteps.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


class Process:
    """A diffusion over some of 1000 timesteps (ascending) with linear betas; steps are counted in these timesteps."""

    def __init__(self, timesteps: Sequence[int]) -> None:
        all_betas = np.linspace(1e-4, 0.02, 1000, dtype=np.float64)
        products = np.cumprod(1 - all_betas)[list(timesteps)]
        betas = 1 - products / np.concatenate(([1.0], products[:-1]))
        self.betas, self.bars = betas, np.cumprod(1 - betas)
        self.previous = np.concatenate(([1.0], self.bars[:-1]))
        self.posterior = betas * (1 - self.previous) / (1 - self.bars)

    def x0(self, x: Tensor, noise: Tensor, i: int, clip: bool) -> Tensor:
        """Return the picture that a predicted noise stands for."""
        x0 = np.sqrt(1 / self.bars[i]) * x - np.sqrt(1 / self.bars[i] - 1) * noise
        return x0.clamp(-1, 1) if clip else x0

    def p_sample(self, out: Tensor, x: Tensor, i: int, z: Tensor, clip: bool = False) -> Tensor:
        """Step by DDPM. out: predicted noise and variance values, (N, 2 C, H, W)."""
        noise, values = out.chunk(2, dim=1)
        x0, beta, bar, before = self.x0(x, noise, i, clip), self.betas[i], self.bars[i], self.previous[i]
        mean = beta * np.sqrt(before) / (1 - bar) * x0 + (1 - before) * np.sqrt(1 - beta) / (1 - bar) * x
        if i == 0:
            return mean
        fraction = (values + 1) / 2
        log_variance = fraction * np.log(beta) + (1 - fraction) * np.log(self.posterior[i])
        return mean + torch.exp(0.5 * log_variance) * z

    def ddim_sample(self, out: Tensor, x: Tensor, i: int, z: Tensor, eta: float, clip: bool = False) -> Tensor:
        """Step by DDIM; the noise is computed back from the picture, which may be clipped."""
        x0, bar, before = self.x0(x, out.chunk(2, dim=1)[0], i, clip), self.bars[i], self.previous[i]
        noise = (np.sqrt(1 / bar) * x - x0) / np.sqrt(1 / bar - 1)
        sigma = eta * np.sqrt((1 - before) / (1 - bar)) * np.sqrt(1 - bar / before)
        return np.sqrt(before) * x0 + np.sqrt(1 - before - sigma**2) * noise + (sigma * z if i else 0)


def exact(scheduler: object) -> object:
    """Give a diffusers scheduler with linear betas its coefficients in fp64, which it has in fp32; returns it."""
    betas = torch.from_numpy(np.linspace(1e-4, 0.02, 1000, dtype=np.float64))
    one = torch.ones((), dtype=torch.float64)
    changes = {"betas": betas, "alphas_cumprod": torch.cumprod(1 - betas, 0), "one": one, "final_alpha_cumprod": one}
    for name, value in changes.items():
        setattr(scheduler, name, value)
    return scheduler
