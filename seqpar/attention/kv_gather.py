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

from seqpar.attention._by_stream import in_key_order
from seqpar.attention._streams import (
    Alone,
    Beside,
    KeptExchanges,
    OneRank,
    given,
    layout_of,
    present,
    refuse_gradients,
    split_out,
    write,
)
from seqpar.mesh.mesh import Axis, Mesh
from seqpar.mesh.shard import Tokens, check_tokens
from seqpar.transports._contract import KeyValues, Transport
from seqpar.types.facts import AttentionCall, Layer, Move, ShardedLayer, StrategyFacts
from seqpar.types.protocols import Attend, Core, Stream


def build(mesh: Mesh, tokens: Tokens, local: Core, transport: Transport) -> Attend:
    """Build attention for one token count over the whole sequence axis."""
    check_tokens(tokens, mesh.sequence.size)
    alone = Alone(lambda own: build(mesh, own, local, transport), tokens)
    return KVGather(in_key_order(local, tokens, mesh.sequence.rank), mesh.sequence, tokens.sizes, transport, alone)


class KVGather:
    """Local attention of this rank's queries over the keys and values of all ranks. Owns its buffers (see `Attend`)."""

    def __init__(self, local: Core, axis: Axis, sizes: tuple[int, ...], transport: Transport, alone: Alone) -> None:
        self._local, self._axis, self._sizes, self._transport = local, axis, sizes, transport
        self._alone = alone
        self.tokens = sum(sizes)
        self._one_rank = OneRank(local, axis, sizes[axis.rank])
        self._exchanges = KeptExchanges[KeyValues](partial(transport.key_values, axis))

    def __call__(
        self,
        streams: Sequence[Stream],
        mask_BL: Tensor | None = None,
        /,
        *,
        beside: Beside | None = None,
        only: int | None = None,
    ) -> tuple[Tensor, ...]:
        if only is not None:
            return self._alone.attend(only, streams, mask_BL, beside)
        if self._axis.size == 1:
            return self._one_rank(streams, mask_BL, beside)
        refuse_gradients(streams, "kv_gather")
        self._transport.abandon()  # ends an exchange that an error in the last call left unfinished
        here = [given(stream) for stream in present(streams)]
        exchange = self._exchanges[layout_of(self._sizes, here, here[0].k)]
        stay = stays(here)
        met = write(here, exchange.outboxes(), exchange.flags if beside is None else None, queries=not stay)
        if beside is not None:
            exchange.start()
            beside()
        prepared, k, v = exchange.deliver(met)
        return split_out(self._local(here[0].q if stay else prepared, k, v, mask_BL)[0], streams)


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
