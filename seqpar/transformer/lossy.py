"""What is lost in a parallelized pipeline, read and changed between its calls: 8 bits and the step cache."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch

from seqpar.loading.parts import transformers_of
from seqpar.transformer.blocks import unrounded
from seqpar.transformer.budget import kept_in
from seqpar.transformer.calibration import Calibration
from seqpar.transformer.parallelize import call_of, calls_of, refresh


@contextmanager
def computed_by(
    pipe_or_transformer: Any, *, eight: bool = True, fused: bool = True, cache: bool = True
) -> Iterator[None]:
    """Compute in this context without 8 bits, fused blocks or the step cache, to compare with them. Collective.

    Without 8 bits, weights that are stored in 8 bits alone are read from their files again, and need their memory.
    """
    calls = [call for _, call in calls_of(pipe_or_transformer)]
    for call in calls:
        call.settle()  # a deferred call is computed as it was made
    blocks, states = [call.sharded.fused for call in calls], [call.state for call in calls]
    before = [(each.eight, each.on, state.eight) for each, state in zip(blocks, states, strict=True)]
    caches = [(call.steps, call.steps.on) for call in calls if call.steps is not None]
    originals = ExitStack()

    def read() -> None:
        try:
            for module, _ in calls_of(pipe_or_transformer):
                originals.enter_context(unrounded(module))
        except torch.OutOfMemoryError as error:
            raise ValueError(f"the weights before rounding do not fit beside those in 8 bits: {error}") from error

    try:
        for each, state in zip(blocks, states, strict=True):
            each.eight, each.on, state.eight = each.eight and eight, each.on and fused, state.eight and eight
        for steps, was_on in caches:
            steps.on = was_on and cache
        if not eight:
            calls[0].mesh.on_all_ranks(read)
        if not (eight and fused):
            refresh(pipe_or_transformer)
        yield
    finally:
        originals.close()
        for each, state, was in zip(blocks, states, before, strict=True):
            each.eight, each.on, state.eight = was
        for steps, was_on in caches:
            steps.on = was_on
        for call in calls:
            call.reset()
        if not (eight and fused):
            refresh(pipe_or_transformer)


def computed_steps(pipe_or_transformer: Any) -> tuple[int, int] | None:
    """Return how many steps a step cache has computed in all runs, and of how many; None without one.

    Several transformers are added up.
    """
    counts = [call.steps.counted for _, call in calls_of(pipe_or_transformer) if call.steps is not None]
    return (sum(computed for computed, _ in counts), sum(steps for _, steps in counts)) if counts else None


def calibrations_of(pipe_or_transformer: Any) -> dict[str, Calibration]:
    """Return the calibrations of the transformers that compute in 8 bits, by their names."""
    calls = {name: call_of(module) for name, module in transformers_of(pipe_or_transformer).items()}
    made = {name: call.sharded.fused.calibration for name, call in calls.items() if call is not None}
    return {name: calibration for name, calibration in made.items() if calibration is not None}


def keep_dtype(pipe_or_transformer: Any, names: Collection[str]) -> None:
    """Compute these GEMMs, TRANSFORMER|BLOCK, MATRIX, in the weights' dtype from now on, and others in 8 bits.

    Weights that are stored in 8 bits alone are read from their files again, and stay in memory. Collective.
    """
    calls_of(pipe_or_transformer)
    for name, module in transformers_of(pipe_or_transformer).items():
        call = call_of(module)
        assert call is not None
        call.settle()
        fused = call.sharded.fused
        if fused.calibration is not None:
            fused.calibration = replace(fused.calibration, kept=kept_in(name, names))
    refresh(pipe_or_transformer)


def set_threshold(pipe_or_transformer: Any, threshold: float | None) -> None:
    """Leave blocks of a step out up to this change of the first blocks from now on. Collective."""
    for _, call in calls_of(pipe_or_transformer):
        call.settle()
        if call.steps is not None:
            call.steps.options = replace(call.steps.options, threshold=threshold)
            call.reset()
