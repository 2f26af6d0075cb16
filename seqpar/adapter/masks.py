"""Converts the masks that diffusers' transformers pass to attention into the key masks of strategies, once a call.

A transformer masks padding in one of several shapes, for all tokens in its own order of streams. Strategies take one
row of keys for each batch row, in the order of the ranks, [t0 i0 t1 i1 ...], or in exact mode in that of the streams. A
mask that leaves no key out is dropped (`FullMasks`): attention without one computes the same, by faster kernels.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from seqpar.adapter.cuts import JOINED, Cuts
from seqpar.engine.signature import Form, form_of
from seqpar.ranks.shard import JointShard
from seqpar.types.masks import aligned_bias, in_key_order, joined_mask, key_bias

FULL = "full_masks"  # an argument beside the transformer's own: the names of the masks that it needs, but no attention


class FullMasks:
    """Drops the key masks of calls that leave no key out, on all ranks by rank 0's decision.

    A mask is read once, and again after it was written in place, because reading it waits for the device. Where torch
    counts no writes, as for tensors of its inference mode, a mask stays.
    """

    def __init__(self, cuts: Cuts) -> None:
        self._names, self._kept = tuple(cuts.masks), cuts.kept
        # mask -> its count of writes when it was read, whether it is full
        self._known: MutableMapping[Tensor, tuple[int, bool]] = WeakTensorKeyDictionary()

    def among(self, tensors: Mapping[str, Tensor]) -> int:
        """Return a number with a bit for each mask of the cuts, which is set if it leaves no key out.

        tensors: the arguments of a call by their names.
        """
        masks = [tensors.get(name) for name in self._names]
        return sum(1 << bit for bit, mask in enumerate(masks) if mask is not None and self._is_full(mask))

    def dropped(self, form: Form, full: int) -> Form:
        """Return the arguments of a call with None for full masks, or with `FULL` for those that the forward needs.

        full: what `among` returned on rank 0.
        """
        names = [name for bit, name in enumerate(self._names) if full >> bit & 1]
        if not names:
            return form
        needed = tuple(name for name in names if name in self._kept)
        whole = form.whole | {name: None for name in names if name not in needed}
        return form_of(whole | {FULL: needed} if needed else whole)

    def _is_full(self, mask: Tensor) -> bool:
        if mask.is_inference():
            return False
        writes, full = self._known.get(mask, (-1, False))
        if writes != mask._version:
            full = bool((mask != 0).all())
            self._known[mask] = mask._version, full
        return full


def is_by_key(mask: Tensor | None, rows: int) -> bool:
    """Return whether a mask is the same for every head and query of `rows` batch rows, so that it can be split.

    It is (B, L), (B, 1, L) or (B, 1, 1, L); longer dims in between must be expanded ones. Two dims that do not begin
    with the batch are queries and keys, as in torch.
    """
    if mask is None:
        return True
    between = list(zip(mask.shape, mask.stride(), strict=True))[1:-1]
    return len(mask) in (1, rows) and all(size == 1 or stride == 0 for size, stride in between)


def key_rows(mask: Tensor, rows: int) -> Tensor:
    """Return a mask's row of keys for each of `rows` batch rows, (B, L): bool, or numbers to add to the scores.

    Integers are nonzero for the keys to attend to. Raises ValueError for masks that differ between queries or heads.
    """
    if not is_by_key(mask, rows):
        raise ValueError(
            f"got an attention mask of shape {tuple(mask.shape)}, expected one row of keys for each batch row "
            f"(B, 1, 1, L): a mask that differs between queries or heads cannot be split"
        )
    while mask.dim() > 2:
        mask = mask[:, 0]
    return mask if mask.dtype == torch.bool or mask.is_floating_point() else mask != 0


def from_whole(mask: Tensor, rows: int, tokens: JointShard, dtype: torch.dtype) -> Tensor:
    """Return the key bias in the order of the keys, of a mask for all tokens, the streams one after the other."""
    keys_BL, lengths = key_rows(mask, rows), [shard.total for shard in tokens.streams]
    if keys_BL.shape[1] != sum(lengths):
        raise ValueError(
            f"got an attention mask for {keys_BL.shape[1]} keys, expected {sum(lengths)}, the tokens of all streams; "
            f"a plan leaves masks whole"
        )
    if keys_BL.dtype == torch.bool:
        return key_bias(joined_mask(keys_BL.split(lengths, dim=1), tokens, keys_BL), dtype)
    joined = in_key_order(keys_BL.split(lengths, dim=1), tokens)
    return aligned_bias(joined.to(dtype).clamp(min=torch.finfo(dtype).min / 2))  # as large as a key that is masked


def keys_of(mask: Tensor, stream: str) -> Tensor:
    """Return which keys of a stream are to be attended to, (B, L) bool, by an argument of the transformer.

    Of `JOINED` tokens floating numbers stay such, ones and zeros: they are added to scores.
    """
    kept = key_rows(mask, len(mask)) != 0
    return kept.to(mask.dtype) if stream == JOINED and mask.is_floating_point() else kept


def from_streams(
    masks: Mapping[str, Tensor], streams: Sequence[str], tokens: JointShard, dtype: torch.dtype
) -> Tensor | None:
    """Return the key bias in the order of the keys, of what `keys_of` returned for streams with padding, or None."""
    if (joined := masks.get(JOINED)) is not None:
        return from_whole(joined, len(joined), tokens, dtype)
    every = [masks.get(name) for name in streams]
    like = next((mask for mask in every if mask is not None), None)
    return None if like is None else key_bias(joined_mask(every, tokens, like), dtype)


def of_rank(mask_BL: Tensor, tokens: JointShard, rank: int) -> Tensor:
    """Return the part (B, l) of a mask for all tokens, stream after stream, that belongs to the tokens of a rank."""
    parts = mask_BL.split([shard.total for shard in tokens.streams], dim=1)
    return torch.cat([part[:, shard.slice(rank)] for part, shard in zip(parts, tokens.streams, strict=True)], dim=1)
