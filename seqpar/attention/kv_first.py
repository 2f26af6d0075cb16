"""K/V first: as `kv_gather`, but keys, then values are made and sent before there are queries, and travel meanwhile.

The projection is three products, of k, v and q: k travels under the product of v, v under that of q. Moves data; one
rank's bits where a product rounds its columns alike however many it has. When it wins: from some 512 tokens a rank on,
where these products take as long as keys and values travel, and two more cost less than the wait. By peer memory copy
engines do it, so that no multiprocessor is missing in the products; by collectives k and v are one message, behind the
product of q alone.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from seqpar.attention import kv_gather
from seqpar.kernels.prepare import prepare_into
from seqpar.mesh import Axis, Mesh
from seqpar.planner.facts import Facts, Layer, Place
from seqpar.protocols import Attend, Core, Prepare
from seqpar.shard import Tokens, check_tokens
from seqpar.transports._contract import Behind, Transport
from seqpar.transports._layout import HeadLayout

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
        self._sent: Sent | None = None

    def __call__(self, q_BlHD: Tensor, k_BlGD: Tensor, v_BlGD: Tensor, how: Prepare, /) -> Tensor:
        """See `seqpar.protocols.Attend`: for who has all three at once."""
        # before anything is sent: who never receives leaves its peers' messages waiting
        _refuse_gradients(q_BlHD, k_BlGD, v_BlGD)
        sent = self.send_keys(k_BlGD, q_BlHD.shape[2], how)
        sent.send_values(v_BlGD)
        return sent.receive(q_BlHD)

    def send_keys(self, k_BlGD: Tensor, heads: int, how: Prepare, /) -> Sent:
        """See `seqpar.protocols.KeysFirst`."""
        _refuse_gradients(k_BlGD)
        capturing = k_BlGD.is_cuda and torch.cuda.is_current_stream_capturing()
        if self._sent is not None:
            self._sent.finish(capturing)
        sent = Sent(self._local, self._exchange(k_BlGD, heads), how, k_BlGD)
        self._sent = None if capturing else sent  # what is captured is not sent yet
        return sent

    def _exchange(self, k_BlGD: Tensor, heads: int) -> Behind:
        batch, _, groups, dim = k_BlGD.shape
        layout = HeadLayout(batch, self._sizes, heads, groups, dim, k_BlGD.dtype, k_BlGD.device)
        if layout not in self._exchanges:
            with torch.inference_mode(False):  # buffers outlive the caller's mode
                self._exchanges[layout] = self._transport.behind(self._axis, layout)
        return self._exchanges[layout]


class Sent:
    """Keys that are on their way once this is made. See `seqpar.protocols.KeysSent`."""

    def __init__(self, local: Core, exchange: Behind, how: Prepare, k_BlGD: Tensor) -> None:
        self._local, self._exchange, self._how = local, exchange, how
        self._boxes = exchange.outboxes()
        self.room = _one_matrix(self._boxes[0].v)
        self._values_sent = self._delivered = False
        prepare_into(None, k_BlGD, None, how, self._boxes)
        exchange.start_keys()

    def send_values(self, v_BlGD: Tensor, /) -> None:
        """See `seqpar.protocols.KeysSent`."""
        _refuse_gradients(v_BlGD)
        if v_BlGD is not self.room:
            prepare_into(None, None, v_BlGD, self._how, self._boxes)
        self._exchange.start_values()
        self._values_sent = True

    def receive(self, q_BlHD: Tensor, /) -> Tensor:
        """See `seqpar.protocols.KeysSent`."""
        _refuse_gradients(q_BlHD)
        as_it_is = self._how.is_identity
        if not as_it_is:
            prepare_into(q_BlHD, None, None, self._how, self._boxes)
        self._delivered = True
        prepared, k, v = self._exchange.deliver()
        return self._local(q_BlHD if as_it_is else prepared, k, v)[0]

    def finish(self, capturing: bool) -> None:
        """Send and receive what an error left undone: peers count messages, so that the next would be taken for it."""
        if self._delivered:
            return
        if capturing:  # what is captured does not run now, and runs again and again later
            raise RuntimeError("got a capture right after a call that failed, expected a call outside of one before")
        if not self._values_sent:
            self._exchange.start_values()
        self._delivered = True
        self._exchange.deliver()


def _one_matrix(v_lBGD: Tensor | None) -> Tensor | None:
    """(B, l, G, D) where a product can write it: peers' slots, for one batch row.

    Slots are token-major. For more batch rows that would be a product each, every one of which reads all weights: one
    product and a pass of v alone cost less. Collectives' k and v share rows, so that a message is one block.
    """
    v_BlGD = None if v_lBGD is None else v_lBGD.transpose(0, 1)
    return v_BlGD if v_BlGD is not None and v_BlGD.is_contiguous() else None


def _refuse_gradients(*inputs: Tensor) -> None:
    if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
        raise ValueError("got inputs that require gradients, expected none: kv_first is for inference; use ulysses")


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
