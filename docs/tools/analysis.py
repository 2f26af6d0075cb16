"""Costs of a transformer's operations, traffic of each kind of parallelism, and where one overtakes another.

docs/analysis.md is written from this file. Costs are sums of `linear` and `core` of `seqpar.types.facts`, times are
those of `seqpar.planner.predict`. Tensor and pipeline parallelism, which seqpar does not have, are here only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from seqpar.planner.costs import busiest, layers
from seqpar.planner.explain import first
from seqpar.planner.predict import GIB, USABLE, Load, Prediction, memory, predict
from seqpar.planner.rates import Rates, time_at
from seqpar.types.facts import Blocks, Cost, Gemms, Layout, Work, core, linear

# Operations: b rows of s tokens, width d, heads z, c text tokens of width e --------------------------------------


def mlp(rows: int, d: int) -> Cost:
    return linear(rows, d, 4 * d) + linear(rows, 4 * d, d)


def self_attention(b: int, s: int, d: int, z: int) -> Cost:
    """Return the cost of self-attention with its projections: one product to q, k and v, and that of the output."""
    return linear(b * s, d, 3 * d) + core(b, s, s, z, d // z) + linear(b * s, d, d)


# GPUs ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gpu:
    """A GPU: TFLOP/s of bf16 products, TB/s and GB of its memory, GB/s that it sends to other GPUs."""

    name: str
    tflops: float
    tbs: float
    gb: float
    links: float

    @property
    def ridge(self) -> float:
        """Return the FLOPs a byte above which its arithmetic, not its memory, is the bound."""
        return self.tflops / self.tbs


# as the maker publishes them, without sparsity
PUBLISHED = (Gpu("A100", 312, 1.5, 40, 300), Gpu("H100", 989, 3.35, 80, 450), Gpu("H200", 989, 4.8, 141, 450))


def measured(rates: Rates, transport: str) -> Gpu:
    """Return the GPU of measured rates: large products, weights as products read them, the largest exchange."""
    memory_gb = (rates.memory or 0) * GIB / 1e9
    return Gpu(f"{rates.device}, measured", rates.gemm[-1][1], rates.weights, memory_gb, rates.links(transport))


# Traffic and time of other kinds of parallelism ----------------------------------------------------------------------


def sequence_sent(strategy: str, work: Work, s: int, b: int, ranks: int) -> int:
    """Return the elements that the busiest rank sends in one layer by a strategy on the sequence."""
    ring = ranks if strategy == "ring" else 1
    layout = Layout(1, 1, ring, ranks // ring, strategy, "nccl")
    return sum(busiest(layers(work, layout, s, b))) * b * work.head_dim


def tensor_sent(b: int, s: int, d: int, ranks: int) -> int:
    """Return the elements that a rank sends in one layer of tensor parallelism: two all-reduces of all tokens.

    An all-reduce is a reduce-scatter and an all-gather; in each a rank sends N - 1 of N parts.
    """
    return 4 * (b * s * d * (ranks - 1) // ranks)


def pipeline_sent(b: int, s: int, d: int) -> int:
    """Return the elements that a rank sends in one step of pipeline parallelism: the tokens, to the next stage."""
    return b * s * d


def tensor_parallel(work: Work, load: Load, ranks: int, rates: Rates, transport: str) -> Prediction:
    """Predict a step of tensor parallelism at its best: everything but the exchanges is divided by the ranks.

    Each of the four exchanges of a layer (see `tensor_sent`) waits for all ranks and hides behind nothing.
    """
    alone = Layout(1, 1, 1, 1, "ulysses", transport)
    row = predict(_share(work, ranks), replace(load, parameters=-(-load.parameters // ranks)), alone, rates)
    tokens = load.tokens + sum(load.others)
    sent = tensor_sent(load.rows(alone), tokens, work.width, ranks) // 4 * load.itemsize
    us = 4 * work.layers * time_at(rates.exchange[transport], sent) if ranks > 1 else 0.0
    return replace(row, exchange=us / 1e3)


def _share(work: Work, ranks: int) -> Work:
    """Return the work of one rank of tensor parallelism: all tokens, a share of the heads and of each product.

    A product whose result is as wide as the model is split by its inputs, any other by its outputs.
    """

    def of(count: int) -> int:
        return -(-count // ranks)

    def split(gemms: Gemms) -> Gemms:
        return tuple((of(i), o) if o == work.width else (i, of(o)) for i, o in gemms)

    def part(kind: Blocks) -> Blocks:
        cross = kind.cross and replace(kind.cross, gemms=split(kind.cross.gemms))
        passes, apart = tuple(map(of, kind.passes)), tuple(map(split, kind.apart))
        return replace(kind, gemms=split(kind.gemms), passes=passes, apart=apart, cross=cross, beside=())

    blocks, live = tuple(map(part, work.blocks)), of(work.live)
    return replace(work, heads=of(work.heads), kv_heads=of(work.kv_heads), blocks=blocks, live=live)


# Crossings -------------------------------------------------------------------------------------------------------


def sequence_beats_tensor(work: Work, load: Load, ranks: int, rates: Rates, transport: str) -> int | None:
    """Return the tokens from which Ulysses is predicted to be faster than tensor parallelism on as many ranks."""
    layout = Layout(1, 1, 1, ranks, "ulysses", transport)

    def holds(s: int) -> bool:
        at = replace(load, tokens=max(s, ranks))
        return predict(work, at, layout, rates).ms <= tensor_parallel(work, at, ranks, rates, transport).ms

    return first(holds)


def ring_hides(work: Work, rates: Rates, gpu: Gpu, itemsize: int = 2) -> float:
    """Return the tokens a rank from which attention to a block takes as long as sending its keys and values.

    Attention of l tokens to l takes 4 l^2 d FLOPs, and 2 l d values travel (as many keys as query heads).
    """
    nearest = min(rates.attention, key=lambda dim: abs(dim - work.head_dim))
    return rates.attention[nearest][-1][1] * 1e12 * itemsize / (2 * gpu.links * 1e9)


def most_tokens(work: Work, load: Load, ranks: int, gib: float) -> int:
    """Return the most tokens of a picture that fit on so many GPUs by Ulysses; 0 if the weights alone do not fit."""
    layout = Layout(1, 1, 1, ranks, "ulysses", "peer")

    def over(s: int) -> bool:
        at = replace(load, tokens=max(s, ranks))
        (slowest, *_) = layers(work, layout, at.tokens, at.rows(layout), at.others)
        return memory(work, at, layout, slowest).total > USABLE * gib * GIB

    return (first(over, 1 << 30) or (1 << 30)) - 1
