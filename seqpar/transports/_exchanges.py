"""Exchanges, as strategies use them: outboxes to write to, and `deliver` (or `rotate`) to read from.

Every rank of an axis makes the same exchanges and calls them in the same order. The calls of one exchange have an
order, too, which `seqpar.transports._contract.Transport` checks for every transport.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from seqpar.kernels.flags import Flags
from seqpar.kernels.push import Destinations
from seqpar.mesh.shard import Shard
from seqpar.types.outboxes import Outboxes
from seqpar.types.protocols import output_dtype


@dataclass(frozen=True)
class HeadLayout:
    """One attention layer over one axis: rank r holds tokens[r] tokens before and counts(r) heads after the exchange.

    Heads are sharded in whole groups (a key-value head with its query heads), so a rank may get none.
    """

    batch: int
    tokens: tuple[int, ...]
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    def __post_init__(self) -> None:
        if self.kv_heads < 1 or self.heads % self.kv_heads:
            raise ValueError(f"got {self.heads} query and {self.kv_heads} key-value heads, expected a multiple")

    @property
    def out_dtype(self) -> torch.dtype:
        """Of attention's output, which travels back."""
        return output_dtype(self.dtype, self.device)

    def kv_slice(self, rank: int) -> slice:
        return Shard(self.kv_heads, len(self.tokens)).slice(rank)

    def q_slice(self, rank: int) -> slice:
        group, kv = self.heads // self.kv_heads, self.kv_slice(rank)
        return slice(kv.start * group, kv.stop * group)

    def counts(self, rank: int) -> tuple[int, int]:
        q, kv = self.q_slice(rank), self.kv_slice(rank)
        return q.stop - q.start, kv.stop - kv.start


class ToHeads(Protocol):
    """From sharded tokens to sharded heads: sends q, k, v of the local tokens to the ranks of their heads."""

    @property
    def flags(self) -> Flags | None:
        """Flags that the writing kernel may raise and wait for; `deliver(met=True)` must follow. None if it may not."""
        ...

    def outboxes(self) -> Outboxes: ...

    def start(self) -> None:
        """Send asynchronously. Optional, once between writing (by a kernel that leaves `flags` alone) and `deliver`."""

    def deliver(self, met: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Return q (B, L, h, D), k and v (B, L, g, D); valid until the next `outboxes`.

        met: whether the kernel that wrote has already raised `flags` and waited for the other ranks.
        """
        ...


class ToTokens(Protocol):
    """From sharded heads to sharded tokens: sends the output of attention to the ranks of its tokens."""

    @property
    def flags(self) -> Flags | None: ...

    def outboxes(self) -> Destinations: ...

    def deliver(self, met: bool = False) -> Tensor:
        """Return the output (B, l, H, D); valid until the next call. met: as in `ToHeads`."""
        ...


class KeyValues(Protocol):
    """Brings the keys and values of all tokens to every rank; the queries stay on their rank.

    An exchange made with overlap has one outbox, and `start_keys` and `start_values` in place of `start`.
    """

    @property
    def flags(self) -> Flags | None: ...

    def outboxes(self) -> Outboxes: ...

    def start(self) -> None: ...

    def start_keys(self) -> None:
        """Send k as it is now; v may be written until `start_values`, q until `deliver`."""

    def start_values(self) -> None:
        """Send v as it is now; must come between `start_keys` and `deliver`."""

    def deliver(self, met: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Return q (B, l, H, D) of local tokens, k and v (B, L, G, D) of all; as in `ToHeads`."""
        ...


class Rotation(Protocol):
    """Passes blocks around an axis; each rank has one block."""

    def outbox(self) -> Tensor: ...

    def rotate(self) -> Iterator[tuple[int, Tensor]]:
        """Yield (owner, block): the local block, then blocks of the ranks before this one, nearest first.

        owner: the rank on the axis that wrote the block. Read a block before you ask for the next, and iterate to the
        end: only then may the rotation start again.
        """
        ...


class Gather(Protocol):
    """Brings every rank's block to every rank. `deliver` sends: there is no `start`."""

    def outbox(self) -> Tensor:
        """Return this rank's block to write to: the same memory at every call, inside of what `deliver` returns."""
        ...

    def deliver(self) -> Tensor:
        """Return all blocks, concatenated in the order of the ranks; valid until `outbox` is written again."""
        ...


class Halo(Protocol):
    """Swaps edges with both neighbours. The first rank has no rank before it, the last none after it."""

    def swap(self, first: Tensor | None, last: Tensor | None, before: Tensor | None, after: Tensor | None) -> None:
        """Send `first` to the rank before and `last` to the rank after; receive from them into `before` and `after`.

        `before` has the shape of the `last` of the rank before, `after` that of the `first` of the rank after. None
        where nothing is sent; sender and receiver must agree, and every rank of the axis must call. Blocks may be
        strided views of 1 to 5 dims with at most `capacity` elements, of other sizes at every call; they must not
        overlap. Elements are sent in the order of the dims: permute a channels-last tensor to the order of its memory,
        on both sides. When the call returns, `first` and `last` may be written and `before` and `after` read, on a GPU
        in the order of the current stream.
        """
