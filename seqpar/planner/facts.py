"""What the files of models and strategies tell the planner: data types and the arithmetic that they share.

A model's file exports `work(config)`, which returns a `Work`. A strategy's file exports `FACTS`, a `Facts`. A multiply
and an add are 2 FLOPs. Elements are those read and written when every operation runs once over its inputs and attention
keeps its scores on chip.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from seqpar.shard import Shard


@dataclass(frozen=True)
class Cost:
    """FLOPs, and elements read and written."""

    flops: int
    elements: int

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.elements + other.elements)

    def __mul__(self, times: int) -> Cost:
        return Cost(self.flops * times, self.elements * times)


def linear(rows: int, inputs: int, outputs: int) -> Cost:
    """The cost of (rows, inputs) x (inputs, outputs): 2 rows inputs outputs FLOPs."""
    return Cost(2 * rows * inputs * outputs, rows * (inputs + outputs) + inputs * outputs)


def core(b: int, queries: int, keys: int, heads: int, dim: int, kv_heads: int | None = None) -> Cost:
    """The cost of softmax(q k^T) v: 4 b queries keys heads dim FLOPs. Grouped-query attention reads fewer keys."""
    read = heads * queries + (kv_heads or heads) * keys
    return Cost(4 * b * queries * keys * heads * dim, 2 * b * dim * read)


# Models --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """What a model does with one token.

    gemms: (inputs, outputs) of the matrix products of one block, that of q, k and v first. passes: elements that each
    elementwise kernel of a block reads and writes, without the norm and rotary embedding of q and k. prepares: whether
    q and k have a norm or a rotary embedding. once: the products before the first and after the last block. table: fp32
    values of one modulation row. live: elements alive at the widest point of a block. masked: whether attention gets
    key masks, which not every local attention takes.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    gemms: tuple[tuple[int, int], ...]
    passes: tuple[int, ...]
    prepares: bool
    once: tuple[tuple[int, int], ...]
    table: int
    live: int
    masked: bool = False

    def block(self, b: int, s: int) -> Cost:
        """The cost of one block on b rows of s tokens: matrix products, attention and elementwise passes."""
        products = [linear(b * s, *gemm) for gemm in self.gemms]
        attention = core(b, s, s, self.heads, self.head_dim, self.kv_heads)
        q_and_k = 2 * (self.heads + self.kv_heads) * self.head_dim * self.prepares
        return sum(products, attention) + Cost(0, b * s * (sum(self.passes) + q_and_k))

    def step(self, b: int, s: int) -> Cost:
        """The cost of all blocks and of the products before and after them."""
        return sum((linear(b * s, *gemm) for gemm in self.once), self.block(b, s) * self.layers)


# Layouts -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """Axis sizes, the strategy on ring x ulysses, and the curve of `Rates.exchange` ("nccl", "gloo", "peer")."""

    data: int
    cfg: int
    ring: int
    ulysses: int
    strategy: str
    transport: str

    @property
    def sequence(self) -> int:
        """The number of ranks that share a sequence."""
        return self.ring * self.ulysses

    @property
    def sizes(self) -> dict[str, int]:
        """Axis name -> size, as `Mesh.from_env` takes them."""
        return {"data": self.data, "cfg": self.cfg, "ring": self.ring, "ulysses": self.ulysses}

    def __str__(self) -> str:
        return " x ".join(f"{name} {size}" for name, size in self.sizes.items() if size > 1) or "one rank"


