"""K/V first: as `kv_gather`, but keys and values are made and sent before there are queries, and travel meanwhile.

The projection is two products, of k and v, then of q. Moves data; one rank's bits where a product rounds its columns
alike however many it has. When it wins: from some 512 tokens a rank on, where the product of the queries takes as long
as the keys and values travel, and a second product costs less than the wait. By peer memory copy engines do it, so
that no multiprocessor is missing in the product.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from seqpar.attention import kv_gather
from seqpar.comm.exchange import HeadLayout
from seqpar.comm.transport import Behind, Transport
from seqpar.kernels.prepare import prepare_into
from seqpar.mesh import Axis, Mesh
from seqpar.protocols import Attend, Core, Outboxes, Prepare
from seqpar.shard import Tokens, check_tokens

check = kv_gather.check


def build(mesh: Mesh, tokens: Tokens, local: Core, transport: Transport) -> Attend:
    """Attention for one token count over the whole sequence axis. One rank has nothing to send first."""
    if mesh.sequence.size == 1:
        return kv_gather.build(mesh, tokens, local, transport)
    check_tokens(tokens, mesh.sequence.size)
    return KVFirst(local, mesh.sequence, tokens.sizes, transport)


class KVFirst:
    """A local attention of my queries over everybody's keys and values. Owns its buffers (see `KeysFirst`)."""

    def __init__(self, local: Core, axis: Axis, sizes: tuple[int, ...], transport: Transport) -> None:
        self._local, self._axis, self._sizes, self._transport = local, axis, sizes, transport
        self.tokens = sum(sizes)
        self._exchanges: dict[HeadLayout, Behind] = {}
        self._sent: Behind | None = None

    def __call__(self, q_BlHD: Tensor, k_BlGD: Tensor, v_BlGD: Tensor, how: Prepare, /) -> Tensor:
        """See `seqpar.protocols.Attend`: for who has all three at once."""
        _refuse_gradients(q_BlHD)  # before anything is sent: who never receives leaves its peers' messages waiting
        return self.send(k_BlGD, v_BlGD, q_BlHD.shape[2], how)(q_BlHD)

    def send(self, k_BlGD: Tensor, v_BlGD: Tensor, heads: int, how: Prepare, /) -> Callable[[Tensor], Tensor]:
        """See `seqpar.protocols.KeysFirst`."""
        _refuse_gradients(k_BlGD, v_BlGD)
        if self._sent is not None:  # an error came before its queries: what was sent is received, or it would be later
            self._sent.deliver()
        exchange = self._exchange(k_BlGD, heads)
        boxes = exchange.outboxes()
        prepare_into(None, k_BlGD, v_BlGD, how, boxes)
        exchange.start()
        capturing = k_BlGD.is_cuda and torch.cuda.is_current_stream_capturing()
        self._sent = None if capturing else exchange  # what is captured is not sent yet
        return partial(self._receive, exchange, boxes, how)

    def _receive(self, exchange: Behind, boxes: Outboxes, how: Prepare, q_BlHD: Tensor) -> Tensor:
        _refuse_gradients(q_BlHD)
        prepare_into(q_BlHD, None, None, how, boxes)
        self._sent = None
        return self._local(*exchange.deliver())[0]

    def _exchange(self, k_BlGD: Tensor, heads: int) -> Behind:
        batch, _, groups, dim = k_BlGD.shape
        layout = HeadLayout(batch, self._sizes, heads, groups, dim, k_BlGD.dtype, k_BlGD.device)
        if layout not in self._exchanges:
            with torch.inference_mode(False):  # buffers outlive the caller's mode
                self._exchanges[layout] = self._transport.behind(self._axis, layout)
        return self._exchanges[layout]


def _refuse_gradients(*inputs: Tensor) -> None:
    if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
        raise ValueError("got inputs that require gradients, expected none: kv_first is for inference; use ulysses")
