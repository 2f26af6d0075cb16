"""The square of the positive part of each value, as some models have it between the products of their MLP.

Only `tests/test_one_file.py` adds this kernel to the folder; a model would call it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seqpar.kernels._triton import fused, jit, tl

CASES = ({"tokens": 5, "width": 24}, {"tokens": 33, "width": 40})
BLOCK = 256


def relu_squared(x: Tensor) -> Tensor:
    """Return max(x, 0)^2 in the dtype and shape of x."""
    return launch(x) if fused(x) else reference(x)


def reference(x: Tensor) -> Tensor:
    """Compute in fp32, or in fp64 for fp64, and round once."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return wide.clamp(min=0).square().to(x.dtype)


def launch(x: Tensor) -> Tensor:
    """Run the kernel, a program for each block of values."""
    x = x.contiguous()
    out = torch.empty_like(x)
    kernel[(-(-x.numel() // BLOCK),)](x, out, x.numel(), BLOCK=BLOCK)
    return out


@jit
def kernel(x, out, count, BLOCK: tl.constexpr):
    """Square the positive values of one block."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.maximum(tl.load(x + at, mask=at < count, other=0.0).to(tl.float32), 0.0)
    tl.store(out + at, (value * value).to(out.dtype.element_ty), mask=at < count)