# Strategies ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """One layer of a model on the ranks of one sequence: all that a strategy's costs depend on.

    tokens: of the whole sequence. batch: rows of the batch on a rank. direct: whether a rank's kernel writes into the
    memory of the reader, so that nothing is rearranged on arrival (peer memory), or into messages (collectives).
    """

    work: Work
    ring: int
    ulysses: int
    tokens: int
    batch: int
    direct: bool

    @property
    def ranks(self) -> int:
        """The number of ranks that share the sequence."""
        return self.ring * self.ulysses

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Tokens of each rank."""
        return Shard(self.tokens, self.ranks).sizes

    @cached_property
    def blocks(self) -> tuple[int, ...]:
        """Tokens of each ring block: those of the ranks of one ulysses axis together."""
        return tuple(sum(self.sizes[row * self.ulysses : (row + 1) * self.ulysses]) for row in range(self.ring))

    def heads(self, rank: int) -> tuple[int, int]:
        """Query and key-value heads of a rank whose ulysses axis shares them."""
        groups = Shard(self.work.kv_heads, self.ulysses).sizes[rank % self.ulysses]
        return groups * self.work.heads // self.work.kv_heads, groups

    def prepared(self, rank: int) -> tuple[tuple[int, int], ...]:
        """The pass of norm and rotary embedding over this rank's q and k, where a model has them and nothing moves."""
        heads = self.work.heads + self.work.kv_heads
        return ((2 * self.sizes[rank] * heads, 1),) if self.work.prepares else ()


@dataclass(frozen=True)
class Move:
    """What one rank sends and receives in one exchange, and to how many ranks it sends.

    The unit of `sent` and `received` is one head of one token: multiply by batch rows x head dim x bytes of the dtype.
    """

    sent: int
    received: int
    messages: int


@dataclass(frozen=True)
class Call:
    """One call of the local attention: query tokens, key tokens, query heads, key-value heads."""

    queries: int
    keys: int
    heads: int
    kv_heads: int


@dataclass(frozen=True)
class Layer:
    """What a strategy makes one rank do in one layer; units as of `Move`, for one batch row.

    moves: the exchanges, in order. calls: the calls of the local attention. passes: (values read and written, kernels)
    of each pass over q, k, v or the output that is not a model's own. kept: values that the exchanges keep in memory,
    which all layers share. merges: how often a partial output of the first call's shape is merged into another.
    split: whether q, k and v are three matrix products instead of one. behind: the products behind which equal parts of
    the one exchange travel, one part after the other; empty where no part of an exchange is hidden.
    """

    moves: tuple[Move, ...]
    calls: tuple[Call, ...]
    passes: tuple[tuple[int, int], ...]
    kept: int
    merges: int = 0
    split: bool = False
    behind: tuple[Literal["q", "k", "v"], ...] = ()


def fits_anywhere(ring: int, ulysses: int, heads: int, kv_heads: int) -> str | None:
    """A `Facts.why_not` of strategies that have no rule: None."""
    return None


def refuse(strategy: str, reason: str | None) -> None:
    """Raise `ValueError` with what a `Facts.why_not` answered, unless that is None."""
    if reason is not None:
        raise ValueError(f"got strategy {strategy} with {reason}")


@dataclass(frozen=True)
class Facts:
    """What planner, benches and tests know of a strategy.

    moves_only: it only moves data, so that its output has the bits of one rank (the exact mode takes no other).
    order: strategies whose predictions tie are taken in rising order. axes: the mesh axes that it treats in a way of
    their own; a strategy without any uses ring x ulysses as one axis. layer: what a rank does, from a place and the
    rank on the sequence axis; rank 0, which has most tokens and heads, is the slowest one. why_not: from the sizes of
    the ring and ulysses axes and the numbers of query and key-value heads, the reason why the strategy cannot run
    there (as "ring=2, expected ring=1; use ..."), None where it can.
    """

    moves_only: bool
    order: int
    axes: tuple[str, ...]
    layer: Callable[[Place, int], Layer]
    why_not: Callable[[int, int, int, int], str | None] = fits_anywhere

    def names(self, ring: int, ulysses: int) -> bool:
        """Whether a mesh is known by this strategy where others compute the same on it.

        A strategy for both axes is the same as one for a single axis where the other axis has one rank. A strategy
        that uses both axes as one is known by the ulysses axis. One rank alone is known by a strategy for ulysses.
        """
        if not self.axes:
            return ring == 1 < ulysses
        if len(self.axes) > 1:
            return ring > 1 and ulysses > 1
        return ring == 1 if self.axes == ("ulysses",) else ring > 1 == ulysses
