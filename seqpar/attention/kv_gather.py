"""K/V gather: queries stay, every rank gets all keys and values in one exchange.

Moves data and changes no arithmetic: the output has the bits of one rank. No rule about heads, no output exchange.
When it wins: two ranks on the sequence (the bytes of ulysses with one synchronisation instead of two), few
key-value heads, head counts that do not divide. From four ranks on it moves more than ulysses.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seqpar.kernels.prepare import prepare, prepare_into
from seqpar.mesh import Axis, Mesh
from seqpar.planner.facts import Call, Facts, Layer, Move, Place
from seqpar.protocols import Attend, Core, Prepare
from seqpar.shard import Tokens, check_tokens
from seqpar.transports._contract import Into, Transport
from seqpar.transports._layout import HeadLayout


def check(mesh: Mesh) -> None:
    """Any mesh: ring and ulysses axes are used as one."""


def build(mesh: Mesh, tokens: Tokens, local: Core, transport: Transport) -> Attend:
    """Attention for one token count over the whole sequence axis."""
    check_tokens(tokens, mesh.sequence.size)
    return KVGather(local, mesh.sequence, tokens.sizes, transport)


class KVGather:
    """A local attention of my queries over everybody's keys and values. Owns its buffers (see `Attend`)."""

    def __init__(self, local: Core, axis: Axis, sizes: tuple[int, ...], transport: Transport) -> None:
        self._local, self._axis, self._sizes, self._transport = local, axis, sizes, transport
        self.tokens = sum(sizes)
        self._exchanges: dict[HeadLayout, Into] = {}

    def __call__(self, q_BlHD: Tensor, k_BlGD: Tensor, v_BlGD: Tensor, how: Prepare, /) -> Tensor:
        """See `seqpar.protocols.Attend`."""
        if self._axis.size == 1:
            return self._local(*prepare(q_BlHD, k_BlGD, how), v_BlGD)[0]
        if torch.is_grad_enabled() and any(x.requires_grad for x in (q_BlHD, k_BlGD, v_BlGD)):
            raise ValueError(
                "got inputs that require gradients, expected none: kv_gather is for inference; use ulysses"
            )
        exchange, as_it_is = self._exchange(q_BlHD, k_BlGD), how.is_identity
        moved = None if as_it_is else q_BlHD  # queries stay: where they need nothing, where they are
        met = prepare_into(moved, k_BlGD, v_BlGD, how, exchange.outboxes(), exchange.flags)
        prepared, k, v = exchange.deliver(met)
        return self._local(q_BlHD if as_it_is else prepared, k, v)[0]

    def _exchange(self, q_BlHD: Tensor, k_BlGD: Tensor) -> Into:
        layout = HeadLayout.of(self._sizes, q_BlHD, k_BlGD)
        if layout not in self._exchanges:
            with torch.inference_mode(False):  # buffers outlive the caller's mode
                self._exchanges[layout] = self._transport.everywhere(self._axis, layout)
        return self._exchanges[layout]


# Facts ---------------------------------------------------------------------------------------------------------


def layer(at: Place, rank: int) -> Layer:
    """Keys and values of my tokens, in one exchange, to each other rank; all heads of my queries to all keys."""
    work, mine, others = at.work, at.sizes[rank], at.ranks - 1
    calls = (Call(mine, at.tokens, work.heads, work.kv_heads),)
    if not others:
        return Layer((), calls, at.prepared(rank), 0)
    both = 2 * work.kv_heads
    moves = (Move(mine * both * others, (at.tokens - mine) * both, others),)
    written = both + (work.heads if work.prepares else 0)  # queries that need nothing stay where they are
    slots = 2 if at.direct else 1  # peers write the next layer's keys while this layer's are read
    return Layer(moves, calls, ((2 * mine * written, 1),), mine * work.heads + slots * at.tokens * both)


FACTS = Facts(moves_only=True, order=10, axes=(), layer=layer)
