"""Converts the masks that diffusers' transformers pass to attention into the key masks of strategies, once a call.

A transformer masks padding in one of several shapes, for all tokens in its own order of streams. Strategies take one
row of keys for each batch row, in the order of the ranks: [t0 i0 t1 i1 ...].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from seqpar.masks import joined_mask, key_bias
from seqpar.shard import JointShard


def key_rows(mask: Tensor) -> Tensor:
    """Return the keys to attend to, (B, L) bool, of a mask that is the same for every head and query.

    mask: (B, L), (B, 1, L) or (B, 1, 1, L), bool or integers; longer dims in between must be expanded ones. Raises
    ValueError for masks that differ between queries or heads, or that hold numbers to add to the scores.
    """
    if mask.is_floating_point():
        raise ValueError(
            f"got an attention mask of {mask.dtype}, expected bool, True for the keys to attend to: what it adds to "
            f"the scores cannot be split; pass a bool mask"
        )
    while mask.dim() > 2:
        if mask.shape[1] != 1 and mask.stride(1) != 0:
            raise ValueError(
                f"got an attention mask of shape {tuple(mask.shape)}, expected one row of keys for each batch row "
                f"(B, 1, 1, L): a mask that differs between queries or heads cannot be split"
            )
        mask = mask[:, 0]
    return mask if mask.dtype == torch.bool else mask != 0


def from_whole(mask: Tensor, tokens: JointShard, dtype: torch.dtype) -> Tensor:
    """Return the key bias in the order of the ranks, of a mask for all tokens, the streams one after the other."""
    keys_BL, lengths = key_rows(mask), [shard.total for shard in tokens.streams]
    if keys_BL.shape[1] != sum(lengths):
        raise ValueError(
            f"got an attention mask for {keys_BL.shape[1]} keys, expected {sum(lengths)}, the tokens of all streams; "
            f"a plan leaves masks whole"
        )
    return key_bias(joined_mask(keys_BL.split(lengths, dim=1), tokens, keys_BL), dtype)


def from_streams(
    masks: Mapping[str, Tensor], streams: Sequence[str], tokens: JointShard, dtype: torch.dtype
) -> Tensor | None:
    """Return the key bias in the order of the ranks, of one mask for each stream with padding; None without any."""
    given = [key_rows(masks[name]) if name in masks else None for name in streams]
    like = next((mask for mask in given if mask is not None), None)
    return None if like is None else key_bias(joined_mask(given, tokens, like), dtype)
