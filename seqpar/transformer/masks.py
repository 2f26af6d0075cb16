"""Converts the masks that diffusers' transformers pass to attention into the key masks of strategies, once a call.

A transformer masks padding in one of several shapes, for all tokens in its own order of streams. Strategies take one
row of keys for each batch row, in the order of the ranks, [t0 i0 t1 i1 ...], or in exact mode in that of the streams. A
mask that leaves no key out is dropped (`FullMasks`): attention without one computes the same, by faster kernels. To
that end padding is left out of texts where the cuts say that nothing reads it. Where attention reads it at another
weight (`Cuts.weighed`), the number of its tokens takes the place of the mask.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from seqpar.families._cuts import FULL, JOINED, PADDING, Cuts, Padding
from seqpar.graphs.signature import Form, form_of
from seqpar.mesh.shard import JointShard
from seqpar.types.masks import aligned_bias, in_key_order, joined_mask, key_bias

BITS = 16  # of a mask in the number that tells all ranks what rank 0 has seen; there is room for three masks
ODD = 2  # a mask of a text that is not cut has other numbers than 0 and 1
EARLY = 4  # a mask of `Cuts.at_end` has padding before a token
MOST = 1 << BITS - 2  # tokens of a text that may be cut, or of padding that is weighed
RANKS = 16  # on up to so many ranks exact mode computes as much padding as on one


class FullMasks:
    """Leaves padding out of texts, and drops the key masks of calls that leave no key out.

    All ranks do so by rank 0's decision. A mask is read once, and again after it was written in place, because reading
    it waits for the device. Where torch counts no writes, as for tensors of its inference mode, a mask stays. ranks:
    the number of those that split a text. exact: whether as many tokens must stay on any number of ranks up to
    `RANKS`, because one key more that is masked changes the bits. weighs: whether the strategy takes padding that it is
    to weigh, in place of a mask.
    """

    def __init__(self, cuts: Cuts, ranks: int, exact: bool = False, weighs: bool = True) -> None:
        self._names, self._padding = tuple(dict.fromkeys((*cuts.masks, *cuts.padding))), cuts.padding
        self._weighed = cuts.weighed if weighs else {}
        self._kept = (*cuts.kept, *(name for name in cuts.padding if name not in cuts.masks))
        self._at_end = cuts.at_end
        self._passed, self._bools, self._ranks = cuts.passed, cuts.bools, max(ranks, RANKS) if exact else ranks
        # mask, or rows of `Padding.rows` -> its count of writes when it was read, what was read of it
        self._known: MutableMapping[Tensor, tuple[int, int]] = WeakTensorKeyDictionary()

    def among(self, tensors: Mapping[str, Tensor]) -> int:
        """Return a number with `BITS` bits for each mask of the cuts: whether it leaves no key out, and what is cut.

        Of a mask by which padding is weighed it is 4 times the number of tokens of padding, where no key is left out.
        tensors: the arguments of a call by their names.
        """
        codes = [self._code_among(tensors, name) for name in self._names]
        return sum(code << BITS * place for place, code in enumerate(codes))

    def early(self, number: int) -> list[str]:
        """Return the masks of `Cuts.at_end` with padding before a token. number: what `among` returned on rank 0."""
        return [name for name, code in self._codes(number) if name in self._at_end and code & EARLY]

    def cut(self, form: Form, number: int) -> Form:
        """Return the arguments of a call with texts, and their masks, as long as the longest text of the batch.

        number: what `among` returned on rank 0.
        """
        whole, counts = form.whole, {name: code >> 1 for name, code in self._codes(number)}
        for name, padding in self._padding.items():
            if counts[name]:
                whole |= _shortened(whole, name, padding, counts[name] - 1)
        return form_of(whole) if any(counts[name] for name in self._padding) else form

    def dropped(self, form: Form, number: int) -> Form:
        """Return the arguments of a call with None for full masks, or with `FULL` for those that the forward needs.

        `PADDING` takes the place of a mask by which attention weighs padding. number: what `among` returned on rank 0.
        """
        codes = self._codes(number)
        for name, code in codes:
            if name not in self._padding and code & ODD:
                raise ValueError(f"got {name} with numbers other than 0 and 1, expected these, or bool")
        weighed = {name: code >> 2 for name, code in codes if name in self._weighed and code >> 2}
        names = [name for name, code in codes if code & 1]
        needed = tuple(name for name in names if name in self._kept)
        changed: dict[str, Any] = {name: None for name in (*names, *weighed) if name not in needed}
        if needed:
            changed[FULL] = needed
        if weighed:
            (changed[PADDING],) = weighed.values()
        return form_of(form.whole | changed) if changed else form

    def _codes(self, number: int) -> list[tuple[str, int]]:
        """Return each mask's name and its code in a number; see `among`."""
        return [(name, number >> BITS * place & (1 << BITS) - 1) for place, name in enumerate(self._names)]

    def _code_among(self, tensors: Mapping[str, Tensor], name: str) -> int:
        """Return a mask's code; a text whose tokens have places of their own stays as long as it is."""
        if (mask := tensors.get(name)) is None or mask.dim() < 2:
            return 0
        code, padding = self._known_code(name, mask), self._padding.get(name)
        if name in self._weighed and (end := code >> BITS):
            streams = [tensors[each].shape[:2] for each in self._weighed[name] if each in tensors]
            return code - (end << BITS) if _is_of(mask, streams, end) else 0
        if not code or padding is None or not padding.rows:
            return code
        if (rows := tensors.get(padding.rows)) is not None and mask.shape[1] <= self._equal_rows(rows):
            return code
        return int(code == (mask.shape[1] + 1) * 2 + 1)

    def _equal_rows(self, rows: Tensor) -> int:
        """Return how many rows at the beginning are equal to the first one."""

        def read() -> int:
            differ = (rows != rows[:1]).flatten(1).any(dim=1)
            return int(torch.cat([differ, differ.new_ones(1)]).byte().argmax())

        return self._read(rows, read)

    def _known_code(self, name: str, mask: Tensor) -> int:
        return self._read(mask, lambda: self._code(name, mask) or (name in self._weighed and _one_run(mask)))

    def _read(self, tensor: Tensor, read: Callable[[], int]) -> int:
        """Return what `read` returned when it was last called, after the last write to a tensor; 0 without a count."""
        if tensor.is_inference():
            return 0
        writes, number = self._known.get(tensor, (-1, 0))
        if writes != tensor._version:
            number = read()
            self._known[tensor] = tensor._version, number
        return number

    def _code(self, name: str, mask: Tensor) -> int:
        """Return 1 for a mask that leaves no key out once its text is cut, plus twice (the tokens that stay, plus 1).

        Tokens that stay are counted only where a text may be cut. The forward computes with the numbers of a mask that
        it applies itself: 1 for a token, or what is added to scores, if there is a dim for queries.
        """
        tokens, padding = mask.shape[1], self._padding.get(name)
        if name in self._passed:
            return int(bool((mask == (1 if mask.dim() == 2 else 0)).all()))
        if name in self._bools and mask.is_floating_point():
            return 0  # as it is, so that it is refused
        if padding is None or not 0 < tokens < MOST or (mask.dim() > 2 and padding.text != name):
            odd = mask.is_floating_point() and bool(((mask != 0) & (mask != 1)).any())
            if odd:
                return ODD * (padding is None)
            return int(bool((mask != 0).all())) or EARLY * (name in self._at_end and _is_early(mask))
        needed, count = _needed_and_count(mask, at_end=not padding.rows)
        least = max(padding.least, self._ranks if padding.on_ranks else 0)
        tokens = max(needed, min(least, tokens))
        return (tokens + 1) * 2 + (count == len(mask) * tokens)


