"""K/V first: like `kv_gather`, but keys and values are computed and sent while the next projection still runs.

The fused QKV GEMM becomes three GEMMs, in the order K, V, Q: keys travel during the V GEMM, values during the Q GEMM.
The strategy only moves data. Its output has the bits of one rank if a GEMM rounds each output column the same,
regardless of the number of columns. Use it from about 512 tokens per rank on, where these GEMMs take as long as the
transfer of keys and values, and two more GEMM launches cost less than waiting. With the peer transport copy engines
move the data, so the GEMMs keep all multiprocessors. With collectives K and V are one message, which travels during
the Q GEMM only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from seqpar.attention import kv_gather
from seqpar.attention._key_order import in_key_order
from seqpar.attention._streams import Beside, Strategy, into, key, layout_of, query, value, write
from seqpar.attention.kv_gather import stays
from seqpar.mesh.mesh import Mesh
from seqpar.mesh.shard import Tokens, check_tokens
from seqpar.transports._contract import KeyValues, Transport
from seqpar.types.facts import Layer, ShardedLayer, StrategyFacts
from seqpar.types.outboxes import Outboxes
from seqpar.types.protocols import Attend, Core, Given, Stream


def build(mesh: Mesh, tokens: Tokens, local: Core, transport: Transport) -> Attend:
    """Build attention for one token count over the whole sequence axis; one rank alone uses `kv_gather`."""
    if mesh.sequence.size == 1:
        return kv_gather.build(mesh, tokens, local, transport)
    check_tokens(tokens, mesh.sequence.size)
    core, again = in_key_order(local, tokens, mesh.sequence.rank), lambda other: build(mesh, other, local, transport)
    make = partial(transport.key_values, mesh.sequence, overlap=True)
    return KVFirst(core, mesh.sequence, tokens.sizes, tokens, transport, make, again)


class KVFirst(Strategy[KeyValues]):
    """Local attention of this rank's queries over the keys and values of all ranks."""

    def _attend(self, streams: Sequence[Stream], mask_BL: Tensor | None, beside: Beside | None) -> Tensor:
        """Send all streams' keys, then values, then compute the queries."""
        projected = [stream for stream in streams if isinstance(stream, Given)]
        if beside is not None and len(projected) == len(streams):
            return self._hidden(projected, mask_BL, beside)
        exchange, parts = self._send(streams)
        q_BlHD = query(streams[0]) if stays(streams) else None
        for stream, part in parts if q_BlHD is None else ():
            into(query(stream), None, None, stream.prepare, part)
        if beside is not None:
            beside()
        prepared, k, v = exchange.deliver()
        return self._core(prepared if q_BlHD is None else q_BlHD, k, v, mask_BL)[0]

    def _send(self, here: Sequence[Stream]) -> tuple[KeyValues, list[tuple[Stream, Outboxes]]]:
        """Make and send the keys of all streams, then their values; return the exchange, and each stream's outboxes."""
        first_k = key(here[0])
        exchange = self._exchanges[layout_of(self._sizes, here, first_k)]
        boxes = exchange.outboxes()
        parts = list(zip(here, boxes.split([stream.tokens for stream in here]), strict=True))
        for index, (stream, part) in enumerate(parts):
            into(None, key(stream) if index else first_k, None, stream.prepare, part)
        del first_k  # frees its memory for the next GEMMs
        exchange.start_keys()
        for stream, part in parts:
            _write_values(stream, part)
        exchange.start_values()
        return exchange, parts

    def _hidden(self, here: Sequence[Given], mask_BL: Tensor | None, beside: Beside) -> Tensor:
        """Attend to streams that the model has projected, with all of the transfer behind the work beside attention.

        There is no projection left to hide the transfer, so one kernel prepares q, k and v.
        """
        exchange, stay = self._exchanges[layout_of(self._sizes, here, here[0].k)], stays(here)
        write(here, exchange.outboxes(), queries=not stay)
        exchange.start_keys()
        exchange.start_values()
        beside()
        prepared, k, v = exchange.deliver()
        return self._core(here[0].q if stay else prepared, k, v, mask_BL)[0]


def _write_values(stream: Stream, part: Outboxes) -> None:
    """Write the values of a stream into its part of the outbox; their GEMM writes there itself where it can."""
    room = one_matrix(part[0].v) if stream.prepare.eight is None else None
    v_BlGD = value(stream, room)
    if v_BlGD is not room:
        into(None, None, v_BlGD, stream.prepare, part)


def one_matrix(v_lBGD: Tensor | None) -> Tensor | None:
    """Return the outbox of v as (B, l, G, D) if one GEMM can write it, otherwise None.

    A GEMM can write a slot of peer memory for one batch row. Slots are token-major, so more batch rows would need one
    GEMM each, and every GEMM reads all weights; one GEMM and a pass over v cost less. In the outboxes of collectives
    k and v share rows, so that a message is one block; a GEMM cannot write v there.
    """
    v_BlGD = None if v_lBGD is None else v_lBGD.transpose(0, 1)
    return v_BlGD if v_BlGD is not None and v_BlGD.is_contiguous() else None


# Facts ---------------------------------------------------------------------------------------------------------


def layer(at: ShardedLayer, rank: int) -> Layer:
    """Return the costs of one rank: the exchange of `kv_gather`, with separate GEMMs and passes for q, k and v.

    With the peer transport the keys travel during the V GEMM and the values during the Q GEMM. For one batch row the V
    GEMM writes the values where they are sent from, so they need no pass.
    """
    gathered = kv_gather.layer(at, rank)
    if at.ranks == 1:
        return gathered
    work, in_place = at.work, at.direct and at.batch == 1
    heads = (*([work.heads] if work.prepares else []), work.kv_heads, *([] if in_place else [work.kv_heads]))
    passes = tuple((2 * at.sizes[rank] * part, 1) for part in heads)
    return replace(gathered, passes=passes, split=True, behind=("v", "q") if at.direct else ())


FACTS = StrategyFacts(moves_only=True, order=30, axes=(), layer=layer)
