"""What families do with a call's masks: on the host before the call (`Prepared`), and on the device (`Keys`).

A mask that leaves no key out is dropped: attention without one computes the same, by faster kernels. Padding of a text
that nothing but attention's keys reads is left out of the call.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

JOINED = ""
"""In `Cuts.masks`: all tokens of the streams that attention joins, one stream after the other."""

MOST = 1 << 14  # tokens of a text that may be counted: numbers that are read have 16 bits


@dataclass
class Prepared:
    """A call before it is computed, for `Cuts.prepare`. Rank 0's values decide for all ranks.

    The function runs on every rank, and on rank 0 once before. What it does may depend on names, shapes, dtypes and
    `read`, which are equal on all ranks, and on no other value. Its ValueErrors are raised on all ranks.

    arguments: after the replacements of `cut`; arguments that the caller left out are missing. ranks: how many tokens
    give every rank one: in exact mode the same number on up to 16 ranks. moves_only: whether the strategy only moves
    keys, so that attention can weigh padding (`Keys.padding`). number: returns what `read` returns next. note: a plain
    value for `Cuts.keys` and `Cuts.forward`; calls with other notes are other graphs. config: of the transformer.
    """

    arguments: dict[str, Any]
    ranks: int
    moves_only: bool
    number: Callable[[Tensor, Callable[[], int], Hashable], int]
    config: Mapping[str, Any]
    note: Hashable = None
    is_cut: bool = False
    dropped: list[str] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)

    def mask(self, name: str) -> Tensor | None:
        """Return the argument if it is a tensor of at least two dims."""
        mask = self.arguments.get(name)
        return mask if isinstance(mask, Tensor) and mask.dim() > 1 else None

    def read(self, tensor: Tensor, read: Callable[[], int], key: Hashable = None) -> int:
        """Return what `read` returns on rank 0, below 2^16: a number that it reads from the tensor's values.

        It waits for the device, and is called once per tensor and key, and again after a write to the tensor. 0 for
        tensors of torch's inference mode, whose writes are not counted. At most three per call.
        """
        return self.number(tensor, read, key)

    def cut(self, **arguments: Tensor) -> None:
        """Replace arguments."""
        self.arguments |= arguments
        self.is_cut = True

    def drop(self, name: str) -> None:
        """Compute with None in place of an argument."""
        self.dropped.append(name)

    def say(self, message: str) -> None:
        """Let rank 0 print a message once."""
        self.messages.append(message)


class Keys(NamedTuple):
    """What attention leaves out. masks: stream, or `JOINED` -> its mask, as `keys_of` returns it.

    padding: how many tokens at the end of the first stream are padding that attention weighs (`JointShard.padding`).
    prefix: how many tokens before the streams every rank has whole, and attend to no stream (`Joint.after_prefix`).
    is_whole: whether every rank computes the whole call.
    """

    masks: Mapping[str, Tensor] = {}
    padding: int = 0
    prefix: int = 0
    is_whole: bool = False


# On the host ---------------------------------------------------------------------------------------------------

FULL, ODD = 1, 2  # a mask leaves no key out; it has other numbers than 0 and 1


def mask_code(call: Prepared, name: str, other: Callable[[Tensor], int] = lambda mask: 0, key: Hashable = None) -> int:
    """Return `FULL` for a mask that leaves no key out, else 4 times the number that `other` reads of it.

    key: see `Prepared.read`. Raises ValueError for a mask with other numbers than 0 and 1.
    """
    if (mask := call.mask(name)) is None:
        return 0
    code = call.read(mask, lambda: _full_or_odd(mask) or other(mask) << 2, key)
    if code == ODD:
        raise ValueError(f"{name} has numbers other than 0 and 1; pass a mask of 0 and 1, or of bool")
    return code


def drop_full(call: Prepared, *names: str) -> None:
    """Drop the masks of these names that leave no key out; see `mask_code`."""
    for name in names:
        if mask_code(call, name) == FULL:
            call.drop(name)


def _full_or_odd(mask: Tensor) -> int:
    if mask.is_floating_point() and bool(((mask != 0) & (mask != 1)).any()):
        return ODD
    return FULL * bool((mask != 0).all())


def shorten(call: Prepared, name: str, text: str, least: int = 0, places: Callable[[], bool] | None = None) -> bool:
    """Leave the padding of a text out, and return whether its mask then leaves no key out.

    Text and mask become as long as the longest row of the batch. name: the argument with the mask, (B, L); if it is the
    text itself, (B, L, C), its tokens are all valid unless all are zeros. text: the argument (B, L, ...). least: how
    many tokens stay. places: returns whether tokens may move closer together, in their order, so that padding is left
    out wherever it lies; None leaves out padding at the end.
    """
    if (mask := call.mask(name)) is None:
        return False
    total = mask.shape[1]
    if not 0 < total < MOST or (mask.dim() > 2 and name != text):
        return call.read(mask, lambda: _full_or_odd(mask)) == FULL
    code = call.read(mask, lambda: _count(mask, least, at_end=places is None))
    tokens, full = (code >> 1) - 1, bool(code & 1)
    if places is not None and code and not places():
        return full and tokens == total
    if 0 <= tokens < total and places is None:
        call.cut(**{key: call.arguments[key][:, :tokens] for key in (name, text)})
    elif 0 <= tokens < total:
        x = call.arguments[text]
        order_Bl = valid_first(mask)[:, :tokens]
        like_text = order_Bl.view(*order_Bl.shape, *[1] * (x.dim() - 2)).to(x.device)
        call.cut(**{name: mask.take_along_dim(order_Bl, dim=1), text: x.take_along_dim(like_text, dim=1)})
    return full


def _count(mask: Tensor, least: int, at_end: bool) -> int:
    # twice (the tokens that stay, plus 1), plus whether all of them are valid
    total = mask.shape[1]
    if mask.dim() > 2:
        needed = total if bool((mask != 0).any()) else 0
        count = len(mask) * needed
    else:
        valid, places = mask != 0, torch.arange(1, total + 1, device=mask.device)
        each = (valid * places).amax() if at_end else valid.sum(dim=1).amax()
        needed, count = torch.stack((each, valid.sum())).tolist()
    tokens = max(needed, min(least, total))
    return (tokens + 1) * 2 + (count == len(mask) * tokens)


# On the device -------------------------------------------------------------------------------------------------


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
            f"got an attention mask of shape {tuple(mask.shape)}, expected a row of keys per batch row "
            f"(B, 1, 1, L): a mask that differs between queries or heads cannot be split"
        )
    while mask.dim() > 2:
        mask = mask[:, 0]
    return mask if mask.dtype == torch.bool or mask.is_floating_point() else mask != 0


def keys_of(mask: Tensor, stream: str) -> Tensor:
    """Return which keys of a stream are to be attended to, (B, L) bool, by an argument of the transformer.

    Of `JOINED` tokens floating numbers stay such, ones and zeros: they are added to scores.
    """
    kept = key_rows(mask, len(mask)) != 0
    return kept.to(mask.dtype) if stream == JOINED and mask.is_floating_point() else kept


def first_keys(mask_BL: Tensor) -> Tensor:
    """Return a mask of as many first keys as a mask has tokens, (B, L) bool."""
    places = torch.arange(mask_BL.shape[1], device=mask_BL.device)
    return places < mask_BL.sum(dim=1, dtype=torch.int)[:, None]


def valid_first(mask_BL: Tensor) -> Tensor:
    """Return in which order (B, L) the valid tokens come first, and all others behind them, both in their own order."""
    return (mask_BL != 0).byte().argsort(dim=1, descending=True, stable=True)
