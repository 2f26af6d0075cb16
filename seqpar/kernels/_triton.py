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

    def _never(function: Any) -> Any:
        """Leave a kernel as it is; it is never called."""
        return function

    jit: Any = _never


def fused(x: torch.Tensor, *others: torch.Tensor | None) -> bool:
    """Whether kernels run on these: on GPUs, not in fp64 (the references' own ground), without gradients."""
    if not x.is_cuda or x.dtype == torch.float64 or triton is None:
        return False
    given = (tensor for tensor in (x, *others) if tensor is not None)
    return not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given))


def compiled(kernel: Any) -> bool:
    """Whether a kernel is machine code when it runs: Triton's interpreter has no assembly and no timer."""
    return isinstance(kernel, triton.JITFunction)


def contiguous_rows(*tensors: torch.Tensor | None) -> None:
    """Raise `ValueError` where a last dim is not contiguous: kernels read rows as they are, and copy nothing."""
    for tensor in tensors:
        if tensor is not None and tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise ValueError(f"got strides {tensor.stride()}, expected a contiguous last dim")


__all__ = ["compiled", "contiguous_rows", "fused", "jit", "tl", "triton"]
