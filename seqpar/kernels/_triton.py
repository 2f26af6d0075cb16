"""Triton, and the rules that say when its kernels are used."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

jit: Any = triton.jit


def fused(x: torch.Tensor) -> bool:
    """Return whether kernels run on this tensor: on GPUs, and not in fp64, which references compute."""
    return x.is_cuda and x.dtype != torch.float64


def compiled(kernel: Any) -> bool:
    """Return whether a kernel runs as machine code; Triton's interpreter has no assembly and no timer."""
    return isinstance(kernel, triton.JITFunction)


def warps_for(width: int, elements: int) -> int:
    """Return the number of warps of a program that computes one row: a thread has at most so many elements of it.

    A row's bits depend on it.
    """
    warps = 1
    while warps < 16 and width > 32 * warps * elements:
        warps *= 2
    return warps


def in_units(strides: list[int], width: int = 8) -> tuple[int, list[int]]:
    """Return a unit and the strides in it: 8 elements if that divides the strides and the width, else 1.

    With a unit of 8 the compiler knows that rows are aligned to 16 bytes.
    """
    unit = 1 if width % 8 or any(stride % 8 for stride in strides) else 8
    return unit, [stride // unit for stride in strides]


def contiguous_rows(*tensors: torch.Tensor | None) -> None:
    """Raise `ValueError` if a last dim is not contiguous, because kernels read rows in place and copy nothing."""
    for tensor in tensors:
        if tensor is not None and tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise ValueError(f"got strides {tensor.stride()}, expected a contiguous last dim")


__all__ = ["TensorDescriptor", "compiled", "contiguous_rows", "fused", "in_units", "jit", "tl", "triton", "warps_for"]
