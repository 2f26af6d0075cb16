"""The exchanges that strategies use: outboxes to write to, and `deliver` (or `rotate`) to read what has arrived.

Every rank of an axis makes the same exchanges and calls them in the same order. The calls of an exchange come in turn;
`seqpar.transports._contract.Transport` sees to that for every transport.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor

from seqpar.kernels.flags import Flags
from seqpar.kernels.push import Destinations
from seqpar.outboxes import Outboxes


class ToHeads(Protocol):
    """Tokens sharded to heads sharded: q, k, v of my tokens travel to the ranks of their heads."""

    @property
    def flags(self) -> Flags | None:
        """Flags that the kernel which writes may raise and wait for itself, instead of `deliver`; None: it may not.

        A kernel that does must be followed by `deliver(met=True)` at once.
        """
        ...

    def outboxes(self) -> Outboxes:
        """Where to write."""
        ...

    def deliver(self, met: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """q (B, L, h, D), k and v (B, L, g, D) as attention takes them; valid until the next call of `outboxes`.

        met: whether the kernel that wrote has met the peers of `flags`.
        """
        ...


class ToTokens(Protocol):
    """Heads sharded to tokens sharded: attention's output travels to the ranks of its tokens."""

    @property
    def flags(self) -> Flags | None:
        """See `ToHeads.flags`."""
        ...

    def outboxes(self) -> Destinations:
        """Where to write."""
        ...

    def deliver(self, met: bool = False) -> Tensor:
        """(B, l, H, D); valid until the next call. met: see `ToHeads.deliver`."""
        ...


class KeyValues(Protocol):
    """Keys and values of all tokens on every rank; the queries stay where they are."""

    @property
    def flags(self) -> Flags | None:
        """See `ToHeads.flags`."""
        ...

    def outboxes(self) -> Outboxes:
        """Where to write. An exchange made with overlap has one outbox."""
        ...

    def start_keys(self) -> None:
        """Send k as it is now. v may be written until `start_values`, q until `deliver`. With overlap only."""
        ...

    def start_values(self) -> None:
        """Send v as it is now: after `start_keys`, before `deliver`. With overlap only, and then every time."""
        ...

    def deliver(self, met: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """q (B, l, H, D) of my tokens, k and v (B, L, G, D) of all; valid until the next call of `outboxes`."""
        ...


class Rotation(Protocol):
    """Each rank has one block, and the blocks are passed around an axis."""

    def outbox(self) -> Tensor:
        """Where to write my own block before `rotate`."""
        ...

    def rotate(self) -> Iterator[tuple[int, Tensor]]:
        """Yield (owner, block): my block first, then those of the ranks before me.

        owner: the rank on the axis that wrote the block. Read a block before asking for the next, and
        read to the end: then the rotation may begin again.
        """
        ...


class Gather(Protocol):
    """Every rank's block on every rank."""

    def outbox(self) -> Tensor:
        """Where to write my own block."""
        ...

    def deliver(self) -> Tensor:
        """All blocks, one after another; valid until `outbox` is written again."""
        ...
