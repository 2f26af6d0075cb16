"""All to each: every rank gathers q, k and v of all tokens, attends with its share of the heads, and gathers outputs.

Only `tests/test_one_file.py` adds this strategy to the folder. It moves data and changes no arithmetic.
It has a rule about heads: every rank must have a key-value head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from seqpar.attention._by_stream import in_key_order
from seqpar.attention._streams import Alone, Beside, OneRank, given, joined, present, refuse_gradients, split_out
from seqpar.mesh.mesh import Axis, Mesh
from seqpar.mesh.shard import Shard, Tokens, check_tokens, starts
from seqpar.transports._contract import Gather, Transport
from seqpar.types.facts import AttentionCall, Layer, Move, ShardedLayer, StrategyFacts, refuse
from seqpar.types.protocols import Attend, Core, Stream


def build(mesh: Mesh, tokens: Tokens, local: Core, transport: Transport) -> Attend:
    """Build attention for one token count over the whole sequence axis."""
    check_tokens(tokens, mesh.sequence.size)
    alone = Alone(lambda own: build(mesh, own, local, transport), tokens)
    return AllToEach(in_key_order(local, tokens, mesh.sequence.rank), mesh.sequence, tokens, transport, alone)


class AllToEach:
    """Local attention of all queries with some of the heads. Owns its buffers (see `Attend`)."""

    def __init__(self, local: Core, axis: Axis, tokens: Tokens, transport: Transport, alone: Alone) -> None:
        self._local, self._axis, self._sizes, self._transport = local, axis, tokens.sizes, transport
        self._alone = alone
        self.tokens = tokens.total
        self._one_rank = OneRank(local, axis, tokens.sizes[axis.rank])
        self._gathers: dict[tuple[object, ...], tuple[Gather, Gather]] = {}

    def __call__(
        self,
        streams: Sequence[Stream],
        mask_BL: Tensor | None = None,
        /,
        *,
        beside: Beside | None = None,
        only: int | None = None,
    ) -> tuple[Tensor, ...]:
        """See `seqpar.types.protocols.Attend`."""
        if only is not None:
            return self._alone.attend(only, streams, mask_BL, beside)
        if self._axis.size == 1:
            return self._one_rank(streams, mask_BL, beside)
        refuse_gradients(streams, "all_to_each")
        self._transport.abandon()
        q, k, v = joined([given(stream) for stream in present(streams)])
        heads, groups = q.shape[2], k.shape[2]
        refuse("all_to_each", why_not(1, self._axis.size, heads, groups))
        there, back = self._exchanges(q, groups)
        there.outbox().copy_(torch.cat((q, k, v), dim=2).transpose(0, 1))
        if beside is not None:  # a gather cannot start to send without waiting
            beside()
        whole = there.deliver().transpose(0, 1).split((heads, groups, groups), dim=2)
        mine, share = Shard(groups, self._axis.size).slice(self._axis.rank), heads // groups
        shares = (slice(mine.start * share, mine.stop * share), mine, mine)
        q, k, v = (x[:, :, part] for x, part in zip(whole, shares, strict=True))
        out = self._local(q, k, v, mask_BL)[0]
        back.outbox().copy_(out.movedim(2, 0))
        start = starts(self._sizes)[self._axis.rank]
        rows = slice(start, start + self._sizes[self._axis.rank])
        return split_out(back.deliver()[:, :, rows].movedim(0, 2).contiguous(), streams)

    def _exchanges(self, q_BlHD: Tensor, groups: int) -> tuple[Gather, Gather]:
        batch, _, heads, dim = q_BlHD.shape
        key = (batch, heads, groups, dim, q_BlHD.dtype)
        if key not in self._gathers:
            shares = tuple(heads // groups * size for size in Shard(groups, self._axis.size).sizes)
            with torch.inference_mode(False):
                there = self._transport.gather(self._axis, self._sizes, (batch, heads + 2 * groups, dim), q_BlHD)
                back = self._transport.gather(self._axis, shares, (batch, self.tokens, dim), q_BlHD)
            self._gathers[key] = there, back
        return self._gathers[key]


# Facts ---------------------------------------------------------------------------------------------------------


def layer(at: ShardedLayer, rank: int) -> Layer:
    """Return the costs of one rank: two exchanges around one call, and passes that rearrange q, k, v and the output."""
    work, mine, others, total = at.work, at.sizes[rank], at.ranks - 1, at.tokens
    if not others:
        return Layer((), (AttentionCall(mine, total, work.heads, work.kv_heads),), at.prepared(rank), 0)
    groups, whole = Shard(work.kv_heads, at.ranks).sizes[rank], work.heads + 2 * work.kv_heads
    heads = groups * work.heads // work.kv_heads
    there = Move(mine * whole * others, (total - mine) * whole, others)
    back = Move(total * heads * others, total * (work.heads - heads), others)
    passes = (*at.prepared(rank), (4 * mine * whole, 2), (2 * total * heads, 1), (2 * mine * work.heads, 1))
    return Layer((there, back), (AttentionCall(total, total, heads, groups),), passes, total * (whole + work.heads))


def why_not(ring: int, ulysses: int, heads: int, kv_heads: int) -> str | None:
    """Return the reason why a rank would have no key-value head, or None."""
    ranks = ring * ulysses
    return None if kv_heads >= ranks else f"{kv_heads} key-value heads on {ranks} ranks, expected one a rank"


FACTS = StrategyFacts(moves_only=True, order=60, axes=(), layer=layer, why_not=why_not)
