"""What a step costs, counted and not timed: FLOPs, elements, bytes and messages. `predict.py` makes times of them.

A multiply and an add are 2 FLOPs. Elements are those read and written when every operation runs once over its inputs
and attention keeps its scores on chip. The formulas stand in docs/planner.md; what the exchanges move follows from
DeepSpeed-Ulysses (arXiv 2309.14509) and Ring Attention (arXiv 2310.01889).
Letters: see `seqpar.protocols`; s tokens of one sequence, c tokens of a context.
"""

from __future__ import annotations

from dataclasses import dataclass

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


# Operations ----------------------------------------------------------------------------------------------------


def linear(rows: int, inputs: int, outputs: int) -> Cost:
    """(rows, inputs) x (inputs, outputs): 2 rows inputs outputs."""
    return Cost(2 * rows * inputs * outputs, rows * (inputs + outputs) + inputs * outputs)


def core(b: int, queries: int, keys: int, heads: int, dim: int, kv_heads: int | None = None) -> Cost:
    """softmax(q k^T) v: 4 b queries keys heads dim; grouped-query reads fewer keys and values."""
    read = heads * queries + (kv_heads or heads) * keys
    return Cost(4 * b * queries * keys * heads * dim, 2 * b * dim * read)


def self_attention(b: int, s: int, inputs: int, mid: int, out: int) -> Cost:
    """With its projections: 6 b s inputs mid + 4 b s^2 mid + 2 b s mid out."""
    return linear(b * s, inputs, mid) * 3 + core(b, s, s, 1, mid) + linear(b * s, mid, out)


def cross_attention(b: int, s: int, c: int, inputs: int, context: int, mid: int, out: int) -> Cost:
    """To c context tokens: 2 b s inputs mid + 4 b c context mid + 4 b s c mid + 2 b s mid out."""
    keys = linear(b * c, context, mid) * 2
    return linear(b * s, inputs, mid) + keys + core(b, s, c, 1, mid) + linear(b * s, mid, out)


def spatial_attention(b: int, frames: int, pixels: int, inputs: int, mid: int, out: int) -> Cost:
    """Inside each frame: self-attention of b x frames sequences of `pixels` tokens."""
    return self_attention(b * frames, pixels, inputs, mid, out)


def temporal_attention(b: int, frames: int, pixels: int, inputs: int, mid: int, out: int) -> Cost:
    """Along time at each pixel: self-attention of b x pixels sequences of `frames` tokens."""
    return self_attention(b * pixels, frames, inputs, mid, out)


def mlp(rows: int, inputs: int, mid: int, out: int) -> Cost:
    """2 rows mid (inputs + out); the activation belongs to the first product."""
    return linear(rows, inputs, mid) + linear(rows, mid, out)


def swiglu(rows: int, width: int, mid: int) -> Cost:
    """6 rows width mid; the activation belongs to the first two products."""
    return linear(rows, width, mid) * 2 + linear(rows, mid, width)


# A model and where it runs -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """What a model does with one token; a model's file says it (`work(config)`).

    gemms: (inputs, outputs) of the matrix products of one block, that of q, k and v first. passes: elements that each
    elementwise kernel of a block reads and writes, without what happens to q and k on the way to attention. prepares:
    whether a norm or rotary does happen to them. once: the products before the first and after the last block. table:
    fp32 values of one modulation row. live: elements alive at the widest point of a block.
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

    def block(self, b: int, s: int) -> Cost:
        """Matrix products and attention of one block on b rows of s tokens, and its elementwise passes."""
        products = [linear(b * s, *gemm) for gemm in self.gemms]
        attention = core(b, s, s, self.heads, self.head_dim, self.kv_heads)
        q_and_k = 2 * (self.heads + self.kv_heads) * self.head_dim * self.prepares
        return sum(products, attention) + Cost(0, b * s * (sum(self.passes) + q_and_k))

    def step(self, b: int, s: int) -> Cost:
        """All blocks, and what is before and after them."""
        return sum((linear(b * s, *gemm) for gemm in self.once), self.block(b, s) * self.layers)


