"""The estimate of the clean latents that a step's prediction contains, for pictures of a run that has not ended.

A scheduler mixes clean latents x0 and noise e into a state x = a x0 + b e, and the model's output m is one of noise,
clean latents, velocity or flow, by the scheduler's prediction_type. So x0 is a sum of x and m. The scheduler itself
tells a and b: it mixes latents and noise for image-to-image, by `add_noise` or `scale_noise`.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

FLOW = "flow_prediction"
KINDS = ("epsilon", "sample", "v_prediction", FLOW)


def why_not_clean(scheduler: Any) -> str | None:
    """Return why the clean latents of a scheduler's steps are not known, or None if they are."""
    name, kind = type(scheduler).__name__, _kind(scheduler)
    if hasattr(scheduler, "precondition_outputs"):
        return f"{name} scales the model's output in a way of its own"
    if not (hasattr(scheduler, "scale_noise") or hasattr(scheduler, "add_noise")):
        return f"{name} does not mix latents and noise"
    return None if kind in KINDS else f"{name} has prediction_type {kind!r}"


def check_clean(scheduler: Any) -> None:
    """Raise ValueError if the clean latents of a scheduler's steps are not known."""
    if (reason := why_not_clean(scheduler)) is not None:
        raise ValueError(
            f"got partial pictures with a scheduler that tells of none, because {reason}; expected one like "
            f"DDIMScheduler or FlowMatchEulerDiscreteScheduler, or no partial pictures"
        )


def clean_weights(scheduler: Any, timestep: Any) -> tuple[float, float]:
    """Return the weights (of x, of m) that give x0 at a timestep; the scheduler's timesteps are set.

    Where the state is noise alone (a = 0) and the model predicts noise, nothing is known of x0: both weights are 0.
    With DPM-Solver-2 (KDPM2) the evaluations between two steps count as those at the end of the step.
    """
    own = copy.copy(scheduler)  # it moves its tables to the device of what it mixes
    one, times = torch.ones(1, 1, 1, 1, dtype=torch.float64), torch.as_tensor(timestep).reshape(1).cpu()
    if hasattr(own, "scale_noise"):
        mixed = [own.scale_noise(one * x, times, one * e) for x, e in ((1, 0), (0, 1))]
    else:
        mixed = [own.add_noise(one * x, one * e, times) for x, e in ((1, 0), (0, 1))]
    a, b = (float(each) for each in mixed)
    match _kind(scheduler):
        case "epsilon":
            return (1 / a, -b / a) if a else (0.0, 0.0)
        case "v_prediction":  # of a state whose a and b are scaled to a^2 + b^2 = 1, as Euler's are not
            return a / (a * a + b * b), -b / (a * a + b * b) ** 0.5
        case "flow_prediction":
            return 1 / (a + b), -b / (a + b)
        case _:
            return 0.0, 1.0


def input_scale(scheduler: Any, timestep: Any) -> float:
    """Return the factor that makes the model's input of a state at a timestep."""
    if not hasattr(scheduler, "scale_model_input"):
        return 1.0
    return float(copy.copy(scheduler).scale_model_input(torch.ones(1, 1, 1, 1, dtype=torch.float64), timestep))


def _kind(scheduler: Any) -> Any:
    """Return what the model predicts; schedulers of flow matching alone do not say it."""
    return scheduler.config.get("prediction_type") or (FLOW if hasattr(scheduler, "scale_noise") else None)
