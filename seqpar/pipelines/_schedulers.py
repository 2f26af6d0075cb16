"""Builds a pipeline's diffusers scheduler, or another class with the same configuration, and refuses unusable ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import diffusers

from seqpar.sampling.steppers import why_not_driven


def build(config: Mapping[str, Any], name: str | None = None, **changes: Any) -> Any:
    """Return the scheduler of a configuration, or the diffusers class `name` with that configuration.

    changes: settings that replace those of the configuration. Raises ValueError, with the reason, if it cannot be built
    or if the denoising loop cannot use it.
    """
    chosen = name or config.get("_class_name", "DDIMScheduler")
    known = [other for other in dir(diffusers) if other.endswith("Scheduler")]
    if chosen not in known:
        raise ValueError(f"got scheduler {chosen!r}, expected one of diffusers': {near(chosen, known)}")
    kind = getattr(diffusers, chosen)
    try:
        scheduler = kind.from_config(config, **changes)
    except (ImportError, TypeError, ValueError, NotImplementedError) as error:
        raise ValueError(
            f"got scheduler {chosen!r}, which cannot be built: {' '.join(str(error).split())}"
        ) from error
    if (reason := why_not_driven(scheduler)) is not None:
        raise ValueError(f"got scheduler {chosen!r}, which {reason}; expected one like DDIMScheduler")
    return scheduler


def check_steps(scheduler: Any, steps: int) -> None:
    """Raise ValueError if a number of steps is not from 1 to the number that the model was trained with."""
    most = getattr(scheduler.config, "num_train_timesteps", steps)
    if not 1 <= steps <= most:
        raise ValueError(f"got {steps} steps, expected 1 to {most}")


def near(name: str, known: Sequence[str]) -> str:
    """Return the known names that are most like this one, or the first ones, as text for a message."""
    lower = {other.lower(): other for other in known}
    found = [lower[other] for other in get_close_matches(name.lower(), lower, n=5, cutoff=0.4)]
    return ", ".join(found or [*known[:8], f"... ({len(known)} in all)"])


