"""A scheduler's timesteps, as a pipeline sets them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def set_timesteps(scheduler: Any, steps: int, schedule: Mapping[str, Any]) -> None:
    """Set a scheduler's timesteps by a number of steps, or by the sigmas or timesteps that `schedule` holds."""
    replacing = schedule.keys() & {"sigmas", "timesteps"}
    try:
        scheduler.set_timesteps(*([] if replacing else [steps]), **schedule)
    except TypeError as error:
        names = ", ".join(sorted(schedule)) or "nothing"
        raise ValueError(
            f"got schedule with {names}, expected arguments of {type(scheduler).__name__}.set_timesteps: {error}"
        ) from error
