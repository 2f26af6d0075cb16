"""Joins the key masks of several streams in the order of the joined keys, once per run.

Letters: B batch rows, L tokens of all streams and ranks, l tokens of one stream.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from seqpar.mesh.shard import JointShard

ALIGN = 16  # elements; kernels that add a bias need row strides of this multiple or a divisor of it, in every dtype


def joined_mask(masks: Sequence[Tensor | None], tokens: JointShard, like: Tensor) -> Tensor:
    """Return the key mask (B, L) bool, True for the keys to attend to, in the order in which strategies join keys.

    masks: (B, l) bool for all tokens of each stream of `tokens`, in the stream's order; None for a stream without
    padding. like: any tensor with B rows on the device of the result.
    """
    whole = []
    for mask, shard in zip(masks, tokens.streams, strict=True):
        part = like.new_ones((len(like), shard.total), dtype=torch.bool) if mask is None else mask.to(like.device)
        if part.shape != (len(like), shard.total) or part.dtype != torch.bool:
            raise ValueError(
                f"got a mask of {tuple(part.shape)}, {part.dtype}, expected {(len(like), shard.total)}, torch.bool"
            )
        whole.append(part)
    return in_key_order(whole, tokens)


def in_key_order(streams: Sequence[Tensor], tokens: JointShard) -> Tensor:
    """Return (B, L) numbers of the joined keys in the order of the strategies, from (B, l) of each stream."""
    if tokens.by_stream:
        return torch.cat(list(streams), dim=1)
    parts = [x.split(shard.sizes, dim=1) for x, shard in zip(streams, tokens.streams, strict=True)]
    return torch.cat([stream[rank] for rank in range(tokens.parts) for stream in parts], dim=1)


def key_bias(mask_BL: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a (B, L) bool mask to numbers in `dtype` that are added to the scores: 0, or a large negative number.

    Pass the result in place of the mask to save its conversion in every call. It is finite, so that a row whose keys
    are all masked has no NaN, and half of the smallest number, so that adding a score cannot overflow. Its rows are
    padded for kernels.
    """
    bias = torch.zeros(mask_BL.shape, dtype=dtype, device=mask_BL.device)
    bias.masked_fill_(~mask_BL, torch.finfo(dtype).min / 2)
    return aligned_bias(bias)


def aligned_bias(bias_BL: Tensor) -> Tensor:
    """Return the same numbers in rows that begin at multiples of `ALIGN` elements; the input itself if they do."""
    step = ALIGN * bias_BL.element_size()
    rows_fit = bias_BL.stride(0) % ALIGN == 0 or len(bias_BL) == 1
    if bias_BL.stride(1) == 1 and rows_fit and bias_BL.data_ptr() % step == 0:
        return bias_BL
    length = bias_BL.shape[1]
    return F.pad(bias_BL, (0, -length % ALIGN))[:, :length]


def is_kept(mask_BL: Tensor) -> Tensor:
    """Return the bool form (B, L) of a mask that is bool or a bias."""
    return mask_BL if mask_BL.dtype == torch.bool else mask_BL > torch.finfo(mask_BL.dtype).min / 2
