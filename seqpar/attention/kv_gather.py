"""K/V gather: queries stay on their rank, and every rank gets all keys and values in one exchange.

The strategy moves data and changes no arithmetic: the output has the bits of one rank. It works with any number of
heads and needs no exchange of the output. Use it with two ranks on the sequence (it sends the bytes of ulysses with
one synchronisation instead of two), few key-value heads, head counts that the ranks do not divide. From four ranks on
it moves more data than ulysses.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from seqpar.attention._key_order import in_key_order
from seqpar.attention._streams import Beside, Strategy, given, layout_of, write
from seqpar.mesh.mesh import Mesh
from seqpar.mesh.shard import Tokens, check_tokens
from seqpar.transports._contract import KeyValues, Transport
from seqpar.types.facts import AttentionCall, Layer, Move, ShardedLayer, StrategyFacts
from seqpar.types.protocols import Attend, Core, Stream


def build(mesh: Mesh, tokens: Tokens, local: Core, transport: Transport) -> Attend:
    """Build attention for one token count over the whole sequence axis."""
    check_tokens(tokens, mesh.sequence.size)
    core, again = in_key_order(local, tokens, mesh.sequence.rank), lambda other: build(mesh, other, local, transport)
    make = partial(transport.key_values, mesh.sequence)
    return KVGather(core, mesh.sequence, tokens.sizes, tokens, transport, make, again)


class KVGather(Strategy[KeyValues]):
    """Local attention of this rank's queries over the keys and values of all ranks."""

    def _attend(self, streams: Sequence[Stream], mask_BL: Tensor | None, beside: Beside | None) -> Tensor:
        here = [given(stream) for stream in streams]
        exchange, stay = self._exchanges[layout_of(self._sizes, here, here[0].k)], stays(here)
        met = write(here, exchange.outboxes(), exchange.flags if beside is None else None, queries=not stay)
        if beside is not None:
            exchange.start()
            beside()
        prepared, k, v = exchange.deliver(met)
        return self._core(here[0].q if stay else prepared, k, v, mask_BL)[0]


def stays(streams: Sequence[Stream]) -> bool:
    """Return whether attention reads the queries in place: a single stream that needs neither norm nor rotary."""
    return len(streams) == 1 and streams[0].prepare.is_identity


# Facts ---------------------------------------------------------------------------------------------------------


def layer(at: ShardedLayer, rank: int) -> Layer:
    """Return the costs of one rank: one exchange of keys and values, one attention of its queries over all keys."""
    work, mine, others = at.work, at.sizes[rank], at.ranks - 1
    calls = (AttentionCall(mine, at.tokens, work.heads, work.kv_heads),)
    if not others:
        return Layer((), calls, at.prepared(rank), 0)
    both = 2 * work.kv_heads
    moves = (Move(mine * both * others, (at.tokens - mine) * both, others),)
    written = both + (work.heads if work.prepares else 0)  # queries without norm and rotary are not written again
    slots = 2 if at.direct else 1  # other ranks write the next layer's keys while this layer's are read
    return Layer(moves, calls, ((2 * mine * written, 1),), mine * work.heads + slots * at.tokens * both)


FACTS = StrategyFacts(moves_only=True, order=10, axes=(), layer=layer)
