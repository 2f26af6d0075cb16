"""Whether a pipeline can drive a scheduler."""

from __future__ import annotations

import inspect
from typing import Any

from seqpar.loading.variances import learns_range

STEP = ["model_output", "timestep", "sample"]  # the only arguments that a scheduler's step may require


def why_not_driven(scheduler: Any) -> str | None:
    """Return why the denoising loop cannot use a scheduler, or None if it can."""
    parameters = inspect.signature(scheduler.step).parameters.values() if hasattr(scheduler, "step") else ()
    required = [parameter.name for parameter in parameters if parameter.default is parameter.empty]
    if required != STEP:
        return f"steps with ({', '.join(required)}), not with ({', '.join(STEP)})"
    variances = str(getattr(scheduler.config, "variance_type", ""))
    if variances.startswith("learned") and not learns_range(scheduler):
        return (
            f"needs the model's variances (variance_type {variances!r}), which the loop passes on to DDPMScheduler "
            f"with 'learned_range' and without thresholding alone"
        )
    return None


def check_eta(scheduler: Any, eta: float | None) -> None:
    """Raise ValueError if eta is not between 0 and 1, or if this scheduler has no eta.

    None stands for the scheduler's own default.
    """
    if eta is None:
        return
    if not 0 <= eta <= 1:
        raise ValueError(f"got eta {eta:g}, expected 0 (deterministic) to 1 (DDPM's noise)")
    if eta > 0 and "eta" not in inspect.signature(scheduler.step).parameters:
        raise ValueError(f"got eta {eta:g} with {type(scheduler).__name__}, expected 0: this scheduler has no eta")
