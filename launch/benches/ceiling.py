"""What no engine gets below: a rank's matrix products by cuBLAS and its attention, alone; and the roofline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from seqpar.mesh import Mesh
from seqpar.models import large_dit
from seqpar.planner.plan import load_local
from seqpar.shard import Shard
from seqpar.transports._layout import HeadLayout

MATRIX_FLOPS, MEMORY_BYTES = 790e12, 4.3e12  # a second; measured on an H200


@dataclass(frozen=True)
class Share:
    """What one rank computes in a step: `batch` rows of `tokens`; attention of `queries` to blocks of `keys`, each with
    `heads` (query, key-value)."""

    batch: int
    tokens: int
    queries: int
    keys: tuple[int, ...]
    heads: tuple[int, int]


def share(config: Any, tokens: int, strategy: str, mesh: Mesh) -> Share:
    """This rank's, of one picture with two guidance branches (of one on each rank of a data axis)."""
    batch, axis, ring, ulysses = 2 // mesh.cfg.size, mesh.sequence, mesh.ring, mesh.ulysses
    sizes = Shard(tokens, axis.size).sizes
    heads, mine = config.num_attention_heads, sizes[axis.rank]
    groups = getattr(config, "num_key_value_heads", heads)
    if strategy in ("kv_gather", "kv_first"):
        return Share(batch, mine, mine, (tokens,), (heads, groups))
    blocks = [sizes[start : start + ulysses.size] for start in range(0, axis.size, ulysses.size)]
    layout = HeadLayout(batch, blocks[ring.rank], heads, groups, config.attention_head_dim, torch.float32, mesh.device)
    keys = tuple(map(sum, blocks))
    return Share(batch, mine, keys[ring.rank], keys, layout.counts(ulysses.rank))


def ceiling(model: Any, mine: Share, local: str) -> Callable[[], object]:
    """The matrix products of all blocks by cuBLAS, and attention, and nothing else: a rank's shapes, random data."""
    config, weight = model.config, model.x_embedder.weight
    large = isinstance(config, large_dit.Config)
    hidden = config.feed_forward if large else 4 * config.width
    attend = load_local(local)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=weight.device).to(weight.dtype)

    x, inner = (random(mine.batch, mine.tokens, width) for width in (config.width, hidden))
    (h, g), dim = mine.heads, config.attention_head_dim
    q = random(mine.batch, mine.queries, h, dim)
    keys = [random(mine.batch, count, 2 * g, dim).chunk(2, dim=2) for count in mine.keys] if h else []

    def step() -> Tensor:
        for block in model.blocks:
            F.linear(x, block.qkv.weight)
            for k, v in keys:
                attend(q, k, v)
            F.linear(x, (block.wo if large else block.proj).weight)
            F.linear(x, (block.w13 if large else block.fc1).weight)
            F.linear(inner, (block.w2 if large else block.fc2).weight)
        return F.linear(x, model.final.weight)

    return torch.inference_mode()(step)


def work(config: Any, tokens: int) -> tuple[float, float]:
    """(FLOPs, bytes of weights) of one step with two batch rows: matrix products and attention of all blocks."""
    width = config.width
    large = isinstance(config, large_dit.Config)
    weights = 4 * width**2 + (3 * width * config.feed_forward if large else 8 * width**2)
    products, attention = 2 * 2 * tokens * weights, 2 * 4 * tokens**2 * width
    return config.num_layers * (products + attention), config.num_layers * weights * 2.0


def roofline(flops: float, weights: float) -> float:
    """ms: FLOPs at the rate of matrix products, or weights read once, whichever takes longer."""
    return 1e3 * max(flops / MATRIX_FLOPS, weights / MEMORY_BYTES)
