"""Exact mode: the bits of a row depend on that row alone, so latents are the same on any number of GPUs, at any size.

Outside of exact mode, cuBLAS splits the sum over K among thread blocks if a product has few rows (on an H200: 4096 ->
32 up to 2048 rows, 11008 -> 4096 up to 128). It cannot do so without memory for partial sums, so exact mode sets small
workspaces before CUDA starts. The rows of the local attention must not depend on the number of rows (`invariant` of a
local attention). Exact mode refuses ring attention, which merges partial results. All other kernels compute each row by
itself. Strategies hold the keys of several streams in the order of one GPU (`JointShard.by_stream`). Modulation is the
same product on every rank: our own loop makes one table, and the rows of a diffusers pipeline's call are not split.
When it wins: for results that are compared bit by bit, between layouts and machines of one kind.
`launch/bench.py steps --exact` measures its cost, and `calls --exact` that of pipelines' transformers.
"""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F
from torch import Tensor

# cuBLAS and torch read these variables when the first product runs
LEAST_RESULTS = 1024  # of a product; see `linear`
SETTINGS = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}


def turn_on() -> None:
    """Turn exact mode on for this process; ValueError if CUDA has started already.

    Call it on every rank, before anything uses a GPU.
    """
    if not torch.cuda.is_available():
        raise ValueError("got exact mode without a GPU, expected one: a CPU's matrix products round by their row count")
    if torch.cuda.is_initialized() and not _set():
        shown = " ".join(f"{name}={value}" for name, value in SETTINGS.items())
        raise ValueError(f"got exact mode after CUDA has started, expected it before; turn it on first, or set {shown}")
    os.environ.update(SETTINGS)
    torch.backends.cuda.preferred_blas_library("cublaslt")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def is_on() -> bool:
    """Return whether exact mode is on in this process."""
    matmul = torch.backends.cuda.matmul
    whole_sums = not (matmul.allow_bf16_reduced_precision_reduction or matmul.allow_fp16_reduced_precision_reduction)
    return _set() and whole_sums and str(torch.backends.cuda.preferred_blas_library()).lower().endswith("cublaslt")


def _set() -> bool:
    return all(os.environ.get(name) == value for name, value in SETTINGS.items())


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return a linear layer's output whose rows have the bits that they have among many rows.

    x: (..., K); weight: (N, K). cuBLAS was seen to split the sums of 64 results, whose partial sums it can keep in the
    least workspace that torch takes: 1 KiB, 256 numbers in fp32. Few rows become so many that there are four times as
    many results as it has numbers.
    """
    rows, outputs = x[..., 0].numel(), len(weight)
    more = -(-LEAST_RESULTS // outputs) - rows
    if x.dim() < 2 or rows == 0 or more <= 0:
        return F.linear(x.contiguous(), weight, bias)
    flat = torch.cat([x.flatten(0, -2), x.new_zeros(more, x.shape[-1])])
    return F.linear(flat, weight, bias)[:rows].unflatten(0, x.shape[:-1])
