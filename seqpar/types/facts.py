"""The data types by which models (`Work`) and strategies (`StrategyFacts`) describe themselves to the planner.

A multiply and an add count as 2 FLOPs. Elements are those read and written when every operation runs once over its
inputs and attention keeps its scores on chip.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from seqpar.mesh.shard import JointShard, Shard


@dataclass(frozen=True)
class Cost:
    """A number of FLOPs and of elements read and written."""

    flops: int
    elements: int

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.elements + other.elements)

    def __mul__(self, times: int) -> Cost:
        return Cost(self.flops * times, self.elements * times)


def linear(rows: int, inputs: int, outputs: int) -> Cost:
    """Return the cost of the product (rows, inputs) x (inputs, outputs): 2 rows inputs outputs FLOPs."""
    return Cost(2 * rows * inputs * outputs, rows * (inputs + outputs) + inputs * outputs)


def core(b: int, queries: int, keys: int, heads: int, dim: int, kv_heads: int | None = None) -> Cost:
    """Return the cost of softmax(q k^T) v: 4 b queries keys heads dim FLOPs."""
    read = heads * queries + (kv_heads or heads) * keys
    return Cost(4 * b * queries * keys * heads * dim, 2 * b * dim * read)


# Models --------------------------------------------------------------------------------------------------------


Gemms = tuple[tuple[int, int], ...]
"""(inputs, outputs) of matrix products."""


@dataclass(frozen=True)
class Cross:
    """Cross-attention of a block to text that every rank holds whole; it exchanges nothing.

    keys: text tokens. gemms: from a text token to keys and values; the GEMMs of queries and output are the block's.
    """

    keys: int
    gemms: Gemms


@dataclass(frozen=True)
class Blocks:
    """Blocks of one kind, by their operations on one token.

    gemms: of a block, the fused projection to q, k and v first. passes: elements that each elementwise kernel reads and
    writes, without the norm and rotary embedding of q and k. apart: GEMMs of each stream besides the state, if streams
    (text, image) have separate weights; otherwise all tokens share `gemms`. modulation: GEMMs on one row per batch row
    that make a block's modulation: once per run in our own loop, in every call of a pipeline. beside: GEMMs, or parts
    of them, that do not read attention's output and run while its inputs travel. given: whether a block makes q, k and
    v itself before it calls attention, so that no strategy can send keys while another projection runs.
    """

    count: int
    gemms: Gemms
    passes: tuple[int, ...]
    apart: tuple[Gemms, ...] = ()
    modulation: Gemms = ()
    beside: Gemms = ()
    cross: Cross | None = None
    given: bool = False

    def rows(self, tokens: int, others: tuple[int, ...]) -> tuple[int, ...]:
        """Return the rows of each kernel of a block: the tokens of each stream, or of all streams together."""
        return (tokens, *others) if self.apart else (tokens + sum(others),)

    def products(self, tokens: int, others: tuple[int, ...] = ()) -> tuple[tuple[int, int, int], ...]:
        """Return (rows, inputs, outputs) of a block's GEMMs, with cross-attention's text, without modulation."""
        streams = zip((self.gemms, *self.apart), self.rows(tokens, others), strict=False)
        own = tuple((rows, *gemm) for gemms, rows in streams for gemm in gemms)
        return own if self.cross is None else own + tuple((self.cross.keys, *gemm) for gemm in self.cross.gemms)


@dataclass(frozen=True)
class Work:
    """The operations of a model on one token.

    blocks: in the order in which they run. prepares: whether q and k have a norm or a rotary embedding. once: GEMMs
    before the first and after the last block, on the state's tokens. table: fp32 values in one modulation row. live:
    elements in memory at the widest point of a block. masked: whether attention receives key masks. text: GEMMs that
    embed a text token, once per run (in a pipeline, per call). conditioning: GEMMs on one row that make the condition
    and the final modulation, as often as the blocks' `modulation`. guided: whether the usual run has an unconditional
    branch. joined: tokens of each stream besides the state in the usual run. rounds: whether its attention can be
    centred, as 8 bits need.
    """

    width: int
    heads: int
    kv_heads: int
    head_dim: int
    blocks: tuple[Blocks, ...]
    prepares: bool
    once: Gemms
    table: int
    live: int
    masked: bool = False
    text: Gemms = ()
    conditioning: Gemms = ()
    guided: bool = True
    joined: tuple[int, ...] = ()
    rounds: bool = False

    @property
    def layers(self) -> int:
        return sum(kind.count for kind in self.blocks)

    def parts(self, kind: Blocks, b: int, s: int, others: tuple[int, ...] = ()) -> tuple[Cost, Cost, Cost]:
        """Return the cost of a block's GEMMs, attention and elementwise passes for b rows of s + others tokens."""
        whole = s + sum(others)
        products = [linear(b * rows, i, o) for rows, i, o in kind.products(s, others)]
        attention = core(b, whole, whole, self.heads, self.head_dim, self.kv_heads)
        if kind.cross is not None:
            attention += core(b, s, kind.cross.keys, self.heads, self.head_dim)
        q_and_k = 2 * (self.heads + self.kv_heads) * self.head_dim * self.prepares
        return sum(products, Cost(0, 0)), attention, Cost(0, b * whole * (sum(kind.passes) + q_and_k))

    def block(self, kind: Blocks, b: int, s: int, others: tuple[int, ...] = ()) -> Cost:
        return sum(self.parts(kind, b, s, others), Cost(0, 0))

    def step(self, b: int, s: int, others: tuple[int, ...] = ()) -> Cost:
        """Return the cost of all blocks and of the products on the state before and after them."""
        every = [self.block(kind, b, s, others) * kind.count for kind in self.blocks]
        return sum([linear(b * s, *gemm) for gemm in self.once] + every, Cost(0, 0))

    def modulation(self) -> tuple[tuple[int, int], ...]:
        """Return all products on one row: of the condition, then of every block."""
        return (*self.conditioning, *(gemm for kind in self.blocks for gemm in kind.modulation * kind.count))


