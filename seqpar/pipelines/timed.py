"""Timing of a scheduler's decision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from seqpar.loading.drivable import check_eta
from seqpar.loading.failures import FAILURES
from seqpar.loading.respacing import respace
from seqpar.loading.schedulers import check_steps
from seqpar.loading.timesteps import set_timesteps
from seqpar.loop.steppers import Decision, decide


def timed(
    scheduler: Any,
    steps: int,
    eta: float | None = None,
    respacing: str | None = None,
    timing: Mapping[str, Any] | None = None,
) -> Decision:
    """Set a scheduler's timesteps, and return the way in which it steps; ValueError if a setting does not fit it.

    eta: None stands for the scheduler's own default. respacing: a text of the original DiT, which replaces the number
    of steps. timing: keyword arguments of `set_timesteps` besides the number of steps.
    """
    check_eta(scheduler, eta)
    if respacing is not None:
        respace(scheduler, respacing)
        return tried(scheduler, eta)
    check_steps(scheduler, steps)
    try:
        scheduler.set_timesteps(steps) if timing is None else set_timesteps(scheduler, steps, timing)
    except FAILURES as error:
        name = type(scheduler).__name__
        raise ValueError(f"got {steps} steps, which {name} cannot do: {error}; try more or fewer") from error
    return tried(scheduler, eta)


def tried(scheduler: Any, eta: float | None = None) -> Decision:
    """Return the way in which a scheduler, whose timesteps are set, steps; `ValueError` if one of its steps fails."""
    try:
        return decide(scheduler, {"eta": eta})
    except ValueError:
        raise
    except FAILURES as error:  # such as an index past the end of its tables
        raise ValueError(f"got scheduler {type(scheduler).__name__!r}, which fails in its step: {error}") from error
