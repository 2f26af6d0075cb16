"""Attention by the FlashAttention packages: 4 (`flash_attn.cute`), else 3 (`flash_attn_interface`), else 2.

Where it is installed it is the first choice on Hopper at head dims 64 and 128 (see `preference`).
Grouped-query heads need no copies. FlashAttention-4 compiles a kernel for each head dim on first use.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

# generation -> (module, the argument that makes it return the log-sum-exp)
PACKAGES = {
    4: ("flash_attn.cute", "return_lse"),
    3: ("flash_attn_interface", "return_attn_probs"),
    2: ("flash_attn", "return_attn_probs"),
}


def why_not(device: torch.device, dtype: torch.dtype, head_dim: int, mask: bool = False) -> str | None:
    if device.type != "cuda":
        return "needs a GPU"
    if mask:
        return "takes no key masks"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"takes fp16 and bf16, not {dtype}"
    package = _find()
    if isinstance(package, str):
        return package
    if head_dim % 8 or head_dim > (128 if package[0] == 4 else 256):
        return f"FlashAttention-{package[0]} does not take head dim {head_dim}"
    return None


def preference(major: int, head_dim: int) -> int:
    # before `sdpa` on Hopper at head dims 64 and 128, else after it
    return 2 if major == 9 and head_dim in (64, 128) else 0


def invariant(device: torch.device, dtype: torch.dtype, head_dim: int, mask: bool = False) -> str | None:
    """Return None if a query's bits depend on that query alone (measured for generation 4), otherwise the reason."""
    if device.type != "cuda":
        return f"needs a GPU, not {device.type}"
    package = _find()
    if isinstance(package, str):
        return package
    return None if package[0] == 4 else f"FlashAttention-{package[0]} may split its work by row counts"


def attend(q_BLHD: Tensor, k_BLGD: Tensor, v_BLGD: Tensor, mask_BL: Tensor | None = None, /) -> tuple[Tensor, Tensor]:
    """Compute attention as `seqpar.types.protocols.Core` says, without copies for grouped-query heads.

    Raises `ValueError` if a mask is given.
    """
    if mask_BL is not None:
        raise ValueError("FlashAttention does not support key masks; use local attention sdpa")
    package = _find()
    if isinstance(package, str):
        raise ImportError(package)
    function, with_lse = package[1:]
    result = function(q_BLHD, k_BLGD, v_BLGD, **{with_lse: True})
    # generation 2 returns (out, lse, probabilities), the others (out, lse)
    return result[0], result[1]


@cache
def _find() -> tuple[int, Callable[..., Any], str] | str:
    reasons = []
    for generation, (module, with_lse) in PACKAGES.items():
        try:
            return generation, importlib.import_module(module).flash_attn_func, with_lse
        except (ImportError, AttributeError) as error:
            reasons.append(f"FlashAttention-{generation}: {error}")
    return "not installed (pip install -e '.[flash]' in a clone): " + "; ".join(reasons)