@dataclass(frozen=True)
class Layout:
    """Axis sizes, the strategy on ring x ulysses, and how ranks exchange ("nccl", "gloo", "peer")."""

    data: int
    cfg: int
    ring: int
    ulysses: int
    strategy: str
    transport: str

    @property
    def sequence(self) -> int:
        """Ranks that share a sequence."""
        return self.ring * self.ulysses

    @property
    def sizes(self) -> dict[str, int]:
        """Axis name -> size, as `Mesh.from_env` takes them."""
        return {"data": self.data, "cfg": self.cfg, "ring": self.ring, "ulysses": self.ulysses}

    @property
    def gathers(self) -> bool:
        """Whether every rank gets all keys and values, and keeps its queries."""
        return self.strategy in ("kv_gather", "kv_first")

    def __str__(self) -> str:
        return " x ".join(f"{name} {size}" for name, size in self.sizes.items() if size > 1) or "one rank"


# Exchanges -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Move:
    """What one rank sends and receives in one exchange, in elements of one head's width, and to how many ranks.

    Multiply `sent` and `received` by batch rows x head dim x bytes of the dtype.
    """

    sent: int
    received: int
    messages: int


def moves(work: Work, layout: Layout, tokens: int, rank: int) -> tuple[Move, ...]:
    """The exchanges of one layer as rank `rank` of the sequence axis sees them, in order.

    With l tokens here, L in all, N ranks, h + 2 g heads of q, k and v: ulysses sends l x (heads of others) in and
    (tokens of others) x h back; kv_gather and kv_first l x 2 G to each other rank; ring the block of each of N - 1
    owners.
    """
    sizes = Shard(tokens, layout.sequence).sizes
    if layout.gathers:
        others, g = layout.sequence - 1, 2 * work.kv_heads
        return (Move(sizes[rank] * g * others, (tokens - sizes[rank]) * g, others),) if others else ()
    row, column = divmod(rank, layout.ulysses)
    blocks = [sum(sizes[r * layout.ulysses : (r + 1) * layout.ulysses]) for r in range(layout.ring)]
    mine, groups = sizes[rank], Shard(work.kv_heads, layout.ulysses).sizes[column]
    ring = _ring_moves(blocks, row, 2 * groups)
    if layout.ulysses == 1:
        return ring
    share, rest, others = work.heads // work.kv_heads, blocks[row] - mine, layout.ulysses - 1
    elsewhere = work.kv_heads - groups
    into = Move(mine * elsewhere * (share + 2), rest * groups * (share + 2), others)
    back = Move(rest * groups * share, mine * elsewhere * share, others)
    return (into, *ring, back)


def _ring_moves(blocks: list[int], rank: int, heads: int) -> tuple[Move, ...]:
    """At step s a rank passes on the block of the rank s before it, and gets that of one more before.

    Ranks without heads have nothing to pass on: they leave it out.
    """
    size = len(blocks)
    return tuple(
        Move(blocks[(rank - step) % size] * heads, blocks[(rank - step - 1) % size] * heads, min(heads, 1))
        for step in range(size - 1)
    )


def busiest(work: Work, layout: Layout, tokens: int) -> tuple[int, ...]:
    """Of each exchange of a layer, what the rank with most to send or receive moves; units of `Move`."""
    ranks = [moves(work, layout, tokens, rank) for rank in range(layout.sequence)]
    return tuple(max(max(move.sent, move.received) for move in exchange) for exchange in zip(*ranks, strict=True))


