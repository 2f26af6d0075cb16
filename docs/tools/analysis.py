"""Costs of a transformer's operations, what each kind of parallelism sends, and what fits: for docs/analysis.md.

Costs are sums of `linear` and `core` of `seqpar.types.facts`. Tensor and pipeline parallelism, which seqpar does not
have, are here only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from seqpar.planner.costs import busiest, layers
from seqpar.planner.explain import first
from seqpar.planner.predict import GIB, USABLE, Load, memory
from seqpar.planner.rates import Rates
from seqpar.types.facts import Cost, Layout, Work, core, linear

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


# Traffic ---------------------------------------------------------------------------------------------------------


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


# Crossings -------------------------------------------------------------------------------------------------------


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
