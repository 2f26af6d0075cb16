"""What no engine gets below: a rank's matrix products by cuBLAS and its attention, alone; and the roofline."""

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

MATRIX_FLOPS, MEMORY_BYTES = 790e12, 4.3e12  # a second; measured on an H200


@dataclass(frozen=True)
class Share:
    """What one rank computes in a step: `batch` rows of `tokens`, and these calls of the local attention a layer."""

    batch: int
    tokens: int
    calls: tuple[Call, ...]


def share(work: Work, tokens: int, strategy: str, mesh: Mesh) -> Share:
    """This rank's part of one picture with two guidance branches (of one picture on each rank of a data axis)."""
    batch, rank = 2 // mesh.cfg.size, mesh.sequence.rank
    at = Place(work, mesh.ring.size, mesh.ulysses.size, tokens, batch, False)
    return Share(batch, at.sizes[rank], facts_of(strategy).layer(at, rank).calls)


def ceiling(work: Work, mine: Share, local: str, dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    """The matrix products of all blocks by cuBLAS, and attention, and nothing else: a rank's shapes, random data.

    The weights of the blocks take turns, as many of them as no cache holds.
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
    """q, k and v of one call; k and v lie side by side."""
    k, v = random(batch, call.keys, 2 * call.kv_heads, dim).chunk(2, dim=2)
    return random(batch, call.queries, call.heads, dim), k, v


def roofline(flops: float, weights: float) -> float:
    """ms: FLOPs at the rate of matrix products, or weights read once, whichever takes longer."""
    return 1e3 * max(flops / MATRIX_FLOPS, weights / MEMORY_BYTES)


def flops_and_weights(work: Work, tokens: int) -> tuple[float, float]:
    """(FLOPs, bytes of weights) of one step with two batch rows: matrix products and attention of all blocks, bf16."""
    weights = sum(inputs * outputs for inputs, outputs in work.gemms)
    return work.layers * work.block(2, tokens).flops, work.layers * weights * 2.0
