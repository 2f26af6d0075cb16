"""Attention in 8 bits (e4m3) by `fa3-fwd` on Hopper, and by its formula on a CPU: lossy, only by name.

q, k and v come rounded (`seqpar.kernels.prepare8`): rotated, centred and scaled by numbers that no call changes. Hopper
sums products of e4m3 in less than fp32, which loses a part of the values' mean that grows with the keys: 6 % at 4,608,
31 % at 32,760. Centred values lose 0.05 to 0.3 % up to `MOST_KEYS`. Beyond, where means drift along the keys, only sums
over 2,048 keys each, merged in fp32, would hold: at 32,760 keys and 20 heads their merges move about 13 GB, 3 to 4 ms,
and 8 bits gain 4 ms in all. So longer calls stay in the model's dtype.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from seqpar.kernels.prepare8 import prepare8
from seqpar.kernels.rows8 import E4M3
from seqpar.types.protocols import Prepare, Qkv8, output_dtype

MOST_KEYS = 8192
"""Above, a call is computed in the model's dtype."""
WEIGHTS = 2.0**8  # the largest weight of a row before it is rounded


def why_not(device: torch.device, dtype: torch.dtype, head_dim: int, mask: bool = False) -> str | None:
    """Return None if attention of numbers of this dtype can be rounded and computed, otherwise the reason why not.

    mask: ignored, because calls with key masks, like other calls that are not centred, keep the model's dtype.
    """
    if head_dim % 16:
        return f"takes head dims that 16 divides, not {head_dim}"
    if device.type == "cpu":
        return None
    if device.type != "cuda":
        return "needs a GPU or CPU"
    if dtype != torch.bfloat16 or head_dim > 256:
        return f"takes bf16 and head dims to 256, not {dtype} and {head_dim}".replace("torch.", "")
    if not torch.cuda.is_available():  # planned for GPUs that this machine lacks
        return None
    if torch.cuda.get_device_capability(device)[0] != 9:
        return f"needs Hopper (compute capability 9.0), not {torch.cuda.get_device_name(device)}"
    package = _find()
    return package if isinstance(package, str) else None


def preference(major: int, head_dim: int) -> None:
    """Return None: "auto" never chooses it."""
    return


def invariant(device: torch.device, dtype: torch.dtype, head_dim: int, mask: bool = False) -> str | None:
    """Return None: a query's bits depend on that query alone (measured for `fa3-fwd` 0.0.3)."""
    return None


def attend(q_BLHD: Tensor, k_BLGD: Tensor, v_BLGD: Tensor, mask_BL: Tensor | None = None, /) -> tuple[Tensor, Tensor]:
    """Compute attention of e4m3 as `seqpar.types.protocols.Core` says; of other dtypes, rounded uncentred.

    Raises `ValueError` if a mask is given.
    """
    if mask_BL is not None:
        raise ValueError("attention in 8 bits does not support key masks; use local attention sdpa")
    if q_BLHD.dtype != E4M3:
        how = Prepare(eight=uncentred(k_BLGD))
        out, lse = attend(*prepare8(q_BLHD, k_BLGD, v_BLGD, how))
        return out.to(q_BLHD.dtype), lse
    if q_BLHD.device.type == "cpu":
        return reference(q_BLHD, k_BLGD, v_BLGD)
    package = _find()
    if isinstance(package, str):
        raise ImportError(package)
    # the number of queries must not choose how heads of one group are packed
    return package(q_BLHD, k_BLGD, v_BLGD, pack_gqa=False, return_attn_probs=True)


def uncentred(k_BLGD: Tensor) -> Qkv8:
    """Return the rounding that only rotates, for numbers in the range of e4m3."""
    groups, dim = k_BLGD.shape[2:]
    ones, zeros = torch.ones(groups, device=k_BLGD.device), torch.zeros(groups, dim, device=k_BLGD.device)
    return Qkv8(ones, zeros, 1.0, zeros.to(k_BLGD.dtype))


def reference(q_BLHD: Tensor, k_BLGD: Tensor, v_BLGD: Tensor) -> tuple[Tensor, Tensor]:
    """Compute attention of e4m3 by its formula, with weights rounded to e4m3, too, in fp64.

    fp64 holds both sums of products exactly, so that a row's bits do not depend on other rows or on the keys' order.
    """
    share = q_BLHD.shape[2] // k_BLGD.shape[2]
    q, k, v = (x.transpose(1, 2).double() for x in (q_BLHD, k_BLGD, v_BLGD))
    k, v = (x.repeat_interleave(share, dim=1) for x in (k, v))
    scores = (q @ k.mT) * q.shape[-1] ** -0.5
    most = scores.amax(-1, keepdim=True)
    weights = (scores - most).exp()
    total = weights.sum(-1, keepdim=True)
    out = (weights * WEIGHTS).to(E4M3).double() @ v / (WEIGHTS * total)
    dtype = output_dtype(q_BLHD.dtype, q_BLHD.device)
    return out.transpose(1, 2).to(dtype), (most + total.log()).squeeze(-1).float()


@cache
def _find() -> Callable[..., Any] | str:
    try:
        return importlib.import_module("fa3_fwd_interface").flash_attn_func
    except (ImportError, AttributeError) as error:
        return f"not installed (pip install -e '.[fp8]' in a clone): {error}"
