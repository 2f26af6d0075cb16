"""K/V first: as `kv_gather`, but keys, then values are made and sent before there are queries, and travel meanwhile.

The projection is three products, of k, v and q: k travels under the product of v, v under that of q. Moves data; one
rank's bits where a product rounds its columns alike however many it has. When it wins: from some 512 tokens a rank on,
where these products take as long as keys and values travel, and two more cost less than the wait. By peer memory copy
engines do it, so that no multiprocessor is missing in the products; by collectives k and v are one message, behind the
product of q alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from seqpar.attention import kv_gather
from seqpar.attention._streams import key, layout_of, present, query, refuse_gradients, split_out, value
from seqpar.attention.kv_gather import stays
from seqpar.kernels.prepare import prepare_into
from seqpar.mesh import Axis, Mesh
from seqpar.outboxes import Outboxes
from seqpar.planner.facts import Facts, Layer, Place
from seqpar.protocols import Attend, Core, Stream
from seqpar.shard import Tokens, check_tokens
from seqpar.transports._contract import KeyValues, Transport
from seqpar.transports._layout import HeadLayout


def build(mesh: Mesh, tokens: Tokens, local: Core, transport: Transport) -> Attend:
    """Attention for one token count over the whole sequence axis. One rank has nothing to send first."""
    if mesh.sequence.size == 1:
        return kv_gather.build(mesh, tokens, local, transport)
    check_tokens(tokens, mesh.sequence.size)
    return KVFirst(local, mesh.sequence, tokens.sizes, transport)


class KVFirst:
    """A local attention of my queries over the keys and values of all ranks. Owns its buffers (see `Attend`)."""

    def __init__(self, local: Core, axis: Axis, sizes: tuple[int, ...], transport: Transport) -> None:
        self._local, self._axis, self._sizes, self._transport = local, axis, sizes, transport
        self.tokens = sum(sizes)
        self._exchanges: dict[HeadLayout, KeyValues] = {}

    def __call__(self, streams: Sequence[Stream], mask_BL: Tensor | None = None, /) -> tuple[Tensor, ...]:
        """See `seqpar.protocols.Attend`. Keys of all streams are sent, then values; then queries are made."""
        # before anything is sent: peers would wait in vain
        refuse_gradients(streams, "kv_first")
        self._transport.abandon()  # what an error in the last call left unfinished
        here = present(streams)
        first_k = key(here[0])
        exchange = self._exchange(layout_of(self._sizes, here, first_k))
        boxes = exchange.outboxes()
        parts = list(zip(here, boxes.split([stream.tokens for stream in here]), strict=True))
        for index, (stream, part) in enumerate(parts):
            prepare_into(None, key(stream) if index else first_k, None, stream.prepare, part)
        del first_k  # its memory is free for the next GEMMs
        exchange.start_keys()
        for stream, part in parts:
            _write_values(stream, part)
        exchange.start_values()
        q_BlHD = query(here[0]) if stays(here) else None
        for stream, part in parts if q_BlHD is None else ():
            prepare_into(query(stream), None, None, stream.prepare, part)
        prepared, k, v = exchange.deliver()
        return split_out(self._local(prepared if q_BlHD is None else q_BlHD, k, v, mask_BL)[0], streams)

    def _exchange(self, layout: HeadLayout) -> KeyValues:
        if layout not in self._exchanges:
            with torch.inference_mode(False):  # buffers outlive the caller's mode
                self._exchanges[layout] = self._transport.key_values(self._axis, layout, overlap=True)
        return self._exchanges[layout]


def _write_values(stream: Stream, part: Outboxes) -> None:
    """Write the values of a stream into its part of the outbox: by their GEMM itself, where it can write there."""
    room = one_matrix(part[0].v)
    v_BlGD = value(stream, room)
    if v_BlGD is not room:
        prepare_into(None, None, v_BlGD, stream.prepare, part)


def one_matrix(v_lBGD: Tensor | None) -> Tensor | None:
    """(B, l, G, D) where a GEMM can write it: a slot of peer memory, for one batch row. Otherwise None.

    Slots are token-major. For more batch rows that would be a GEMM each, every one of which reads all weights: one GEMM
    and a pass over v alone cost less. The k and v of collectives share rows, so that a message is one block.
    """
    v_BlGD = None if v_lBGD is None else v_lBGD.transpose(0, 1)
    return v_BlGD if v_BlGD is not None and v_BlGD.is_contiguous() else None


# Facts ---------------------------------------------------------------------------------------------------------


def layer(at: Place, rank: int) -> Layer:
    """The exchange of `kv_gather`, but three products for q, k and v, and a pass for each of them.

    By peer memory the keys travel behind the product of the values, and the values behind that of the queries; the
    product of one batch row's values writes them where they are sent from, without a pass.
    """
    gathered = kv_gather.layer(at, rank)
    if at.ranks == 1:
        return gathered
    work, in_place = at.work, at.direct and at.batch == 1
    heads = (*([work.heads] if work.prepares else []), work.kv_heads, *([] if in_place else [work.kv_heads]))
    passes = tuple((2 * at.sizes[rank] * part, 1) for part in heads)
    return replace(gathered, passes=passes, split=True, behind=("v", "q") if at.direct else ())


FACTS = Facts(moves_only=True, order=30, axes=(), layer=layer)
