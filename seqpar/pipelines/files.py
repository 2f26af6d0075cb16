"""The checked files of a pipeline, before any weight is loaded: what all families know about them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from seqpar.loading import schedulers as _schedulers
from seqpar.loading.vae import check_vae, vae_factor
from seqpar.loading.variances import check_variances
from seqpar.loop.blueprint import Blueprint
from seqpar.pipelines import timed as timed_
from seqpar.planner.plan import work_of
from seqpar.planner.predict import TABLE_BYTES, Load

# the scheduler of the original DiT and Large-DiT, for models without a pipeline folder
DDIM_DEFAULT = {"beta_start": 1e-4, "beta_end": 0.02, "beta_schedule": "linear", "clip_sample": False}
NO_VAE_FACTOR = 8  # pixels along each side of a latent pixel, for models that come without a decoder


@dataclass(frozen=True)
class Files:
    """The checked files of a pipeline, before any weights are loaded; a family adds what only it has.

    blueprint: the transformer. source: where the other parts are (the pipeline's folder), diffusers' pipeline in
    memory, or None for a model without other parts. vae: the config of the decoder, or None. scheduling: the
    scheduler's config.
    """

    blueprint: Blueprint
    source: Any = None
    vae: Any = None
    scheduling: Mapping[str, Any] = field(default_factory=lambda: DDIM_DEFAULT, kw_only=True)

    @property
    def factor(self) -> int:
        """Return the number of pixels along each side of a latent pixel."""
        return NO_VAE_FACTOR if self.vae is None else vae_factor(self.vae)

    def latent_size(self, pixels: tuple[int, int] | None) -> tuple[int, int]:
        """Return (height, width) of the latent of a picture; None stands for the size that the model was trained on.

        Raises ValueError for sizes that are no whole patches.
        """
        config = self.blueprint.config
        if pixels is None:
            return config.sample_size, config.sample_size
        unit = config.patch_size * self.factor
        if any(side < unit or side % unit for side in pixels):
            raise ValueError(
                f"got size {pixels[0]}x{pixels[1]}, expected multiples of {unit} (patch {config.patch_size} "
                f"x decoder {self.factor})"
            )
        return pixels[0] // self.factor, pixels[1] // self.factor

    def tokens(self, pixels: tuple[int, int] | None) -> int:
        """Return the number of tokens of a picture."""
        height, width = self.latent_size(pixels)
        return height * width // self.blueprint.config.patch_size**2

    def scheduler(self, name: str | None = None) -> Any:
        """Return the folder's scheduler, or the diffusers class `name` with the same configuration.

        Raises ValueError, with the reason, if it cannot be built or the denoising loop cannot use it.
        """
        return _schedulers.build(self.scheduling, name, self.blueprint.config)

    def schedule(self, name: str | None, steps: int, eta: float | None = None, respacing: str | None = None) -> Any:
        """Return `scheduler(name)` with its timesteps set; ValueError if a setting does not fit it.

        eta: None stands for the scheduler's own default. respacing: see `seqpar.loop.request.Request`.
        """
        scheduler = self.scheduler(name)
        if timed_.timed(scheduler, steps, eta, respacing).learned:
            check_variances(self.blueprint.config)
        return scheduler

    def conditions(self, asked: Sequence[object]) -> int:
        """Return for how many of these classes or prompts the modulation differs."""
        return len(set(asked))

    def smallest(self, dtype: torch.dtype) -> Callable[[bool], Load]:
        """Return a function that returns the `Load` of one picture, with two branches or one."""
        return lambda guided: self.load_of(("",), guided, 1, dtype)

    def load_of(
        self,
        asked: Sequence[object],
        guided: bool,
        evaluations: int,
        dtype: torch.dtype,
        size: tuple[int, int] | None = None,
    ) -> Load:
        """Return the planner's `Load` for one picture of each of the classes or prompts `asked`.

        guided: whether there are two branches. evaluations: number of calls of the model. size: (height, width) in
        pixels, None for the model's own.
        """
        config = self.blueprint.config
        return Load(
            images=len(asked),
            tokens=self.tokens(size),
            guidance=guided,
            steps=evaluations,
            itemsize=dtype.itemsize,
            parameters=sum(x.numel() for x in self.blueprint.meta().parameters()),
            latent=config.in_channels * config.patch_size**2,
            labels=self.conditions(asked) + guided,
            table=TABLE_BYTES,
            others=work_of(config).joined,
        )


def checked_vae(path: Any, blueprint: Blueprint) -> Any:
    """Return the config of the decoder in a folder or file; ValueError if it does not decode the model's latents."""
    vae, channels = check_vae(path), blueprint.config.in_channels
    if vae.latent_channels != channels:
        raise ValueError(f"got a decoder of {vae.latent_channels} latent channels, expected the model's {channels}")
    return vae
