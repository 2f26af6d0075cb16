"""Schedulers that learn variances."""

from __future__ import annotations

from typing import Any

from diffusers.schedulers.scheduling_ddim import DDIMScheduler
from diffusers.schedulers.scheduling_ddpm import DDPMScheduler


def steps_locally(scheduler: Any) -> bool:
    """Return whether this is DDIM without dynamic thresholding, which has a kernel of its own."""
    return type(scheduler) is DDIMScheduler and not scheduler.config["thresholding"]


def learns_range(scheduler: Any) -> bool:
    """Return whether this is DDPM whose variance the model interpolates, without dynamic thresholding."""
    config = scheduler.config
    return type(scheduler) is DDPMScheduler and config.variance_type == "learned_range" and not config.thresholding


def check_variances(config: Any) -> None:
    """Raise ValueError if a model of this config predicts no variances; config: has in_channels and out_channels."""
    if config.out_channels < 2 * config.in_channels:
        raise ValueError(
            f"got variance_type 'learned_range' with a model of {config.out_channels} output channels, expected "
            f"{2 * config.in_channels}, half of them variances; take variance_type 'fixed_small'"
        )
