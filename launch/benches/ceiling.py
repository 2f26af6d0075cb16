"""Lower bounds of a step's time: one rank's cuBLAS matrix products and attention alone, and the roofline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from launch.benches.timing import over
from seqpar.mesh import Mesh
from seqpar.planner.costs import facts_of
from seqpar.planner.facts import Call, Place, Work
from seqpar.planner.plan import load_local

MATRIX_FLOPS, MEMORY_BYTES = 790e12, 4.3e12  # FLOP/s and bytes/s, measured on an H200


@dataclass(frozen=True)
class Share:
    """The work of one rank in a step: `batch` rows of `tokens` tokens, and the calls of local attention in a layer."""

    batch: int
    tokens: int
    calls: tuple[Call, ...]


def share(work: Work, tokens: int, strategy: str, mesh: Mesh) -> Share:
    """Return this rank's share of one picture with two guidance branches (each rank of a data axis has one picture)."""
    batch, rank = 2 // mesh.cfg.size, mesh.sequence.rank
    at = Place(work, mesh.ring.size, mesh.ulysses.size, tokens, batch, False)
    return Share(batch, at.sizes[rank], facts_of(strategy).layer(at, rank).calls)


def ceiling(work: Work, mine: Share, local: str, dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    """Return a step of only the blocks' cuBLAS matrix products and attention, with a rank's shapes and random data.

    The blocks cycle through more copies of the weights than the L2 cache holds.
    """

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    bytes_of_block = sum(inputs * outputs for inputs, outputs in work.gemms) * dtype.itemsize
    copies = min(work.layers, over(bytes_of_block)) if device.type == "cuda" else 1
    *blocks, (final,) = [
        [0.02 * random(outputs, inputs) for inputs, outputs in gemms]
        for gemms in (*[work.gemms] * copies, work.once[-1:])
    ]
    rows = {inputs: random(mine.batch, mine.tokens, inputs) for inputs, _ in (*work.gemms, work.once[-1])}
    calls = [_inputs(random, mine.batch, work.head_dim, call) for call in mine.calls]
    attend = load_local(local)

    def step() -> Tensor:
        for index in range(work.layers):
            first, *others = blocks[index % copies]
            F.linear(rows[first.shape[1]], first)
            for q, k, v in calls:
                attend(q, k, v)
            for weight in others:
                F.linear(rows[weight.shape[1]], weight)
        return F.linear(rows[final.shape[1]], final)

    return torch.inference_mode()(step)


def _inputs(random: Callable[..., Tensor], batch: int, dim: int, call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v of one call; k and v are views of one tensor."""
    k, v = random(batch, call.keys, 2 * call.kv_heads, dim).chunk(2, dim=2)
    return random(batch, call.queries, call.heads, dim), k, v


def roofline(flops: float, weights: float) -> float:
    """Return the longer time in ms of two: computing the FLOPs at the GEMM rate, and reading the weights once."""
    return 1e3 * max(flops / MATRIX_FLOPS, weights / MEMORY_BYTES)


def flops_and_weights(work: Work, tokens: int) -> tuple[float, float]:
    """Return (FLOPs, bytes of bf16 weights) of all blocks in a step with two batch rows, attention included."""
    weights = sum(inputs * outputs for inputs, outputs in work.gemms)
    return work.layers * work.block(2, tokens).flops, work.layers * weights * 2.0
