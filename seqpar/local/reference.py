"""Attention computed by its formula in fp32 (fp64 for fp64): the truth that other implementations are compared with.

Never the fastest, because it builds the score matrix; it runs everywhere and takes any head
dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seqpar.types.masks import is_kept
from seqpar.types.protocols import state_dtype

MOST = 2**29  # scores at a time: 2 GiB in fp32


def why_not(device: torch.device, dtype: torch.dtype, head_dim: int, mask: bool = False) -> str | None:
    """Return None, because it takes every device, dtype and head dim, and key masks."""
    return None


def preference(major: int, head_dim: int) -> int:
    # last, because it is slow
    return -1


def invariant(device: torch.device, dtype: torch.dtype, head_dim: int, mask: bool = False) -> str | None:
    return "batched matrix products choose their tiles by row counts"


def attend(q_BLHD: Tensor, k_BLGD: Tensor, v_BLGD: Tensor, mask_BL: Tensor | None = None, /) -> tuple[Tensor, Tensor]:
    """Return softmax(q k^T / sqrt(D)) v and the log-sum-exp of the scores; see `seqpar.types.protocols.Core`.

    Masked keys have a weight of exactly 0. If all keys are masked, the output is 0 and the log-sum-exp -inf. Scores of
    more than `MOST` numbers are computed for some queries at a time.
    """
    batch, queries, heads, _ = q_BLHD.shape
    rows = max(1, MOST // max(1, batch * heads * k_BLGD.shape[1]))
    if queries <= rows:
        return _attend(q_BLHD, k_BLGD, v_BLGD, mask_BL)
    parts = [_attend(q, k_BLGD, v_BLGD, mask_BL) for q in q_BLHD.split(rows, dim=1)]
    return torch.cat([out for out, _ in parts], dim=1), torch.cat([lse for _, lse in parts], dim=2)


def _attend(q_BLHD: Tensor, k_BLGD: Tensor, v_BLGD: Tensor, mask_BL: Tensor | None) -> tuple[Tensor, Tensor]:
    wide, group = state_dtype(q_BLHD.dtype), q_BLHD.shape[2] // k_BLGD.shape[2]
    q, k, v = (x.transpose(1, 2).to(wide) for x in (q_BLHD, k_BLGD, v_BLGD))
    k, v = (x.repeat_interleave(group, dim=1) if group > 1 else x for x in (k, v))
    scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    if mask_BL is not None:
        scores = scores.masked_fill(~is_kept(mask_BL)[:, None, None], -torch.inf)
        if mask_BL.dtype != torch.bool:
            scores = scores + mask_BL[:, None, None]
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp()
    if mask_BL is not None:
        weights = weights.masked_fill((lse == -torch.inf)[..., None], 0.0)
    return (weights @ v).transpose(1, 2).to(q_BLHD.dtype), lse
