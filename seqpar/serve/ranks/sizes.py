"""Sizes of a served model: its own, others with about as many pixels that it takes, and those that take too long."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from math import log2, sqrt

from seqpar.pipelines.diffusers import Adapted
from seqpar.planner.plan import Plan
from seqpar.planner.predict import Load, predict
from seqpar.serve.messages import ImageRequest

SHAPES = ((1, 1), (4, 3), (3, 4), (3, 2), (2, 3), (16, 9), (9, 16))  # width to height
LEAST_UNIT = 8  # pixels of which sides are multiples; 64 from 1024 x 1024 on, as models are trained

SLOW_S = 60.0  # a step that is predicted to take less is never refused: predictions are no measurements


def check_step(order: ImageRequest, plan: Plan, load: Load, room: float | None) -> None:
    """Raise ValueError for an order of which one step is predicted to take longer than the whole order may, or to need
    more than `room` GiB on a rank.

    Runs are given up between steps, so that such a step would hold all ranks, whatever its client does.
    """
    step = predict(plan.ranking.work, load, plan.layout, plan.ranking.rates)
    if (reason := step.too_big(room)) is not None:
        raise ValueError(f"got an order that {reason}; ask for a smaller size or fewer frames")
    step_s, limit_s = step.ms / 1e3, order.deadline_s
    if limit_s is not None and step_s > max(limit_s, SLOW_S):
        raise ValueError(
            f"got an order of which a step is predicted to take {step_s:.0f} s, expected it to take less than the "
            f"{limit_s:.0f} s that are left; ask for a smaller size or fewer frames"
        )


def usual_size(job: Adapted) -> tuple[int, int]:
    """Return height and width of what is made by default; (0, 0) where the pipeline chooses them by its picture."""
    parameters = inspect.signature(job.kind.__call__).parameters
    own = [parameters[side].default for side in ("height", "width") if side in parameters]
    named = len(own) == 2 and all(isinstance(side, int) for side in own)
    return job.pixels or ((own[0], own[1]) if named else (0, 0))


def offered(own: tuple[int, int], fits: Callable[[tuple[int, int]], object]) -> tuple[tuple[int, int], ...]:
    """Return (height, width) of each size, the model's own first; nothing where the pipeline chooses its size.

    fits: raises ValueError for a size that the model does not take.
    """
    if not all(own):
        return ()
    return tuple(dict.fromkeys([own, *(size for size in _of_shapes(own) if _fits(size, fits))]))


def _of_shapes(own: tuple[int, int]) -> Iterator[tuple[int, int]]:
    side = sqrt(own[0] * own[1])
    unit = max(LEAST_UNIT, 2 ** int(log2(side / 16)))
    for wide, high in SHAPES:
        height, width = side * sqrt(high / wide), side * sqrt(wide / high)
        yield max(unit, round(height / unit) * unit), max(unit, round(width / unit) * unit)


def _fits(size: tuple[int, int], fits: Callable[[tuple[int, int]], object]) -> bool:
    try:
        fits(size)
    except ValueError:
        return False
    return True
