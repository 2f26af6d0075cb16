"""Triton where it exists (Linux), and when its kernels are used.

Elsewhere the kernel files still import: their references run, and nothing launches a kernel.
"""

from __future__ import annotations

from typing import Any

import torch

try:
    import triton
    import triton.language as tl

    jit: Any = triton.jit
except ImportError:  # no Triton for this platform
    triton: Any = None
    tl: Any = None

    def jit(function: Any) -> Any:
        """Leave a kernel as it is; it is never called."""
        return function


def fused(x: torch.Tensor) -> bool:
    """Whether kernels run on this tensor: on GPUs, for what is not fp64 (the references' own ground)."""
    return x.is_cuda and x.dtype != torch.float64 and triton is not None


__all__ = ["fused", "jit", "tl", "triton"]
