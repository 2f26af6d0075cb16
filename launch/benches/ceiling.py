"""Lower bounds of a step's time: one rank's cuBLAS matrix products and attention alone, and the roofline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from launch.benches.timing import over
from seqpar.mesh import Mesh
from seqpar.planner.costs import facts_of
from seqpar.planner.plan import load_local
from seqpar.protocols import Core
from seqpar.shard import Shard
from seqpar.types.facts import AttentionCall, Blocks, ShardedLayer, Work

MATRIX_FLOPS, MEMORY_BYTES = 790e12, 4.3e12  # FLOP/s and bytes/s, measured on an H200


@dataclass(frozen=True)
class Share:
    """The work of one rank in a step: `batch` rows of `tokens` tokens, and the calls of local attention in a layer.

    tokens: those of the state; others: those of each other stream (text).
    """

    batch: int
    tokens: int
    calls: tuple[AttentionCall, ...]
    others: tuple[int, ...] = ()


def share(work: Work, tokens: int, strategy: str, mesh: Mesh, rows: int = 2, others: tuple[int, ...] = ()) -> Share:
    """Return this rank's share of one picture with `rows` batch rows (each rank of a data axis has one picture).

    rows: 2 for two guidance branches in a batch, which a cfg axis splits. others: tokens of the streams besides the
    state.
    """
    batch, rank = max(1, rows // mesh.cfg.size), mesh.sequence.rank
    mine, *rest = (Shard(count, mesh.sequence.size).sizes[rank] for count in (tokens, *others))
    whole = tokens + sum(others)
    at = ShardedLayer(work, mesh.ring.size, mesh.ulysses.size, whole, batch, False, (tokens, *others))
    return Share(batch, mine, facts_of(strategy).layer(at, rank).calls, tuple(rest))


@dataclass(frozen=True)
class Alone:
    """The operations of blocks of one kind with random data.

    copies: the weights of all products of a block, more than once, so that they do not stay in the cache. inputs: the
    input of each product. first: how many products come before attention.
    """

    count: int
    copies: list[list[Tensor]]
    inputs: list[Tensor]
    first: int
    calls: list[tuple[Tensor, Tensor, Tensor]]


def ceiling(
    work: Work, mine: Share, local: str, dtype: torch.dtype, device: torch.device, modulation: bool = False
) -> Callable[[], object]:
    """Return a step of only the blocks' cuBLAS matrix products and attention, with a rank's shapes and random data.

    The blocks cycle through more copies of the weights than the L2 cache holds. With `modulation` the products that
    make the modulation are computed, too: one row for each batch row, so they read all of its weights.
    """

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    kinds = [_alone(work, kind, mine, random, modulation) for kind in work.blocks]
    ends = [(mine.tokens, *work.once[-1])]
    if modulation:
        ends = [*((1, *gemm) for gemm in work.conditioning), *ends]
    rest = [(random(mine.batch, rows, inputs), 0.02 * random(outputs, inputs)) for rows, inputs, outputs in ends]
    attend = load_local(local)

    def step() -> Tensor:
        for kind in kinds:
            for index in range(kind.count):
                _block(kind, kind.copies[index % len(kind.copies)], attend)
        return [F.linear(x, weight) for x, weight in rest][-1]

    return torch.inference_mode()(step)


def _block(kind: Alone, weights: Sequence[Tensor], attend: Core) -> None:
    """Compute the products before attention, attention, and the products after it."""
    pairs = list(zip(kind.inputs, weights, strict=True))
    for x, weight in pairs[: kind.first]:
        F.linear(x, weight)
    for q, k, v in kind.calls:
        attend(q, k, v)
    for x, weight in pairs[kind.first :]:
        F.linear(x, weight)


def _alone(work: Work, kind: Blocks, mine: Share, random: Callable[..., Tensor], modulation: bool) -> Alone:
    """Return the random inputs and weights of blocks of one kind."""
    # QKV of every stream comes first, because attention needs it
    products = sorted(kind.products(mine.tokens, mine.others), key=lambda product: product[1:] != kind.gemms[0])
    before = [(1, *gemm) for gemm in kind.modulation] if modulation else []
    shapes = [*before, *products]
    made: dict[tuple[int, int], Tensor] = {}
    for rows, inputs, _ in shapes:
        if (rows, inputs) not in made:
            made[rows, inputs] = random(mine.batch, rows, inputs)
    weights = sum(inputs * outputs for _, inputs, outputs in shapes) * random(1).itemsize
    copies = min(kind.count, over(weights)) if random(1).is_cuda else 1
    calls = [_inputs(random, mine.batch, work.head_dim, call) for call in mine.calls]
    if kind.cross is not None:
        calls.append(
            _inputs(
                random, mine.batch, work.head_dim, AttentionCall(mine.tokens, kind.cross.keys, work.heads, work.heads)
            )
        )
    return Alone(
        kind.count,
        [[0.02 * random(outputs, inputs) for _, inputs, outputs in shapes] for _ in range(copies)],
        [made[rows, inputs] for rows, inputs, _ in shapes],
        len(before) + (1 + len(mine.others) if kind.apart else 1),
        calls,
    )


def _inputs(random: Callable[..., Tensor], batch: int, dim: int, call: AttentionCall) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v of one call; k and v are views of one tensor."""
    k, v = random(batch, call.keys, 2 * call.kv_heads, dim).chunk(2, dim=2)
    return random(batch, call.queries, call.heads, dim), k, v


def roofline(flops: float, weights: float) -> float:
    """Return the longer time in ms of two: computing the FLOPs at the GEMM rate, and reading the weights once."""
    return 1e3 * max(flops / MATRIX_FLOPS, weights / MEMORY_BYTES)


def flops_and_weights(work: Work, tokens: int, rows: int = 2, others: tuple[int, ...] = ()) -> tuple[float, float]:
    """Return (FLOPs, bytes of bf16 weights) of all blocks in a step, attention included, for `rows` batch rows."""
    flops = sum(kind.count * work.block(kind, rows, tokens, others).flops for kind in work.blocks)
    products = (
        kind.count * inputs * outputs for kind in work.blocks for _, inputs, outputs in kind.products(1, others)
    )
    return flops, sum(products) * 2.0
