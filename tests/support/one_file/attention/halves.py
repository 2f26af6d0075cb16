"""Halves: queries stay; keys and values of all ranks are gathered in two halves, and the two results are merged.

Only `tests/test_one_file.py` adds this strategy to the folder. A half holds the first or the last tokens
of every rank, and one half is used at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from seqpar.attention._streams import Beside, Strategy, given, layout_of
from seqpar.kernels.merge import merge
from seqpar.kernels.prepare import prepare
from seqpar.mesh.mesh import Axis, Mesh
from seqpar.mesh.shard import Shard, Tokens, check_tokens, starts
from seqpar.transports._contract import Gather, Transport
from seqpar.transports._exchanges import HeadLayout
from seqpar.types.facts import AttentionCall, Layer, Move, ShardedLayer, StrategyFacts
from seqpar.types.protocols import Attend, Core, Stream


def build(mesh: Mesh, tokens: Tokens, local: Core, transport: Transport) -> Attend:
    """Build attention for one token count over the whole sequence axis."""
    check_tokens(tokens, mesh.sequence.size, merges=True)
    again = lambda other: build(mesh, other, local, transport)  # noqa: E731
    make = partial(_exchanges, mesh.sequence, tokens.sizes, transport)
    return Halves(local, mesh.sequence, tokens.sizes, tokens, transport, make, again)


def halves_of(sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return the tokens of each rank in both halves; there is no second half if every rank has one token."""
    return [half for half in zip(*(Shard(size, 2).sizes for size in sizes), strict=True) if sum(half)]


class Halves(Strategy[list[Gather]]):
    """Local attention of this rank's queries to two halves of the keys."""

    def _attend(self, streams: Sequence[Stream], mask_BL: Tensor | None, beside: Beside | None) -> Tensor:
        here = [given(stream) for stream in streams]
        q, k = (torch.cat(parts, 1) for parts in zip(*(prepare(x.q, x.k, x.prepare) for x in here), strict=True))
        v = torch.cat([x.v for x in here], 1)
        out = lse = None
        halves, groups, first = halves_of(self._sizes), k.shape[2], 0
        exchanges = self._exchanges[layout_of(self._sizes, here, k)]
        for index, (half, exchange) in enumerate(zip(halves, exchanges, strict=True)):
            size, box = half[self._axis.rank], exchange.outbox()
            box[:, :, :groups].copy_(k[:, first : first + size].transpose(0, 1))
            box[:, :, groups:].copy_(v[:, first : first + size].transpose(0, 1))
            first += size
            if beside is not None and index == 0:  # a gather cannot start to send without waiting
                beside()
            k_half, v_half = exchange.deliver().transpose(0, 1).split((groups, groups), dim=2)
            # slices, because a list of places would be copied from the host, which no CUDA graph can capture
            mask = None if mask_BL is None else torch.cat([mask_BL[:, part] for part in self._places(index)], dim=1)
            dtype = q.dtype if index == len(halves) - 1 else None
            out, lse = merge(out, lse, *self._core(q, k_half, v_half, mask), dtype=dtype)
        assert out is not None
        return out

    def _places(self, index: int) -> list[slice]:
        """Return the places of the keys of a half in the joined order, those of one rank after the other."""
        halves, where = halves_of(self._sizes), []
        for rank, start in enumerate(starts(self._sizes)):
            begin = start + sum(half[rank] for half in halves[:index])
            where.append(slice(begin, begin + halves[index][rank]))
        return where


def _exchanges(axis: Axis, sizes: tuple[int, ...], transport: Transport, layout: HeadLayout) -> list[Gather]:
    like = torch.empty(0, dtype=layout.dtype, device=layout.device)
    shape = (layout.batch, 2 * layout.kv_heads, layout.head_dim)
    return [transport.gather(axis, half, shape, like) for half in halves_of(sizes)]


# Facts ---------------------------------------------------------------------------------------------------------


def layer(at: ShardedLayer, rank: int) -> Layer:
    """Return the costs of one rank: two exchanges, two calls, and two copies of k and v into each exchange."""
    work, mine, others, both = at.work, at.sizes[rank], at.ranks - 1, 2 * at.work.kv_heads
    if not others:
        return Layer((), (AttentionCall(mine, at.tokens, work.heads, work.kv_heads),), at.prepared(rank), 0)
    halves = halves_of(at.sizes)
    moves = tuple(
        Move(half[rank] * both * others, (sum(half) - half[rank]) * both, others if half[rank] else 0)
        for half in halves
    )
    calls = tuple(AttentionCall(mine, sum(half), work.heads, work.kv_heads) for half in halves)
    copies = (2 * mine * both, 2 * len(halves))
    return Layer(moves, calls, (*at.prepared(rank), copies), at.tokens * both, merges=len(halves) - 1)


FACTS = StrategyFacts(moves_only=False, order=60, axes=(), layer=layer)
