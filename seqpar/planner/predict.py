"""Prediction of a step's ms and a rank's memory for one layout: counts (`costs.py`) over rates (`rates.py`).

The prediction adds all parts up. It counts a transfer as hidden only where a strategy states that copy engines carry it
while its matrix products run (`Layer.behind`); transfers by kernels take multiprocessors from the kernels that they
overlap (docs/planner.md). The slowest rank counts: uneven tokens and heads are rounded up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from seqpar.mesh.shard import Shard
from seqpar.planner.costs import attention_calls, busiest, layers, merge_bytes
from seqpar.planner.rates import BETWEEN, GIB, Curve, Rates, rate_at, time_at
from seqpar.types.facts import Blocks, Cost, Gemms, Layer, Layout, Work, core

STATE = 4  # bytes of the denoised state and of modulation: fp32
TABLE_BYTES = 2 << 30  # a larger modulation table is computed in parts, for some steps at a time
EIGHT_SPEED = 1.7  # of a GPU's GEMMs in 8 bits, with their scales, against bf16: 1.62 to 1.86 measured on an H100
USABLE = 0.95  # share of a device's memory; CUDA's context and NCCL's buffers need the rest


@dataclass(frozen=True)
class Load:
    """The work of a run: `images` pictures of `tokens` tokens each, in a dtype of `itemsize` bytes.

    guidance: whether there is an unconditional branch. parameters: number of the model's parameters. latent: values of
    one token's latent. labels: number of distinct labels, including the unconditional one. table: maximum bytes of the
    modulation table. others: number of tokens of each stream besides the state (text), which `tokens` leaves out.
    eight: whether the blocks' GEMMs on the state compute in 8 bits. stored: how many of the parameters are in memory in
    8 bits alone; 0 where GEMMs in 8 bits have copies beside them. calls: of the model in a step, one after another,
    each with both branches of `guidance`; not whole where the last one has fewer rows.
    """

    images: int
    tokens: int
    guidance: bool
    steps: int
    itemsize: int
    parameters: int
    latent: int
    labels: int
    table: int
    others: tuple[int, ...] = ()
    eight: bool = False
    stored: int = 0
    calls: float = 1.0

    def rows(self, layout: Layout) -> int:
        """The batch rows of the rank with most images: twice its images if it computes both branches."""
        return Shard(self.images, layout.data).sizes[0] * (2 if self.guidance and layout.cfg == 1 else 1)

    def mine(self, layout: Layout) -> tuple[int, tuple[int, ...]]:
        """The most tokens on any rank: those of the state, and those of each other stream."""
        first, *others = (Shard(tokens, layout.sequence).sizes[0] for tokens in (self.tokens, *self.others))
        return first, tuple(others)


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank: a lower bound that leaves out what the allocator, CUDA and NCCL add."""

    weights: int
    table: int
    activations: int
    exchange: int

    @property
    def total(self) -> int:
        return self.weights + self.table + self.activations + self.exchange


@dataclass(frozen=True)
class Prediction:
    """The predicted ms of a step, part by part, and the memory of a rank, for one layout."""

    layout: Layout
    gemm: float
    attention: float
    elementwise: float
    exchange: float
    memory: Memory

    @property
    def ms(self) -> float:
        return self.gemm + self.attention + self.elementwise + self.exchange

    def too_big(self, memory_gib: float | None) -> str | None:
        """Why the layout does not fit a device with `memory_gib`, or None if it fits or the limit is None."""
        need = self.memory.total / GIB
        if memory_gib is None or need <= USABLE * memory_gib:
            return None
        return f"needs {need:.1f} GiB of {USABLE * memory_gib:.1f} on each rank"


def predict(work: Work, load: Load, layout: Layout, rates: Rates) -> Prediction:
    """The predicted time and memory of a step on this layout."""
    b, (local, others), width = load.rows(layout), load.mine(layout), load.itemsize
    every = layers(work, layout, load.tokens, b, load.others)
    slowest, moved, value = every[0], busiest(every), b * work.head_dim * width

    def products_us(kind: Blocks) -> float:
        us = sum(gemm_us(rates, b * rows, i, o, width) for rows, i, o in kind.products(local, others))
        if not load.eight or rates.device == "CPU":
            return us
        rows = b * kind.rows(local, others)[0]
        eight = sum(gemm_us(rates, rows, *gemm, width) for gemm in kind.gemms)
        return us - eight * (1 - 1 / EIGHT_SPEED)

    def pass_us(read_and_written: float, kernels: int = 1) -> float:
        return kernels * rates.kernel_us + 1e-6 * read_and_written / rates.copy

    # once per step: embedding and last layer; the first norm, which reads the stream and the positions and writes its
    # output; guidance with the scheduler's update; and the exchange of predictions between the guidance branches
    gemm = sum(gemm_us(rates, b * local, *gemm, width) for gemm in work.once)
    passes = pass_us(b * local * (3 * work.width * width + 4 * load.latent * STATE), 2)
    exchanges = 0.0
    if layout.cfg > 1:  # one rank has no transport, so no curve of one either
        exchanges = time_at(curve_of(rates, layout, layout.cfg * layout.sequence), b * local * load.latent * STATE)

    # in every layer
    calls = attention_calls(work, slowest, b)
    attention = work.layers * sum(attention_us(rates, work.head_dim, call) for call in calls)
    curves = [curve_of(rates, layout, move.among or layout.sequence) for move in slowest.moves]
    for kind in work.blocks:
        gemm += kind.count * products_us(_products(work, kind, slowest))
        if kind.cross is not None:
            cross = core(b, local, kind.cross.keys, work.heads, work.head_dim)
            attention += kind.count * attention_us(rates, work.head_dim, cross)
        streams = kind.rows(local, others)
        total = sum(pass_us(b * tokens * elements * width) for elements in kind.passes for tokens in streams)
        for values, kernels in slowest.passes:
            total += pass_us(b * values * work.head_dim * width, kernels)
        passes += kind.count * (total + pass_us(*merge_bytes(work, slowest, b, width)))
        if slowest.behind and sum(moved):
            part = moved[0] / len(slowest.behind) * b * work.head_dim * width
            copy = time_at(curve_of(rates, layout, layout.sequence), part)
            exposed = _exposed_us(work, kind, slowest.behind, copy, products_us)
            exchanges += kind.count * max(time_at(curves[0], 0), exposed)
        else:
            exchanges += kind.count * sum(time_at(curve, x * value) for curve, x in zip(curves, moved, strict=True))
    return Prediction(
        layout,
        gemm=gemm * load.calls / 1e3,
        attention=attention * load.calls / 1e3,
        elementwise=passes * load.calls / 1e3,
        exchange=exchanges * load.calls / 1e3,
        memory=memory(work, load, layout, slowest),
    )


