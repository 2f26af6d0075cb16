"""Exact mode: a row's bits depend on that row alone, so latents are the same on any number of GPUs, at any size.

What stands in the way of it is cuBLAS, which at few rows splits a sum over K among programs (an H200: 4096 -> 32 up to
2048 rows, 11008 -> 4096 up to 128). Without room for partial sums it cannot: small workspaces, chosen before CUDA
starts. Attention must be of a kind whose rows do not depend on each other's number (`invariant` of a local attention),
and a ring, which merges partial results, is refused. All other kernels are row by row. It holds for our own loop, whose
table of modulation is the same product on every rank; a diffusers pipeline makes its own for the rows of a call.
When it wins: results that can be compared bit by bit, between layouts and machines of one kind. What it costs is
measured by `launch/bench.py steps --exact`.
"""

from __future__ import annotations

import os

import torch

# read by cuBLAS and torch when the first product runs
SETTINGS = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}


def turn_on() -> None:
    """For this process, from now on; on every rank, before anything touches a GPU. Raises ValueError where too late."""
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
    """Whether matrix products are exact in this process."""
    matmul = torch.backends.cuda.matmul
    whole_sums = not (matmul.allow_bf16_reduced_precision_reduction or matmul.allow_fp16_reduced_precision_reduction)
    return _set() and whole_sums and str(torch.backends.cuda.preferred_blas_library()).lower().endswith("cublaslt")


def _set() -> bool:
    return all(os.environ.get(name) == value for name, value in SETTINGS.items())