def copies(work: Work, layout: Layout, b: int, tokens: int) -> tuple[tuple[int, int], ...]:
    """(values of one head read and written, kernels) of the passes that a strategy adds to a layer, slowest rank.

    Of each of b batch rows. Instead of norm and rotary of q and k where they stand, ulysses and kv_gather write q, k, v
    where the exchange wants them. "peer" stores where the reader reads: what goes elsewhere is the exchange itself, and
    nothing is rearranged afterwards; there kv_first's product of one batch row's v writes it in its place.
    """
    sequence, direct = layout.sequence, layout.transport == "peer"
    mine, whole = Shard(tokens, sequence).sizes[0], work.heads + 2 * work.kv_heads
    in_place = [(2 * mine * (work.heads + work.kv_heads), 1)] if work.prepares else []
    if layout.gathers:
        if sequence == 1:
            return tuple(in_place)
        queries = [work.heads] if work.prepares else []  # they stay where they are otherwise
        if layout.strategy == "kv_gather":
            return ((2 * mine * sum([*queries, 2 * work.kv_heads]), 1),)
        values = [] if direct and b == 1 else [work.kv_heads]
        return tuple((2 * mine * part, 1) for part in (*queries, work.kv_heads, *values))
    (heads, groups), block = _shares(work, layout), _block(layout, tokens)
    packs = [(4 * block * groups, 2)] if layout.ring > 1 else []
    if layout.ulysses == 1:
        return (*in_place, *packs)
    local = block * heads
    here = mine * whole // layout.ulysses if direct else mine * whole
    back = [(local + (local // layout.ulysses if direct else local), 1)]
    rearranged = [] if direct else [(2 * mine * work.heads, layout.ulysses)]
    return ((mine * whole + here, 1), *packs, *back, *rearranged)


def _shares(work: Work, layout: Layout) -> tuple[int, int]:
    """Query and key-value heads of the rank with most of them."""
    groups = Shard(work.kv_heads, layout.ulysses).sizes[0]
    return groups * work.heads // work.kv_heads, groups


def _block(layout: Layout, tokens: int) -> int:
    """Tokens of the largest ring block, which is the first."""
    return sum(Shard(tokens, layout.sequence).sizes[: layout.ulysses])


def attention_calls(work: Work, layout: Layout, b: int, tokens: int) -> tuple[Cost, ...]:
    """The local attentions of one layer on the slowest rank: one, or one for each block of a ring."""
    if layout.gathers:
        mine = Shard(tokens, layout.sequence).sizes[0]
        return (core(b, mine, tokens, work.heads, work.head_dim, work.kv_heads),)
    (heads, groups), sizes = _shares(work, layout), Shard(tokens, layout.sequence).sizes
    blocks = [sum(sizes[r * layout.ulysses : (r + 1) * layout.ulysses]) for r in range(layout.ring)]
    return tuple(core(b, blocks[0], block, heads, work.head_dim, groups) for block in blocks)


def merge_bytes(work: Work, layout: Layout, b: int, tokens: int, itemsize: int) -> tuple[int, int]:
    """(bytes, kernels) of the merges of a ring's parts: the first of two in the model's dtype, then into fp32."""
    if layout.ring == 1 or layout.gathers:
        return 0, 0
    values = b * _block(layout, tokens) * _shares(work, layout)[0] * work.head_dim
    return values * (3 * itemsize + (layout.ring - 2) * (itemsize + 8)), layout.ring - 1


def buffer_values(work: Work, layout: Layout, tokens: int) -> int:
    """Values of one head that the exchanges of a layer keep in memory (all layers share them), slowest rank."""
    sequence = layout.sequence
    mine, whole = Shard(tokens, sequence).sizes[0], work.heads + 2 * work.kv_heads
    if sequence == 1:
        return 0
    if layout.gathers:
        slots = 2 if layout.transport == "peer" else 1  # peers write the next layer's while this one's is read
        return mine * work.heads + slots * 2 * tokens * work.kv_heads
    (heads, groups), block = _shares(work, layout), _block(layout, tokens)
    ring = 4 * block * groups if layout.ring > 1 else 0
    if layout.ulysses == 1:
        return ring
    if layout.transport == "peer":
        return ring + block * (heads + 2 * groups) + mine * work.heads
    return ring + mine * whole + block * (heads + 2 * groups) + block * heads + 2 * mine * work.heads
