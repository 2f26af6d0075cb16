"""Ulysses: exchange heads for tokens, attend to the whole sequence with some of the heads, exchange back.

A layer needs two collectives: one all-to-all moves q, k and v, another moves the output. The strategy moves data and
changes no arithmetic: the output has the bits of one rank. Source: DeepSpeed-Ulysses (arXiv 2309.14509). Use it if
there are enough heads for the ranks, and links are fast. From three ranks on it sends fewer bytes than a ring.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from seqpar.attention._key_order import in_key_order
from seqpar.attention._streams import Beside, Strategy, given, layout_of, write
from seqpar.kernels.push import push
from seqpar.mesh.mesh import Mesh
from seqpar.mesh.shard import Tokens, check_tokens
from seqpar.transports._contract import ToHeads, ToTokens, Transport
from seqpar.types.facts import AttentionCall, Layer, Move, ShardedLayer, StrategyFacts, refuse
from seqpar.types.protocols import Attend, Core, Stream


def build(mesh: Mesh, tokens: Tokens, local: Core, transport: Transport) -> Attend:
    """Build attention for one token count; `tokens` is sharded over `mesh.sequence`."""
    refuse("ulysses", why_not(mesh.ring.size, mesh.ulysses.size, 0, 0))
    check_tokens(tokens, mesh.sequence.size)
    core, again = in_key_order(local, tokens, mesh.sequence.rank), lambda other: build(mesh, other, local, transport)
    return Ulysses(core, mesh.ulysses, tokens.sizes, tokens, transport, partial(transport.heads, mesh.ulysses), again)


class Ulysses(Strategy[tuple[ToHeads, ToTokens]]):
    """Runs any Core on all tokens of one axis, with some of the heads on each rank."""

    def _attend(self, streams: Sequence[Stream], mask_BL: Tensor | None, beside: Beside | None) -> Tensor:
        here = [given(stream) for stream in streams]
        into, back = self._exchanges[layout_of(self._sizes, here, here[0].k)]
        met = write(here, into.outboxes(), into.flags if beside is None else None)
        if beside is not None:
            into.start()
            beside()
        q, k, v = into.deliver(met)
        out, boxes = self._core(q, k, v, mask_BL)[0] if q.shape[2] else None, back.outboxes()
        # a rank without heads takes part in the exchanges only
        met = out is not None and push(out, boxes, back.flags)
        return back.deliver(met)


# Facts ---------------------------------------------------------------------------------------------------------


def layer(at: ShardedLayer, rank: int) -> Layer:
    """Return the costs of one rank: one call of attention with some of the heads, between two exchanges."""
    heads, groups = at.heads(rank)
    return around(at, rank, Layer((), (AttentionCall(at.tokens, at.tokens, heads, groups),) if heads else (), (), 0))


def around(at: ShardedLayer, rank: int, inner: Layer) -> Layer:
    """Return the costs of any Core plus those of the two exchanges of heads around it."""
    if at.ulysses == 1:
        return replace(inner, passes=(*at.prepared(rank), *inner.passes))
    work, mine, block = at.work, at.sizes[rank], at.blocks[rank // at.ulysses]
    (heads, groups), whole, others = at.heads(rank), work.heads + 2 * work.kv_heads, at.ulysses - 1
    share, elsewhere = work.heads // work.kv_heads, work.kv_heads - groups
    there = Move(mine * elsewhere * (share + 2), (block - mine) * groups * (share + 2), others, at.ulysses)
    back = Move((block - mine) * heads, mine * elsewhere * share, others, at.ulysses)
    local, kept = block * heads, inner.kept + block * (heads + 2 * groups)
    if at.direct:  # writes to other ranks count as the exchange; only this rank's part of each tensor counts as a pass
        passes = (mine * whole + mine * whole // at.ulysses, 1), *inner.passes, (local + local // at.ulysses, 1)
        kept += mine * work.heads
    else:
        rearranged = 2 * mine * work.heads, at.ulysses
        passes = (2 * mine * whole, 1), *inner.passes, (2 * local, 1), rearranged
        kept += mine * whole + local + 2 * mine * work.heads
    return replace(inner, moves=(there, *inner.moves, back), passes=passes, kept=kept)


def why_not(ring: int, ulysses: int, heads: int, kv_heads: int) -> str | None:
    """Return the reason why ulysses cannot use this mesh (it has no use for a ring axis), or None if it can.

    More ranks than key-value heads are allowed; the ranks without heads are idle during attention.
    """
    return None if ring == 1 else f"ring={ring}, expected ring=1; use strategy usp for both"


FACTS = StrategyFacts(moves_only=True, order=20, axes=("ulysses",), layer=layer, why_not=why_not)
