"""Gives back the memory of parts of a pipeline that have been dropped."""

from __future__ import annotations

import gc

import torch


def collect() -> None:
    """Give memory back that nothing holds any more, that of the GPU too."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
