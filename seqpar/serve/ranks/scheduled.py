"""Looks at the clean latents that the steps of a pipeline of diffusers estimate, as its scheduler is called."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from torch import Tensor

from seqpar.loading.schedulers import check_clean, clean_weights
from seqpar.serve.ranks.preview import NO_ESTIMATES, Estimates


@contextmanager
def watched(scheduler: Any, asked: Estimates, pixels: tuple[int, int] | None) -> Iterator[None]:
    """While it is entered, what is asked for is estimated in a run of the scheduler; pixels: of the run's pictures.

    The pipeline's latents are whole on every rank, so that nothing is exchanged. The step itself is not changed. Raises
    ValueError for a scheduler whose clean latents are not known.
    """
    if asked is NO_ESTIMATES:
        yield
        return
    check_clean(scheduler)
    own, before, seen = scheduler.step, vars(scheduler).get("step"), list[None]()
    signature = inspect.signature(own)

    @wraps(own)  # pipelines read the names of its arguments
    def step(*args: Any, **kwargs: Any) -> Any:
        index, first = len(seen), getattr(scheduler, "begin_index", None) or 0
        seen.append(None)
        shown, look = asked.looked(len(scheduler.timesteps) - first, pixels)
        if index in shown:
            look(index, _clean(scheduler, **signature.bind(*args, **kwargs).arguments))
        return own(*args, **kwargs)

    scheduler.step = step
    try:
        yield
    finally:
        del scheduler.step
        if before is not None:
            scheduler.step = before


def _clean(scheduler: Any, model_output: Tensor, timestep: Any, sample: Tensor, **others: Any) -> Tensor:
    """Return the estimate of the clean latents of a step that is about to be made."""
    of_state, of_output = clean_weights(scheduler, timestep)
    return of_state * sample.float() + of_output * model_output.float()
