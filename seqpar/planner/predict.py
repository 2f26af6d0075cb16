"""Predicted ms of a step and memory of a rank for one layout: counts (`costs.py`) over rates (`rates.py`).

Parts are added up, and nothing is counted as hidden, because transfers by kernels take multiprocessors from what they
overlap (docs/planner.md), except behind `kv_first`'s products of values and queries, where copy engines make them. The
slowest rank counts: uneven tokens and heads are rounded up.
"""

from __future__ import annotations

from dataclasses import dataclass

from seqpar.planner.costs import Cost, Layout, Work, attention_calls, buffer_values, busiest, copies, merge_bytes
from seqpar.planner.rates import Rates, rate_at, time_at
from seqpar.shard import Shard

STATE = 4  # bytes of the denoised state and of modulation: fp32
GIB = 1 << 30
USABLE = 0.95  # of a device's memory: CUDA's context and NCCL's buffers need the rest


@dataclass(frozen=True)
class Load:
    """What is to be computed: pictures of `tokens` tokens each, with guidance or not, in a dtype of `itemsize` bytes.

    parameters: of the model. latent: values of a token's latent. labels: distinct ones, the unconditional included.
    table: bytes up to which the modulation of several steps is kept.
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

    def rows(self, layout: Layout) -> int:
        """Batch rows of the rank with most images: twice its images where both guidance branches are there."""
        return Shard(self.images, layout.data).sizes[0] * (2 if self.guidance and layout.cfg == 1 else 1)


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank: a floor, without what the allocator, CUDA and NCCL add."""

    weights: int
    table: int
    activations: int
    exchange: int

    @property
    def total(self) -> int:
        """Of all parts."""
        return self.weights + self.table + self.activations + self.exchange


@dataclass(frozen=True)
class Prediction:
    """ms a step, part by part, and memory, of one layout."""

    layout: Layout
    gemm: float
    attention: float
    elementwise: float
    exchange: float
    memory: Memory

    @property
    def ms(self) -> float:
        """A step."""
        return self.gemm + self.attention + self.elementwise + self.exchange

    def too_big(self, memory_gib: float | None) -> str | None:
        """Why the layout does not fit a device of that much memory, None where it does."""
        need = self.memory.total / GIB
        if memory_gib is None or need <= USABLE * memory_gib:
            return None
        return f"needs {need:.1f} GiB of {USABLE * memory_gib:.1f} on each rank"


def predict(work: Work, load: Load, layout: Layout, rates: Rates) -> Prediction:
    """What a step on this layout takes."""
    b, mine = load.rows(layout), Shard(load.tokens, layout.sequence).sizes[0]
    once = sum(gemm_us(rates, b * mine, *gemm, load.itemsize) for gemm in work.once)
    block = sum(gemm_us(rates, b * mine, *gemm, load.itemsize) for gemm in _products(work, layout))
    attention = sum(attention_us(rates, work.head_dim, call) for call in attention_calls(work, layout, b, load.tokens))
    passes = _step_pass_us(work, load, b * mine, rates) + work.layers * _passes_us(work, load, layout, rates)
    exchanges = _swap_us(load, layout, rates) + work.layers * _exchanges_us(work, load, layout, rates)
    return Prediction(
        layout,
        gemm=(once + work.layers * block) / 1e3,
        attention=work.layers * attention / 1e3,
        elementwise=passes / 1e3,
        exchange=exchanges / 1e3,
        memory=memory(work, load, layout),
    )


def _products(work: Work, layout: Layout) -> tuple[tuple[int, int], ...]:
    """The matrix products of a block: q, k and v apart where keys go first."""
    if layout.strategy != "kv_first" or layout.sequence == 1:
        return work.gemms
    (inputs, outputs), *rest = work.gemms
    queries = work.heads * work.head_dim
    keys = (outputs - queries) // 2
    return (inputs, queries), (inputs, keys), (inputs, keys), *rest


