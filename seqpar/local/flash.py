"""FlashAttention as its own package: 4 (`flash_attn.cute`), else 3 (`flash_attn_interface`), else 2 (`flash_attn`).

When it wins: the first choice on Hopper at head dims 64 and 128 where it is installed (the table in
`seqpar.planner.plan`), and grouped-query heads need no copies. FlashAttention-4 compiles each head dim on first use.
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
    """None where an installed generation takes this, else the reason why not."""
    if device.type != "cuda":
        return "needs a GPU"
    if mask:
        return "takes no key masks"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"takes fp16 and bf16, not {dtype}"
    found = _find()
    if isinstance(found, str):
        return found
    if head_dim % 8 or head_dim > (128 if found[0] == 4 else 256):
        return f"FlashAttention-{found[0]} does not take head dim {head_dim}"
    return None


def preference(major: int, head_dim: int) -> int:
    """First on Hopper at head dims 64 and 128, after `sdpa` elsewhere.

    major: of the GPU's compute capability, 0 on a CPU.
    """
    return 2 if major == 9 and head_dim in (64, 128) else 0


def invariant(device: torch.device, dtype: torch.dtype, head_dim: int, mask: bool = False) -> str | None:
    """None where a query's bits depend on that query alone (measured: generation 4), else the reason why not."""
    if device.type != "cuda":
        return f"needs a GPU, not {device.type}"
    found = _find()
    if isinstance(found, str):
        return found
    return None if found[0] == 4 else f"FlashAttention-{found[0]} may split its work by row counts"


def attend(q_BLHD: Tensor, k_BLGD: Tensor, v_BLGD: Tensor, mask_BL: Tensor | None = None, /) -> tuple[Tensor, Tensor]:
    """See `seqpar.protocols.Core`; grouped-query heads as they are. A mask is refused by `ValueError`."""
    if mask_BL is not None:
        raise ValueError("got a key mask, expected None: FlashAttention takes none; use local attention sdpa")
    found = _find()
    if isinstance(found, str):
        raise ImportError(found)
    function, with_lse = found[1:]
    result = function(q_BLHD, k_BLGD, v_BLGD, **{with_lse: True})
    # generation 2 returns (out, lse, probabilities), the others (out, lse)
    return result[0], result[1]


@cache
def _find() -> tuple[int, Callable[..., Any], str] | str:
    """(generation, function, its lse argument), or why there is none."""
    reasons = []
    for generation, (module, with_lse) in PACKAGES.items():
        try:
            return generation, importlib.import_module(module).flash_attn_func, with_lse
        except (ImportError, AttributeError) as error:
            reasons.append(f"FlashAttention-{generation}: {error}")
    return "not installed (pip install 'seqpar[flash]'): " + "; ".join(reasons)
