"""DDIM, or DDPM with the model's variances, on this rank's tokens, as a local update inside the CUDA graph."""

from __future__ import annotations

import torch
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor

from seqpar.kernels.ddim import Update, guided_step
from seqpar.loop.coefficients import Coefficients
from seqpar.loop.state import State

NOISE_BYTES = 256 * 2**20  # most that a rank keeps of a run's noise at a time


class OneStep:
    """Steps whose result depends on the state before them alone.

    A long run of large latents draws its noise in chunks, before the first step of each.
    """

    def __init__(
        self, state: State, coefficients: Coefficients, guidance_S: Tensor, generator: torch.Generator
    ) -> None:
        like, learned, noise = state.tokens, coefficients.learned, None
        table = coefficients.table_SK.to(like.device, torch.float64 if learned else like.dtype)
        if learned or any(coefficients.noisy):
            steps = NOISE_BYTES // max(1, like.numel() * like.element_size())
            noise = like.new_zeros((max(1, min(len(table), steps)), *like.shape))
        first = torch.zeros((), dtype=torch.int64, device=like.device)
        self._state = state
        self._update = Update(table, guidance_S, state.guided_width, noise, first, coefficients.clipped, learned)
        self._begin(coefficients, generator)

    def __call__(self, cond: Tensor, uncond: Tensor | None, index: int, step: Tensor, bad: Tensor, /) -> None:
        """Step the state; see `Stepper`. `step` selects coefficients and noise on the device."""
        guided_step(self._state.tokens, cond, uncond, self._update, step, bad)

    def restart(self, coefficients: Coefficients, guidance_S: Tensor, generator: torch.Generator) -> None:
        """Copy another run's coefficients and noise into the buffers that a captured step reads."""
        self._update.coefficients_SK.copy_(coefficients.table_SK)
        self._update.guidance_S.copy_(guidance_S)
        self._begin(coefficients, generator)

    def load(self, index: int) -> None:
        """Draw the noise of the chunk of steps that holds this one, unless it is loaded already.

        Chunks are drawn in order; the first one starts the same sequence again.
        """
        noise, first = self._update.noise_TnlC, self._update.first
        if noise is None or first is None or (start := index // len(noise) * len(noise)) == self._loaded:
            return
        if start == 0:
            self._generator.set_state(self._before)
        for row, noisy in zip(noise, self._noisy[start : start + len(noise)], strict=False):
            if noisy:
                row.copy_(self._drawn())
            else:
                row.zero_()
        first.fill_(start)
        self._loaded = start

    def _drawn(self) -> Tensor:
        """Return this rank's share of the next noise of the whole latents."""
        state = self._state
        return state.slice(randn_tensor(state.shape, generator=self._generator, dtype=state.tokens.dtype))

    def _begin(self, coefficients: Coefficients, generator: torch.Generator) -> None:
        self._generator, self._before, self._loaded = generator, generator.get_state(), -1
        self._noisy = coefficients.noisy
        self.load(0)
