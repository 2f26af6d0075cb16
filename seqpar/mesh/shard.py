"""Splits tokens (or heads) over ranks in contiguous, balanced slices.

Each rank derives the sizes of all others from two integers, so uneven counts need no exchange of sizes and no host
sync, and even counts are not a special case.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate


def starts(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the starts of adjacent slices with these sizes."""
    return (0, *accumulate(sizes))[:-1]


@dataclass(frozen=True)
class Shard:
    """`total` items in `parts` contiguous slices whose sizes differ by at most one, larger ones first."""

    total: int
    parts: int

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        share, rest = divmod(self.total, self.parts)
        return tuple(share + (part < rest) for part in range(self.parts))

    @cached_property
    def starts(self) -> tuple[int, ...]:
        return starts(self.sizes)

    def slice(self, part: int) -> slice:
        return slice(self.starts[part], self.starts[part] + self.sizes[part])


@dataclass(frozen=True)
class JointShard:
    """Several streams (text and image), each sharded separately and concatenated on each rank.

    by_stream: the keys are held stream after stream, as on one rank, [t0 t1 ... i0 i1 ...]; otherwise rank after rank,
    as they arrive, [t0 i0 t1 i1 ...], which changes the rounding of attention only. padding: tokens at the end of the
    first stream that attention reads at another weight (`seqpar.attention._key_order`).
    """

    streams: tuple[Shard, ...]
    by_stream: bool = False
    padding: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.padding <= self.streams[0].total or self.padding == self.total:
            raise ValueError(f"got {self.padding} tokens of padding in {self.streams}, expected fewer than tokens")

    @property
    def parts(self) -> int:
        return self.streams[0].parts

    @property
    def total(self) -> int:
        return sum(stream.total for stream in self.streams)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(map(sum, zip(*(stream.sizes for stream in self.streams), strict=True)))

    @cached_property
    def arrivals(self) -> tuple[slice, ...]:
        """Places in stream order of tokens that arrive rank after rank: a slice for each stream of each rank."""
        firsts = starts([stream.total for stream in self.streams])
        return tuple(
            slice(first + stream.starts[part], first + stream.starts[part] + stream.sizes[part])
            for part in range(self.parts)
            for first, stream in zip(firsts, self.streams, strict=True)
        )


Tokens = Shard | JointShard
"""The split of a sequence that a strategy is built for; `.sizes` holds the number of tokens on each rank."""


def check_tokens(tokens: Tokens, parts: int, *, merges: bool = False) -> None:
    """Raise ValueError if tokens are not sharded over `parts` ranks, or if a rank would hold none.

    Attention kernels do not accept empty inputs. merges: the strategy merges results of each rank's keys, which then
    cannot be held stream after stream.
    """
    if tokens.parts != parts:
        raise ValueError(
            f"got tokens sharded over {tokens.parts} ranks, expected {parts}, the size of the sequence axis"
        )
    if min(tokens.sizes) < 1:
        raise ValueError(
            f"got {tokens.total} tokens for {tokens.parts} ranks, expected at least one token per rank; use fewer "
            f"ranks on the sequence axis or a larger size"
        )
    if merges and isinstance(tokens, JointShard) and (tokens.padding or (tokens.by_stream and parts > 1)):
        raise ValueError(
            "this strategy merges the results of ranks, so it supports neither keys in the order of one rank (exact "
            "mode) nor weighted padding; use ulysses, kv_gather or kv_first"
        )
