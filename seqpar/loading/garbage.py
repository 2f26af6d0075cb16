"""When Python looks for garbage: when parts of a pipeline have been dropped, and not while one is loaded."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def collect() -> None:
    """Give memory back that nothing holds any more, that of the GPU too."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


@contextmanager
def no_collection() -> Iterator[None]:
    """Let Python look for no garbage by itself.

    Loading makes so many objects that it would look several times, each time through all those of torch, diffusers and
    transformers, which takes a fifth of a second.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
