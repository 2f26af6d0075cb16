"""Builds a pipeline's diffusers scheduler, or another class with the same configuration, and refuses unusable ones."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import wraps
from typing import Any

import diffusers
import numpy as np

from seqpar.loading.drivable import why_not_driven
from seqpar.loading.errors import naming
from seqpar.loading.parts import check_scheduler

FLOW, DIFFUSION = "flow matching", "diffusion by betas"
LIKE = {  # some of the schedulers of each process
    FLOW: "FlowMatchEulerDiscreteScheduler or UniPCMultistepScheduler",
    DIFFUSION: "DDIMScheduler, DDPMScheduler, DPMSolverMultistepScheduler or UniPCMultistepScheduler",
}


def build(config: Mapping[str, Any], name: str | None = None, model: Any = None) -> Any:
    """Return the scheduler of a configuration, or the diffusers class `name` with that configuration.

    model: a config with in_channels and out_channels: DDPM takes the variances that such a model predicts, as the
    authors of DiT and Large-DiT sample, unless the configuration names its variance_type. Raises ValueError, with the
    reason, if the scheduler cannot be built, if the denoising loop cannot use it, or if it steps another noise process
    than that of the configuration.
    """
    check_scheduler(config)
    chosen = config.get("_class_name", "DDIMScheduler") if name is None else name
    known = [other for other in dir(diffusers) if other.endswith("Scheduler")]
    if chosen not in known:
        raise ValueError(f"got scheduler {chosen!r}, expected one of diffusers': {near(chosen, known)}")
    kind = getattr(diffusers, chosen)
    with naming(f"got scheduler {chosen!r}, which cannot be built"):
        scheduler = kind.from_config(
            config, **_variance_settings(config, chosen, model), **_flow_settings(config, name)
        )
    if (reason := why_not_driven(scheduler)) is not None:
        raise ValueError(f"got scheduler {chosen!r}, which {reason}; expected one like DDIMScheduler")
    if name is not None:
        _check_process(scheduler, build(config))
    return scheduler


def _check_process(scheduler: Any, own: Any) -> None:
    """Raise ValueError for a scheduler of another noise process than the one that the model was trained with."""
    got, expected = _process(scheduler), _process(own)
    if got != expected:
        mine, theirs = type(scheduler).__name__, type(own).__name__
        raise ValueError(
            f"got scheduler {mine!r} of {got} for a model whose own, {theirs}, is of {expected}, expected one of the "
            f"same, like {LIKE.get(expected, theirs)}"
        )


def _process(scheduler: Any) -> str:
    """Return the noise process whose states and outputs a scheduler steps."""
    name = type(scheduler).__name__
    if scheduler.config.get("use_flow_sigmas") or name.startswith(("FlowM", "LTXEuler")):
        return FLOW
    return DIFFUSION if hasattr(scheduler, "alphas_cumprod") else f"{name}'s own process"


def check_steps(scheduler: Any, steps: int) -> None:
    """Raise ValueError if a number of steps is not from 1 to the number that the model was trained with."""
    most = getattr(scheduler.config, "num_train_timesteps", steps)
    if not 1 <= steps <= most:
        raise ValueError(f"got {steps} steps, expected 1 to {most}")


def _variance_settings(config: Mapping[str, Any], name: str, model: Any) -> dict[str, Any]:
    """Return the settings with which DDPM takes the variances that a model predicts, if it predicts them."""
    learned = model is not None and model.out_channels == 2 * model.in_channels
    ddpm = name == "DDPMScheduler" and "variance_type" not in config
    return {"variance_type": "learned_range"} if learned and ddpm else {}


def near(name: str, known: Sequence[str]) -> str:
    """Return the known names that are most like this one, or the first ones, as text for a message."""
    lower = {other.lower(): other for other in known}
    alike = [lower[other] for other in get_close_matches(name.lower(), lower, n=5, cutoff=0.4)]
    return ", ".join(alike or [*known[:8], f"... ({len(known)} in all)"])


def config_of(scheduler: Any) -> dict[str, Any]:
    """Return the configuration of a scheduler in memory, with the name of its class."""
    return {**scheduler.config, "_class_name": type(scheduler).__name__}


def _flow_settings(config: Mapping[str, Any], name: str | None) -> dict[str, Any]:
    """Return the settings with which a diffusers class follows the schedule of a flow matching configuration.

    Multistep schedulers (UniPC, DPM-Solver) know flow matching by these settings; others have their own classes.
    """
    kind = getattr(diffusers, name or "", None)
    known = {} if kind is None else inspect.signature(kind.__init__).parameters
    flow = {"use_flow_sigmas": True, "prediction_type": "flow_prediction", "flow_shift": config.get("shift", 1.0)}
    return flow if "use_flow_sigmas" in known and "shift" in config else {}


def taking_mu(scheduler: Any) -> Any:
    """Return a scheduler whose `set_timesteps` takes `mu`, which pipelines pass also where it is not shifted by size.

    Multistep schedulers of diffusers refuse it then.
    """
    own = scheduler.set_timesteps
    if scheduler.config.get("use_dynamic_shifting") or "mu" not in inspect.signature(own).parameters:
        return scheduler

    @wraps(own)
    def set_timesteps(*args: Any, mu: object = None, **kwargs: Any) -> None:
        own(*args, **kwargs)

    scheduler.set_timesteps = set_timesteps
    return scheduler


def flow_timing(scheduler: Any, steps: int, tokens: int) -> dict[str, Any]:
    """Return keyword arguments of a flow matching scheduler's `set_timesteps`, those of diffusers' FluxPipeline.

    Sigmas fall from 1 to 1 / steps in equal steps; `mu`, if the scheduler shifts them dynamically, is linear in the
    number of image tokens. Raises ValueError for a scheduler that does not follow them.
    """
    name, config = type(scheduler).__name__, scheduler.config
    flows = bool(config.get("use_flow_sigmas"))
    takes = "sigmas" in inspect.signature(scheduler.set_timesteps).parameters
    if not flows and not ("FlowMatch" in name and takes):
        raise ValueError(
            f"got scheduler {name!r}, expected one of flow matching that takes sigmas, like "
            f"FlowMatchEulerDiscreteScheduler or UniPCMultistepScheduler"
        )
    timing: dict[str, Any] = {} if flows else {"sigmas": np.linspace(1.0, 1 / steps, steps).tolist()}
    if config.get("use_dynamic_shifting"):
        named = {key: value for key, value in config.items() if value is not None}
        few, many = named.get("base_image_seq_len", 256), named.get("max_image_seq_len", 4096)
        low, high = named.get("base_shift", 0.5), named.get("max_shift", 1.15)
        with naming(f"got scheduler {name!r}, whose sigmas cannot be shifted"):
            slope = (high - low) / (many - few)
            timing["mu"] = tokens * slope + (low - slope * few)
    return timing