# Layouts -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """Axis sizes, the strategy on ring x ulysses, and a key of `Rates.exchange` ("nccl", "gloo" or "peer")."""

    data: int
    cfg: int
    ring: int
    ulysses: int
    strategy: str
    transport: str

    @property
    def sequence(self) -> int:
        return self.ring * self.ulysses

    @property
    def sizes(self) -> dict[str, int]:
        """Axis name -> size, as `Mesh.from_env` accepts it."""
        return {"data": self.data, "cfg": self.cfg, "ring": self.ring, "ulysses": self.ulysses}

    def __str__(self) -> str:
        return " x ".join(f"{name} {size}" for name, size in self.sizes.items() if size > 1) or "one rank"


# Strategies ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ShardedLayer:
    """One layer of a model on the ranks of one sequence: everything that a strategy's costs depend on.

    tokens: of the whole sequence. batch: rows on a rank. direct: whether a rank's kernel writes into the reader's
    memory (peer memory); otherwise it writes messages (collectives). streams: tokens of each stream, which are sharded
    one by one; empty for one stream.
    """

    work: Work
    ring: int
    ulysses: int
    tokens: int
    batch: int
    direct: bool
    streams: tuple[int, ...] = ()

    @property
    def ranks(self) -> int:
        return self.ring * self.ulysses

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return JointShard(tuple(Shard(tokens, self.ranks) for tokens in self.streams or (self.tokens,))).sizes

    @cached_property
    def blocks(self) -> tuple[int, ...]:
        """Number of tokens in each ring block: the sum over the ranks of one ulysses axis."""
        return tuple(sum(self.sizes[row * self.ulysses : (row + 1) * self.ulysses]) for row in range(self.ring))

    def heads(self, rank: int) -> tuple[int, int]:
        """Return the numbers of query and key-value heads of a rank when the ulysses axis splits the heads."""
        groups = Shard(self.work.kv_heads, self.ulysses).sizes[rank % self.ulysses]
        return groups * self.work.heads // self.work.kv_heads, groups

    def prepared(self, rank: int) -> tuple[tuple[int, int], ...]:
        """Return the norm and rotary pass over this rank's q and k when nothing moves; empty if the model has none."""
        heads = self.work.heads + self.work.kv_heads
        return ((2 * self.sizes[rank] * heads, 1),) if self.work.prepares else ()


@dataclass(frozen=True)
class Move:
    """What one rank sends and receives in one exchange, in heads of one token, and to how many ranks it sends.

    among: the number of neighbouring ranks that it stays among; 0 for all that share the sequence.
    """

    sent: int
    received: int
    messages: int
    among: int = 0


@dataclass(frozen=True)
class AttentionCall:
    """The sizes of one call of the local attention: query tokens, key tokens, query heads, key-value heads."""

    queries: int
    keys: int
    heads: int
    kv_heads: int


@dataclass(frozen=True)
class Layer:
    """The operations of one rank in one layer under a strategy, for one batch row, in the unit of `Move`.

    moves: exchanges, in order. calls: of the local attention. passes: (values read and written, kernels) of each pass
    over q, k, v or the output that the strategy adds. kept: values in the exchanges' buffers, which all layers share.
    merges: of a partial output with the shape of the first call. split: whether q, k and v are three GEMMs instead of
    one. behind: GEMMs that overlap the equal parts of the single exchange, in order; empty if no part is hidden.
    """

    moves: tuple[Move, ...]
    calls: tuple[AttentionCall, ...]
    passes: tuple[tuple[int, int], ...]
    kept: int
    merges: int = 0
    split: bool = False
    behind: tuple[Literal["q", "k", "v"], ...] = ()


def fits_anywhere(ring: int, ulysses: int, heads: int, kv_heads: int) -> str | None:
    """Return None: the `StrategyFacts.why_not` of strategies that run on axes of any size."""
    return None


def refuse(strategy: str, reason: str | None) -> None:
    if reason is not None:
        raise ValueError(f"got strategy {strategy} with {reason}")


@dataclass(frozen=True)
class StrategyFacts:
    """The properties of a strategy that planner, benches and tests use.

    moves_only: whether the strategy only moves data, so that its output has the bits of one rank; exact mode and
    weighted padding require it. order: when predictions tie, the lowest is taken. axes: the mesh axes that the strategy
    treats separately; a strategy without any uses ring x ulysses as one axis. layer(place, rank on the sequence axis):
    the operations of that rank; rank 0 has the most tokens and heads. why_not(ring, ulysses, query heads, key-value
    heads): why the strategy cannot run with these sizes ("ring=2, expected ring=1; use ..."), or None.
    """

    moves_only: bool
    order: int
    axes: tuple[str, ...]
    layer: Callable[[ShardedLayer, int], Layer]
    why_not: Callable[[int, int, int, int], str | None] = fits_anywhere

    def names(self, ring: int, ulysses: int) -> bool:
        """Return whether the search lists a mesh of these sizes under this strategy; it lists each computation once.

        A strategy for both axes equals a strategy for one axis unless both have several ranks. A strategy that uses
        both as one is listed with ring=1, a single rank under a strategy for ulysses.
        """
        if not self.axes:
            return ring == 1 < ulysses
        if len(self.axes) > 1:
            return ring > 1 and ulysses > 1
        return ring == 1 if self.axes == ("ulysses",) else ring > 1 == ulysses