def gemm_us(rates: Rates, rows: int, inputs: int, outputs: int, itemsize: int) -> float:
    """A product fills the device by its number of outputs; with few rows it waits for its matrix or its launch."""
    compute = 2e-6 * rows * inputs * outputs / rate_at(rates.gemm, rows * outputs)
    return max(compute, 1e-6 * inputs * outputs * itemsize / rates.weights, rates.kernel_us)


def attention_us(rates: Rates, head_dim: int, call: Cost) -> float:
    """By the measured head dim that is nearest."""
    nearest = min(rates.attention, key=lambda dim: (max(dim, head_dim) / min(dim, head_dim), dim))
    return 1e-6 * call.flops / rate_at(rates.attention[nearest], call.flops)


def memory(work: Work, load: Load, layout: Layout) -> Memory:
    """Every rank has all weights, and the modulation of as many steps as `load.table` bytes hold, at least one."""
    b, mine = load.rows(layout), Shard(load.tokens, layout.sequence).sizes[0]
    step = load.labels * work.table * STATE
    kept = min(load.steps, max(1, load.table // step))
    state = 3 * b * mine * load.latent * STATE  # the tokens, the prediction, the other branch's
    return Memory(
        weights=load.parameters * load.itemsize,
        table=kept * step + b * work.table * STATE,
        activations=b * mine * work.live * load.itemsize + state,
        exchange=b * buffer_values(work, layout, load.tokens) * work.head_dim * load.itemsize,
    )


def _pass_us(rates: Rates, read_and_written: float, kernels: int) -> float:
    return kernels * rates.kernel_us + 1e-6 * read_and_written / rates.copy


def _passes_us(work: Work, load: Load, layout: Layout, rates: Rates) -> float:
    """The elementwise kernels of one block: the model's, and what the strategy adds."""
    b, mine = load.rows(layout), Shard(load.tokens, layout.sequence).sizes[0]
    total = sum(_pass_us(rates, b * mine * elements * load.itemsize, 1) for elements in work.passes)
    for values, kernels in copies(work, layout, b, load.tokens):
        total += _pass_us(rates, b * values * work.head_dim * load.itemsize, kernels)
    return total + _pass_us(rates, *merge_bytes(work, layout, b, load.tokens, load.itemsize))


def _step_pass_us(work: Work, load: Load, rows: int, rates: Rates) -> float:
    """Once a step: the first norm (3 E: read, written, positions or stream), and guidance + scheduler."""
    return _pass_us(rates, rows * (3 * work.width * load.itemsize + 4 * load.latent * STATE), 2)


def _exchanges_us(work: Work, load: Load, layout: Layout, rates: Rates) -> float:
    """The exchanges of one layer."""
    value = load.rows(layout) * work.head_dim * load.itemsize
    curve = rates.exchange[layout.transport]
    total = sum(time_at(curve, moved * value) for moved in busiest(work, layout, load.tokens))
    if layout.strategy != "kv_first" or layout.transport != "peer" or not total:
        return total
    return max(time_at(curve, 0), _exposed_us(work, load, layout, rates))  # what is hidden is waited for, too


def _exposed_us(work: Work, load: Load, layout: Layout, rates: Rates) -> float:
    """How much later than q v arrives, by peer: k leaves as the product of v begins, v after both, one at a time."""
    b, mine = load.rows(layout), Shard(load.tokens, layout.sequence).sizes[0]
    (k_and_v,) = busiest(work, layout, load.tokens)
    copy = time_at(rates.exchange[layout.transport], k_and_v / 2 * b * work.head_dim * load.itemsize)
    q, _, v = (gemm_us(rates, b * mine, *product, load.itemsize) for product in _products(work, layout)[:3])
    return max(copy, v) + copy - (v + q)


def _swap_us(load: Load, layout: Layout, rates: Rates) -> float:
    """Once a step: the guidance branches swap their predictions."""
    if layout.cfg == 1:
        return 0.0
    sent = load.rows(layout) * Shard(load.tokens, layout.sequence).sizes[0] * load.latent * STATE
    return time_at(rates.exchange[layout.transport], sent)
