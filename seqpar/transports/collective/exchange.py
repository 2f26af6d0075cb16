"""The exchanges of attention by collectives.

One all-to-all takes q, k and v from sharded tokens to sharded heads, another takes the output back, and a group of
sends and receives brings the keys and values of all tokens to every rank. Source: DeepSpeed-Ulysses
(arXiv 2309.14509), which uses three all-to-alls before attention and one after, and needs even counts. Here sizes come
from `Shard`, so uneven tokens and heads take the same path. An exchange owns its buffers and reuses them: what
`deliver` returns is valid until its next call.
"""

from __future__ import annotations

from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from seqpar.kernels.flags import Flags
from seqpar.kernels.push import Destinations, push
from seqpar.mesh.mesh import Axis
from seqpar.transports._layout import HeadLayout
from seqpar.transports.collective.point_to_point import CollectiveGather
from seqpar.transports.collective.waiting import Waits
from seqpar.types.outboxes import Outbox, Outboxes


class AllToAll:
    """One collective that sends a slab to every rank of an axis and receives one from each; slabs may have any shape.

    `outgoing` and `incoming` are the slabs, views of two flat buffers.
    """

    def __init__(
        self,
        axis: Axis,
        send_shapes: list[tuple[int, ...]],
        recv_shapes: list[tuple[int, ...]],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._axis, self._waits = axis, Waits(axis, "an exchange of heads", device)
        self._send_bytes = [prod(shape) * dtype.itemsize for shape in send_shapes]
        self._recv_bytes = [prod(shape) * dtype.itemsize for shape in recv_shapes]
        self._send = torch.empty(sum(map(prod, send_shapes)), dtype=dtype, device=device)
        # on one rank the send buffer is also the receive buffer
        self._recv = self._send if axis.size == 1 else self._send.new_empty(sum(map(prod, recv_shapes)))
        self.outgoing = _views(self._send, send_shapes)
        self.incoming = _views(self._recv, recv_shapes)
        self._work: dist.Work | None = None

    def start(self) -> None:
        """Start to exchange the slabs; the current stream does not wait."""
        self._work = self._exchange(wait=False)

    def deliver(self) -> Tensor:
        """Exchange the slabs, and return the received ones as one flat tensor in the order of the sending ranks.

        After `start`, wait for the exchange that it began.
        """
        work = self._exchange(wait=not self._waits.on_host) if self._work is None else self._work
        self._work = None
        self._waits.end(() if work is None else (work,))
        return self._recv

    def _exchange(self, wait: bool) -> dist.Work | None:
        if self._axis.size == 1:
            return None
        # sent as bytes, so that every dtype takes the same path, also one that the backend does not know
        recv, send = self._recv.view(torch.uint8), self._send.view(torch.uint8)
        sizes, group = (self._recv_bytes, self._send_bytes), self._axis.group
        return self._waits.begun(lambda: dist.all_to_all_single(recv, send, *sizes, group=group, async_op=not wait))


class CollectiveToHeads:
    """Exchanges all heads of this rank's tokens for its heads of all tokens: q, k, v as one slab (L, B, h + 2g, D)."""

    flags: Flags | None = None

    def __init__(self, axis: Axis, layout: HeadLayout) -> None:
        self._layout, self._rank = layout, axis.rank
        counts = [layout.counts(rank) for rank in range(axis.size)]
        mine = counts[axis.rank]
        self._move = AllToAll(
            axis,
            [(layout.tokens[axis.rank], layout.batch, h + 2 * g, layout.head_dim) for h, g in counts],
            [(tokens, layout.batch, mine[0] + 2 * mine[1], layout.head_dim) for tokens in layout.tokens],
            layout.dtype,
            layout.device,
        )
        self._boxes = Outboxes(self._box(rank, slab) for rank, slab in enumerate(self._move.outgoing))

    def _box(self, rank: int, slab: Tensor) -> Outbox:
        h, g = self._layout.counts(rank)
        q, k, v = slab.split((h, g, g), dim=2)
        return Outbox(q, k, v, self._layout.q_slice(rank), self._layout.kv_slice(rank))

    def outboxes(self) -> Outboxes:
        """Return where to write q, k and v: for each rank its heads of this rank's tokens."""
        return self._boxes

    def start(self) -> None:
        """Start to send q, k and v; the current stream does not wait."""
        self._move.start()

    def deliver(self, met: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Return q (B, L, h, D), k and v (B, L, g, D) as strided views of the received slab."""
        layout, (h, g) = self._layout, self._layout.counts(self._rank)
        slab = self._move.deliver().view(sum(layout.tokens), layout.batch, h + 2 * g, layout.head_dim)
        q, k, v = slab.transpose(0, 1).split((h, g, g), dim=2)
        return q, k, v


class CollectiveToTokens:
    """Exchanges this rank's heads of all tokens for all heads of its tokens, in the output of attention."""

    flags: Flags | None = None

    def __init__(self, axis: Axis, layout: HeadLayout) -> None:
        mine, tokens = layout.counts(axis.rank)[0], layout.tokens[axis.rank]
        counts = [layout.counts(rank)[0] for rank in range(axis.size)]
        self._move = AllToAll(
            axis,
            [(n, layout.batch, mine, layout.head_dim) for n in layout.tokens],
            [(tokens, layout.batch, h, layout.head_dim) for h in counts],
            layout.dtype,
            layout.device,
        )
        shape = (layout.batch, tokens, layout.heads, layout.head_dim)
        self._out = torch.empty(shape, dtype=layout.dtype, device=layout.device)
        self._boxes = Destinations(self._move.outgoing)
        places = (self._out[:, :, layout.q_slice(rank)].transpose(0, 1) for rank in range(axis.size))
        self._places = [Destinations([place]) for place in places]

    def outboxes(self) -> Destinations:
        """Return where to write the output: for each rank r this rank's heads of its tokens, (l_r, B, h, D)."""
        return self._boxes

    def deliver(self, met: bool = False) -> Tensor:
        """Return the output (B, l, H, D). One copy interleaves the ranks' heads; a collective cannot avoid it."""
        self._move.deliver()
        for slab, place in zip(self._move.incoming, self._places, strict=True):
            # `push` rather than copy_, because torch's copies of strided views are not vectorized
            push(slab.transpose(0, 1), place)
        return self._out


class CollectiveKeyValues:
    """Brings k and v of all tokens to every rank; q stays on its rank. Works with any number of heads."""

    flags: Flags | None = None

    def __init__(self, axis: Axis, layout: HeadLayout) -> None:
        self._groups = layout.kv_heads
        mine, rest = layout.tokens[axis.rank], (layout.batch, 2 * layout.kv_heads, layout.head_dim)
        # batch-major: attention's output follows q, and the output projection must see rows laid out as on one rank
        q_shape = (layout.batch, mine, layout.heads, layout.head_dim)
        self._q_BlHD = torch.empty(q_shape, dtype=layout.dtype, device=layout.device)
        self._gather = CollectiveGather(axis, layout.tokens, rest, self._q_BlHD)
        k, v = self._gather.outbox().split((self._groups, self._groups), dim=2)
        box = Outbox(
            self._q_BlHD.transpose(0, 1), k, v, heads=slice(0, layout.heads), kv_heads=slice(0, layout.kv_heads)
        )
        self._boxes = Outboxes([box])

    def outboxes(self) -> Outboxes:
        """Return where to write q, k and v of this rank's tokens: one outbox, which serves all ranks."""
        return self._boxes

    def start(self) -> None:
        """Start to send k and v; the current stream does not wait."""
        self._gather.start()

    def start_keys(self) -> None:
        """Send nothing yet: k travels with v, as one message to each rank."""

    def start_values(self) -> None:
        """Do what `start` does."""
        self.start()

    def deliver(self, met: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Return q (B, l, H, D) of this rank's tokens, k and v (B, L, G, D) of all; see `KeyValues.deliver`."""
        k, v = self._gather.deliver().transpose(0, 1).split((self._groups, self._groups), dim=2)
        return self._q_BlHD, k, v


def _views(flat: Tensor, shapes: list[tuple[int, ...]]) -> list[Tensor]:
    return [part.view(shape) for part, shape in zip(flat.split([prod(s) for s in shapes]), shapes, strict=True)]