@dataclass(frozen=True)
class Totals:
    """The counted cost of one step.

    flops: the sum over all ranks. elements: what all ranks read and write if every operation runs alone. sent: the
    bytes that the busiest rank sends or receives in its layers. messages: the number of messages that it sends.
    """

    flops: int
    elements: int
    sent: int
    messages: int


def totals(work: Work, load: Load, layout: Layout) -> Totals:
    """Count a step of all ranks; guidance doubles the rows."""
    batch, rows = load.rows(layout), load.images * (2 if load.guidance else 1)
    every, cost = layers(work, layout, load.tokens, batch, load.others), work.step(rows, load.tokens, load.others)
    sent = work.layers * sum(busiest(every)) * batch * work.head_dim * load.itemsize
    messages = work.layers * max(sum(move.messages for move in layer.moves) for layer in every)
    return Totals(*(round(load.calls * count) for count in (cost.flops, cost.elements, sent, messages)))


def curve_of(rates: Rates, layout: Layout, ranks: int) -> Curve:
    return rates.exchange[BETWEEN if rates.crosses(ranks) else layout.transport]


def _products(work: Work, kind: Blocks, layer: Layer) -> Blocks:
    if not layer.split or kind.beside or kind.given:
        return kind
    first, *others = ((*_split(work, gemms).values(), *gemms[1:]) for gemms in (kind.gemms, *kind.apart))
    return replace(kind, gemms=first, apart=tuple(others))


def _split(work: Work, gemms: Gemms) -> dict[str, tuple[int, int]]:
    inputs, outputs = gemms[0]
    queries = work.heads * work.head_dim
    keys = (outputs - queries) // 2
    return {"q": (inputs, queries), "k": (inputs, keys), "v": (inputs, keys)}


def _exposed_us(
    work: Work, kind: Blocks, behind: tuple[str, ...], copy: float, products_us: Callable[[Blocks], float]
) -> float:
    """By how many us an exchange ends after the last of the products that overlap it.

    The exchange has one equal part, which takes `copy` us, for each product that `Layer.behind` names. A part starts
    when it has been computed and the part before it has arrived; at the same time the product that overlaps it starts.
    In a block that makes q, k and v itself, all parts start before the products `Blocks.beside`; without any of these,
    nothing hides them.
    """
    if kind.beside or kind.given:
        return copy * len(behind) - products_us(replace(kind, gemms=kind.beside, apart=(), cross=None))
    computed = arrived = 0.0
    for name in behind:
        arrived = max(arrived, computed) + copy
        first, *rest = ((_split(work, gemms)[name],) for gemms in (kind.gemms, *kind.apart))
        computed += products_us(replace(kind, gemms=first, apart=tuple(rest), cross=None))
    return arrived - computed


def gemm_us(rates: Rates, rows: int, inputs: int, outputs: int, itemsize: int) -> float:
    """The us of a matrix product: the longest of computing, reading the weights and launching a kernel."""
    compute = 2e-6 * rows * inputs * outputs / rate_at(rates.gemm, rows * outputs)
    return max(compute, 1e-6 * inputs * outputs * itemsize / rates.weights, rates.kernel_us)


def attention_us(rates: Rates, head_dim: int, call: Cost) -> float:
    """The us of an attention call, at the rate of the nearest measured head dim."""
    nearest = min(rates.attention, key=lambda dim: (max(dim, head_dim) / min(dim, head_dim), dim))
    return 1e-6 * call.flops / rate_at(rates.attention[nearest], call.flops)


def _bytes_in_8_bits(work: Work) -> int:
    """The bytes of copies in 8 bits beside the weights."""
    return sum(kind.count * _elements(kind.gemms) for kind in work.blocks)


def _elements(gemms: Gemms) -> int:
    return sum(inputs * outputs for inputs, outputs in gemms)


def memory(work: Work, load: Load, layout: Layout, layer: Layer) -> Memory:
    """The memory of a rank: all weights, and the modulation of the steps that fit `load.table`, at least one."""
    b, (mine, others) = load.rows(layout), load.mine(layout)
    step = load.labels * work.table * STATE
    kept = min(load.steps, max(1, load.table // step))
    eight = _bytes_in_8_bits(work) if load.eight and not load.stored else load.stored * (1 - load.itemsize)
    state = 3 * b * mine * load.latent * STATE  # the tokens and the predictions of both branches
    return Memory(
        weights=load.parameters * load.itemsize + eight,
        table=kept * step + b * work.table * STATE,
        activations=b * (mine + sum(others)) * work.live * load.itemsize + state,
        exchange=b * layer.kept * work.head_dim * load.itemsize,
    )
