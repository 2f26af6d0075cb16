"""Lets a parallelized pipeline pass a boundary between its parts, so that its run can be given up on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from seqpar.loading.transformers import transformers_of
from seqpar.transformer.lease import call_of
from seqpar.transformer.state import ENCODERS


@contextmanager
def passing(pipe: Any, boundary: Callable[[], None]) -> Iterator[None]:
    """Pass a boundary before each call of a parallelized pipeline's transformers, VAE and encoders, in this context.

    boundary: such as `seqpar.mesh.boundary.StepBoundary`. What it raises ends the pipeline's call, after which the
    pipeline can be called again. Every rank must do so at the same time. Raises ValueError for a pipeline that is not
    parallelized.
    """
    modules = transformers_of(pipe).values()
    calls = [call for module in modules if (call := call_of(module)) is not None]
    if len(calls) < len(modules):
        raise ValueError(f"got {type(pipe).__name__} that is not parallelized, expected the result of parallelize")
    for call in calls:
        call.boundary = boundary
    parts = [part for name, part in pipe.components.items() if name.startswith(ENCODERS)]
    handles = [part.register_forward_pre_hook(lambda *_: boundary()) for part in parts if isinstance(part, nn.Module)]
    try:
        yield
    finally:
        for call in calls:
            call.boundary = None
        for handle in handles:
            handle.remove()
