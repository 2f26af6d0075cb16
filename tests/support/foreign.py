"""Helpers for tests of diffusers' own modules in fp64."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn

from seqpar.transformer.parallelize import call_of
from tests.support.double import StayDouble as StayDouble


def bound(on_cpus: float, on_gpus: float = 1e-4) -> float:
    """Return the largest error that a test allows on this machine, if a CPU has computed the truth.

    Models embed timesteps up to 1000 by sines in fp32, which a GPU rounds in another way than a CPU; 2e-5 of the
    result was seen, the same for every strategy and number of ranks.
    """
    device = os.environ.get("SEQPAR_TEST_DEVICE") or ("cuda" if torch.cuda.is_available() else "cpu")
    return on_cpus if device == "cpu" else on_gpus


def in_double(module: Any) -> Any:
    """Let a parallelized transformer, or a call, compute in fp64, and return the call."""
    call: Any = call_of(module) if isinstance(module, nn.Module) else module
    compute = call.compute

    def computed(form: Any) -> Any:
        with StayDouble():
            return compute(form)

    call.compute = computed
    return call


def assert_right_or_refused(results: list[Any], truth: Tensor, tolerance: float, refused: str | None) -> None:
    """Assert that every rank has the truth, or, where something is refused, a message with these words."""
    for result in results:
        if refused is not None:
            assert isinstance(result, str)
            assert refused in result
        else:
            assert not isinstance(result, str), result
            assert (result - truth).abs().max() < tolerance
