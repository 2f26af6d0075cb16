"""A call's masks: what rank 0 reads of them on the host, and key masks in the order of the strategies' keys.

A transformer masks padding in one of several shapes, for all tokens in its own order of streams. Strategies take one
row of keys per batch row, in the order of the ranks, [t0 i0 t1 i1 ...], or in exact mode in that of the streams.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from seqpar.families._cuts import NOTE, Cuts
from seqpar.families._masks import JOINED, Keys, Prepared, drop_full, key_rows, keys_of
from seqpar.graphs.signature import Form, form_of
from seqpar.mesh.shard import JointShard
from seqpar.types.masks import aligned_bias, in_key_order, joined_mask, key_bias

BITS = 16  # per number that is read; `Preparation` packs three into one that fits into 63 bits
MOST = 3
RANKS = 16  # on up to this many ranks exact mode computes the same padding


class Preparation:
    """Prepares calls by `Cuts.prepare`: rank 0 reads numbers (`read`), by which all ranks do the same (`apply`).

    ranks: on how many ranks the tokens are split. exact: whether the same tokens must stay on up to `RANKS` ranks,
    because one masked key more changes the bits. moves_only: returns that of `Prepared`. config: the transformer's.
    """

    def __init__(
        self,
        cuts: Cuts,
        ranks: int,
        exact: bool = False,
        moves_only: Callable[[], bool] = lambda: True,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self._cuts, self._moves_only, self._config = cuts, moves_only, config or {}
        self._ranks = max(ranks, RANKS) if exact else ranks
        self._changes_calls = cuts.prepare is not None or bool(cuts.masks)
        # tensor -> key -> its count of writes when it was read, what was read of it
        self._cached: MutableMapping[Tensor, dict[Hashable, tuple[int, int]]] = WeakTensorKeyDictionary()

    def read(self, form: Form) -> int:
        """Return the numbers that preparing a call reads, packed into one."""
        if not self._changes_calls:
            return 0
        numbers = list[int]()

        def number(tensor: Tensor, read: Callable[[], int], key: Hashable) -> int:
            numbers.append(self._read(tensor, read, key))
            return numbers[-1]

        with suppress(ValueError):  # `apply` raises it on all ranks
            self._run(form, number)
        if len(numbers) > MOST or any(number >> BITS for number in numbers):
            raise RuntimeError(f"prepare read {numbers}; at most {MOST} numbers of {BITS} bits are sent")
        return sum(number << BITS * place for place, number in enumerate(numbers))

    def apply(self, form: Form, number: int) -> tuple[Form, dict[str, Any], list[str]]:
        """Return a call's arguments after the cuts, what replaces some of them when it is computed, and messages.

        number: what `read` returned on rank 0. Raises the ValueErrors of `Cuts.prepare`.
        """
        if not self._changes_calls:
            return form, {}, []
        numbers = (number >> BITS * place & (1 << BITS) - 1 for place in range(MOST))
        call = self._run(form, lambda *_: next(numbers))
        changes: dict[str, Any] = dict.fromkeys(call.dropped)
        if call.note is not None:
            changes[NOTE] = call.note
        return form_of(call.arguments) if call.is_cut else form, changes, call.messages

    def _run(self, form: Form, number: Callable[[Tensor, Callable[[], int], Hashable], int]) -> Prepared:
        call = Prepared(form.whole, self._ranks, self._moves_only(), number, self._config)
        if self._cuts.prepare is not None:
            self._cuts.prepare(call)
        else:
            drop_full(call, *self._cuts.masks)
        return call

    def _read(self, tensor: Tensor, read: Callable[[], int], key: Hashable) -> int:
        # what `read` returned after the last write to a tensor
        if tensor.is_inference():  # its writes are not counted
            return 0
        cached = self._cached.setdefault(tensor, {})
        writes, number = cached.get(key, (-1, 0))
        if writes != tensor._version:
            number = int(read())
            cached[key] = tensor._version, number
        return number


def keys_for(cuts: Cuts, arguments: dict[str, Any], note: Hashable, keeps: bool = False) -> Keys:
    """Return what attention leaves out in a call, and put None in the place of masks that its forward need not get.

    keeps: whether it gets them, because attention of a user reads them.
    """
    masks = {name: mask for name in cuts.masks if (mask := arguments.get(name)) is not None}
    if cuts.keys is not None:
        keys = cuts.keys(arguments, note)
    else:
        arguments |= dict.fromkeys(masks)
        keys = Keys({cuts.masks[name]: keys_of(mask, cuts.masks[name]) for name, mask in masks.items()})
    if keeps:
        arguments |= masks
    return keys


def from_whole(mask: Tensor, rows: int, tokens: JointShard, dtype: torch.dtype) -> Tensor:
    """Return the key bias in the order of the keys, of a mask for all tokens, stream after stream."""
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


def from_streams(
    masks: Mapping[str, Tensor], streams: Sequence[str], tokens: JointShard, dtype: torch.dtype
) -> Tensor | None:
    """Return the key bias in the order of the keys, of masks of streams (`Keys.masks`), or None without any."""
    if (joined := masks.get(JOINED)) is not None:
        return from_whole(joined, len(joined), tokens, dtype)
    every = [masks.get(name) for name in streams]
    like = next((mask for mask in every if mask is not None), None)
    return None if like is None else key_bias(joined_mask(every, tokens, like), dtype)


def of_rank(mask_BL: Tensor, tokens: JointShard, rank: int) -> Tensor:
    """Return the part (B, l) of a mask for all tokens, stream after stream, that belongs to the tokens of a rank."""
    parts = mask_BL.split([shard.total for shard in tokens.streams], dim=1)
    return torch.cat([part[:, shard.slice(rank)] for part, shard in zip(parts, tokens.streams, strict=True)], dim=1)
