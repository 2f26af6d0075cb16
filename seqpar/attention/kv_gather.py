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
from seqpar.protocols import Attend, Core, Prepare
from seqpar.shard import Tokens, check_tokens
from seqpar.transports._contract import KeyValues, Transport
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
        self._exchanges: dict[HeadLayout, KeyValues] = {}

    def __call__(self, q_BlHD: Tensor, k_BlGD: Tensor, v_BlGD: Tensor, how: Prepare, /) -> Tensor:
        """See `seqpar.protocols.Attend`."""
        if self._axis.size == 1:
            return self._local(*prepare(q_BlHD, k_BlGD, how), v_BlGD)[0]
        if torch.is_grad_enabled() and any(x.requires_grad for x in (q_BlHD, k_BlGD, v_BlGD)):
            raise ValueError(
                "got inputs that require gradients, expected none: kv_gather is for inference; use ulysses"
            )
        self._transport.abandon()  # what an error in the last call left unfinished
        exchange, as_it_is = self._exchange(q_BlHD, k_BlGD), how.is_identity
        moved = None if as_it_is else q_BlHD  # queries stay: where they need nothing, where they are
        met = prepare_into(moved, k_BlGD, v_BlGD, how, exchange.outboxes(), exchange.flags)
        prepared, k, v = exchange.deliver(met)
        return self._local(q_BlHD if as_it_is else prepared, k, v)[0]

    def _exchange(self, q_BlHD: Tensor, k_BlGD: Tensor) -> KeyValues:
        layout = HeadLayout.of(self._sizes, q_BlHD, k_BlGD)
        if layout not in self._exchanges:
            with torch.inference_mode(False):  # buffers outlive the caller's mode
                self._exchanges[layout] = self._transport.key_values(self._axis, layout)
        return self._exchanges[layout]
