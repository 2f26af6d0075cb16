"""What moves blocks between ranks, as strategies see it: exchanges with `outboxes()` to write and `deliver()` to read.

One transport = one file in `seqpar/transports`. All ranks make the same exchanges in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor

from seqpar.kernels.flags import Flags
from seqpar.kernels.push import Destinations
from seqpar.mesh import Axis
from seqpar.protocols import Outboxes
from seqpar.transports._layout import HeadLayout

DEADLINE_S = 120.0  # how long a rank waits for a peer: longer than any kernel compiles, shorter than patience


class Into(Protocol):
    """q, k, v of my tokens to those who read them."""

    @property
    def flags(self) -> Flags | None:
        """By which the kernel that writes may tell all peers and wait for them, instead of `deliver`, if there are."""
        ...

    def outboxes(self) -> Outboxes:
        """Where to write."""
        ...

    def deliver(self, met: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v as attention takes them, (B, L, heads, D); valid until the next call of `outboxes`.

        met: whether the kernel that wrote has met the peers of `flags`.
        """
        ...


class Behind(Into, Protocol):
    """The same where k, then v travel behind other work of this rank's: what comes next being made. One outbox."""

    def start_keys(self) -> None:
        """Send k as it is now. v may be written until `start_values`, q until `deliver`."""
        ...

    def start_values(self) -> None:
        """Send v as it is now: after `start_keys`, before `deliver`, at every exchange."""
        ...


class Back(Protocol):
    """Attention's output to the ranks of its tokens."""

    @property
    def flags(self) -> Flags | None:
        """As of `Into`."""
        ...

    def outboxes(self) -> Destinations:
        """Where to write."""
        ...

    def deliver(self, met: bool = False) -> Tensor:
        """(B, l, H, D); valid until the next call. met: as of `Into`."""
        ...


class Rotate(Protocol):
    """A block a rank, passed around an axis."""

    def outbox(self) -> Tensor:
        """Where to write my own block before `rotate`."""
        ...

    def rotate(self) -> Iterator[Tensor]:
        """Yield my block, then those of the ranks before me. Read a block before asking for the next."""
        ...


class Collect(Protocol):
    """Every rank's block on every rank."""

    def outbox(self) -> Tensor:
        """Where to write my own block."""
        ...

    def deliver(self) -> Tensor:
        """All blocks, one after another; valid until `outbox` is written again."""
        ...


class Transport(Protocol):
    """Makes exchanges; each owns its buffers."""

    def heads(self, axis: Axis, layout: HeadLayout) -> tuple[Into, Back]:
        """Tokens sharded to heads sharded, and back."""
        ...

    def everywhere(self, axis: Axis, layout: HeadLayout) -> Into:
        """Keys and values of all tokens on every rank."""
        ...

    def behind(self, axis: Axis, layout: HeadLayout) -> Behind:
        """The same behind other work."""
        ...

    def ring(self, axis: Axis, sizes: tuple[int, ...], shape: tuple[int, ...], like: Tensor) -> Rotate:
        """Rank r's block is (sizes[r], *shape), with dtype and device of `like`."""
        ...

    def gather(self, axis: Axis, sizes: tuple[int, ...], shape: tuple[int, ...], like: Tensor) -> Collect:
        """Every rank's (sizes[r], *shape) on every rank, with dtype and device of `like`."""
        ...

    def check(self) -> None:
        """Raise `TimeoutError` on a rank that waited for another in vain; names that. Waits for the device."""
        ...

    def release(self) -> None:
        """Free all buffers, together with the other ranks. Exchanges made before are of no use after it."""
        ...
