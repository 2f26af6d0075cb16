"""Exact mode: bits of a row depend on that row alone, so latents are equal on any number of GPUs, at any size.

- cuBLAS splits the sum over K among thread blocks if a product has few rows (on an H200: 4096 -> 32 up to 2048 rows,
  11008 -> 4096 up to 128). It needs memory for partial sums, so exact mode sets small workspaces before CUDA starts.
- Rows of the local attention must not depend on the number of rows (`invariant` of a local attention).
- Ring attention merges partial results and is not supported. All other kernels compute each row by itself.
- Strategies hold the keys of several streams in the order of one GPU (`JointShard.by_stream`).
- Modulation is the same product on every rank: the loop makes one table, and rows of a diffusers call are not split.
`launch/bench.py steps --exact` measures the cost, `calls --exact` that of pipelines' transformers.
"""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F
from torch import Tensor

# cuBLAS and torch read these variables when the first product runs
LEAST_RESULTS = 1024  # of a product in `linear`
SETTINGS = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}


def turn_on() -> None:
    """Turn exact mode on for this process. Call it on every rank before CUDA starts; raises ValueError later."""
    if not torch.cuda.is_available():
        raise ValueError("exact mode requires a GPU: rounding of a CPU's matrix products depends on their row count")
    if torch.cuda.is_initialized() and not _set():
        shown = " ".join(f"{name}={value}" for name, value in SETTINGS.items())
        raise ValueError(f"exact mode must be turned on before CUDA starts; turn it on first, or set {shown}")
    os.environ.update(SETTINGS)
    torch.backends.cuda.preferred_blas_library("cublaslt")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def is_on() -> bool:
    matmul = torch.backends.cuda.matmul
    whole_sums = not (matmul.allow_bf16_reduced_precision_reduction or matmul.allow_fp16_reduced_precision_reduction)
    return _set() and whole_sums and str(torch.backends.cuda.preferred_blas_library()).lower().endswith("cublaslt")


def _set() -> bool:
    return all(os.environ.get(name) == value for name, value in SETTINGS.items())


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return a linear layer's output; a row has the same bits for any number of rows.

    x: (..., K); weight: (N, K). cuBLAS splits sums of up to 64 results, whose partial sums fit in torch's smallest
    workspace (1 KiB, 256 fp32 numbers). Few rows are padded until there are four times as many results as numbers.
    """
    rows, outputs = x[..., 0].numel(), len(weight)
    more = -(-LEAST_RESULTS // outputs) - rows
    if x.dim() < 2 or rows == 0 or more <= 0:
        return F.linear(x.contiguous(), weight, bias)
    flat = torch.cat([x.flatten(0, -2), x.new_zeros(more, x.shape[-1])])
    return F.linear(flat, weight, bias)[:rows].unflatten(0, x.shape[:-1])
