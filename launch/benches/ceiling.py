"""The lower bound of a step's time: one rank's cuBLAS matrix products and attention alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from launch.benches.timing import over
from seqpar.mesh.mesh import Mesh
from seqpar.mesh.shard import Shard
from seqpar.planner.costs import facts_of
from seqpar.planner.plan import load_local
from seqpar.types.facts import AttentionCall, Blocks, ShardedLayer, Work
from seqpar.types.masks import key_bias
from seqpar.types.protocols import Core


@dataclass(frozen=True)
class Share:
    """The work of one rank in a step: `batch` rows of `tokens` tokens, and the calls of local attention in a layer.

    tokens: those of the state; others: those of each other stream (text). masked: whether attention gets key masks.
    """

    batch: int
    tokens: int
    calls: tuple[AttentionCall, ...]
    others: tuple[int, ...] = ()
    masked: bool = False


def share(work: Work, tokens: int, strategy: str, mesh: Mesh, rows: int = 2, others: tuple[int, ...] = ()) -> Share:
    """This rank's share of one picture with `rows` batch rows (each rank of a data axis has one picture).

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
    calls: list[tuple[Tensor, ...]]


def ceiling(work: Work, mine: Share, local: str, dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    """A step of only the blocks' cuBLAS matrix products and attention, with a rank's shapes and random data.

    The blocks cycle through more copies of the weights than the L2 cache holds. The products that make the modulation
    are left out.
    """

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    kinds = [_alone(work, kind, mine, random) for kind in work.blocks]
    inputs, outputs = work.once[-1]
    last, weight = random(mine.batch, mine.tokens, inputs), 0.02 * random(outputs, inputs)
    attend = load_local(local)

    def step() -> Tensor:
        for kind in kinds:
            for index in range(kind.count):
                _block(kind, kind.copies[index % len(kind.copies)], attend)
        return F.linear(last, weight)

    return torch.inference_mode()(step)


def _block(kind: Alone, weights: Sequence[Tensor], attend: Core) -> None:
    pairs = list(zip(kind.inputs, weights, strict=True))
    for x, weight in pairs[: kind.first]:
        F.linear(x, weight)
    for call in kind.calls:
        attend(*call)
    for x, weight in pairs[kind.first :]:
        F.linear(x, weight)


def _alone(work: Work, kind: Blocks, mine: Share, random: Callable[..., Tensor]) -> Alone:
    # QKV of every stream comes first, because attention needs it
    shapes = sorted(kind.products(mine.tokens, mine.others), key=lambda product: product[1:] != kind.gemms[0])
    made: dict[tuple[int, int], Tensor] = {}
    for rows, inputs, _ in shapes:
        if (rows, inputs) not in made:
            made[rows, inputs] = random(mine.batch, rows, inputs)
    weights = sum(inputs * outputs for _, inputs, outputs in shapes) * random(1).itemsize
    copies = min(kind.count, over(weights)) if random(1).is_cuda else 1
    calls = [_inputs(random, mine.batch, work.head_dim, call, mine.masked) for call in mine.calls]
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
        1 + len(mine.others) if kind.apart else 1,
        calls,
    )


def _inputs(
    random: Callable[..., Tensor], batch: int, dim: int, call: AttentionCall, masked: bool = False
) -> tuple[Tensor, ...]:
    k, v = random(batch, call.keys, 2 * call.kv_heads, dim).chunk(2, dim=2)
    masks = [key_bias(k.new_ones(batch, call.keys, dtype=torch.bool), k.dtype)] if masked else []
    return random(batch, call.queries, call.heads, dim), k, v, *masks
