"""When Python looks for objects that nothing holds any more: not while a pipeline loads, and when parts are dropped."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def kept() -> Iterator[None]:
    """Do not look in this context, which makes many objects that stay: each look visits all that were ever made."""
    looks = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if looks:
            gc.enable()


def collect() -> None:
    """Give memory back that nothing holds any more."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
