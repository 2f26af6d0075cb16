"""Attention by the package flash-attn-4 (`flash_attn.cute`).

Where it is installed it is the first choice on Hopper at head dims 64 and 128 (see `preference`).
Grouped-query heads need no copies. It compiles a kernel for each head dim on first use.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor


def why_not(device: torch.device, dtype: torch.dtype, head_dim: int, mask: bool = False) -> str | None:
    if device.type != "cuda":
        return "needs a GPU"
    if mask:
        return "takes no key masks"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"takes fp16 and bf16, not {dtype}"
    if isinstance(package := _find(), str):
        return package
    return f"does not take head dim {head_dim}" if head_dim % 8 or head_dim > 128 else None


def preference(major: int, head_dim: int) -> int:
    # before `sdpa` on Hopper at head dims 64 and 128, else after it
    return 2 if major == 9 and head_dim in (64, 128) else 0


def invariant(device: torch.device, dtype: torch.dtype, head_dim: int, mask: bool = False) -> str | None:
    """Return None if it is there: a query's bits depend on that query alone (measured)."""
    package = _find()
    return package if isinstance(package, str) else None


def attend(q_BLHD: Tensor, k_BLGD: Tensor, v_BLGD: Tensor, mask_BL: Tensor | None = None, /) -> tuple[Tensor, Tensor]:
    """Compute attention as `seqpar.types.protocols.Core` says, without copies for grouped-query heads.

    Raises `ValueError` if a mask is given.
    """
    if mask_BL is not None:
        raise ValueError("FlashAttention does not support key masks; use local attention sdpa")
    package = _find()
    if isinstance(package, str):
        raise ImportError(package)
    return package(q_BLHD, k_BLGD, v_BLGD, return_lse=True)


@cache
def _find() -> Callable[..., Any] | str:
    try:
        return importlib.import_module("flash_attn.cute").flash_attn_func
    except (ImportError, AttributeError) as error:
        return f"not installed (pip install -e '.[flash]' in a clone): {error}"
