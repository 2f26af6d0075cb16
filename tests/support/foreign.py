"""Helpers for tests of diffusers' own modules in fp64: models round to fp32 inside, which would hide errors."""

from __future__ import annotations

import os
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from seqpar.transformer.parallelize import call_of


class StayDouble:
    """Keep fp64 where a block would round to fp32 internally (rotary, norms, gates).

    Two runs that differ in the last bit of fp64 may round to neighbouring fp32 numbers, 1e-7 apart: that would hide
    every smaller error. (It also hides roundings in our own code, which tests/attention/test_strategies.py tests.)
    The two methods that round are replaced in the whole process; a function mode would make every other one slow, too.
    """

    depth = 0

    def __enter__(self) -> None:
        if StayDouble.depth == 0:
            TENSORS.float, TENSORS.to = KEEPING
        StayDouble.depth += 1

    def __exit__(self, *_: object) -> None:
        StayDouble.depth -= 1
        if StayDouble.depth == 0:
            del TENSORS.float, TENSORS.to


class Keeping:
    """A method of tensors that does not round fp64 to fp32, and equals its own for whoever knows torch's functions."""

    def __init__(self, own: Any, *asked: Any) -> None:
        self._own, self._asked = own, asked

    def __get__(self, x: Tensor | None, kind: type) -> Any:
        return self if x is None else partial(self, x)

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the tensor itself where the method would round it."""
        rounds = x.dtype == torch.float64 and len(args) == len(self._asked) and all(map(is_, args, self._asked))
        return x if rounds else self._own(x, *args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return other is self or other is self._own

    def __hash__(self) -> int:
        return hash(self._own)


TENSORS: Any = Tensor
KEEPING = Keeping(Tensor.float), Keeping(Tensor.to, torch.float32)


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