def _needed_and_count(mask: Tensor, at_end: bool) -> tuple[int, int]:
    """Return how many tokens a text needs without its padding, and how many valid ones there are in all rows.

    mask: (B, L), nonzero for valid tokens; or (B, L, C), features whose tokens are all valid unless all are zeros.
    at_end: whether padding stays before valid tokens of any row.
    """
    if mask.dim() > 2:
        tokens = mask.shape[1] if bool((mask != 0).any()) else 0
        return tokens, len(mask) * tokens
    valid, places = mask != 0, torch.arange(1, mask.shape[1] + 1, device=mask.device)
    needed = (valid * places).amax() if at_end else valid.sum(dim=1).amax()
    tokens, count = torch.stack((needed, valid.sum())).tolist()
    return tokens, count


def _is_early(mask_BL: Tensor) -> bool:
    """Return whether a row of a mask has padding before a token."""
    return int((mask_BL != 0).byte().diff(dim=1).eq(1).sum()) > 0


def _is_of(mask: Tensor, streams: Sequence[torch.Size], end: int) -> bool:
    """Return whether a mask has the tokens of these streams, (rows, tokens) each, and the first one ends at `end`."""
    tokens = [size[-1] for size in streams]
    return mask.shape[1] == sum(tokens) and tokens[:1] == [end] and len(mask) in (1, streams[0][0])


def _one_run(mask: Tensor) -> int:
    """Return 4 times how many zeros a mask has, plus where they end << `BITS`, if they are one run alike in all rows.

    mask: (B, L) floating ones and zeros; others return 0, because bools leave padding out, so that it has no weight. So
    does a single zero: not every kernel attends to one key.
    """
    if not mask.is_floating_point() or mask.dim() > 2:
        return 0
    zeros = (mask[0] == 0).byte()
    first, count = torch.stack([zeros.argmax(), zeros.sum()]).tolist()
    here = torch.arange(mask.shape[1], device=mask.device)
    alike = bool(((mask == 0) == ((here >= first) & (here < first + count))).all())
    return (first + count << BITS) + (count << 2) if alike and 1 < count < MOST else 0


def _shortened(whole: Mapping[str, Any], name: str, padding: Padding, tokens: int) -> dict[str, Any]:
    """Return the arguments that have so many tokens of a text in place of all; name: the mask's."""
    mask, text = whole[name], whole[padding.text]
    if tokens >= mask.shape[1]:
        return {}
    if not padding.rows:
        return {name: mask[:, :tokens], padding.text: text[:, :tokens]}
    order_Bl = (mask != 0).byte().argsort(dim=1, descending=True, stable=True)[:, :tokens]  # valid tokens first
    like_text = order_Bl.view(*order_Bl.shape, *[1] * (text.dim() - 2))
    rows = torch.cat([whole[padding.rows][:tokens], whole[padding.rows][mask.shape[1] :]])
    return {
        name: mask.take_along_dim(order_Bl, dim=1),
        padding.text: text.take_along_dim(like_text.to(text.device), dim=1),
        padding.rows: rows,
    }


def is_by_key(mask: Tensor | None, rows: int) -> bool:
    """Return whether a mask is the same for every head and query of `rows` batch rows, so that it can be split.

    It is (B, L), (B, 1, L) or (B, 1, 1, L); longer dims in between must be expanded ones. Two dims that do not begin
    with the batch are queries and keys, as in torch.
    """
    if mask is None or mask.dim() < 2:
        return mask is None
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
