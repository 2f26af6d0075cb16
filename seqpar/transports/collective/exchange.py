"""The exchanges of attention by collectives: tokens sharded -> heads sharded (q, k and v in ONE all-to-all), and back;
keys and values to all.

Source: DeepSpeed-Ulysses (arXiv 2309.14509), which uses three all-to-alls in and one out, and needs even counts. Here
sizes come from `Shard`, so uneven tokens and heads are the same path. Buffers belong to the exchange and are reused:
what `deliver` returns is valid until its next call.
"""

from __future__ import annotations

from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from seqpar.kernels.flags import Flags
from seqpar.kernels.push import Destinations, push
from seqpar.mesh import Axis
from seqpar.outboxes import Outbox, Outboxes
from seqpar.transports._layout import HeadLayout
from seqpar.transports.collective.point_to_point import CollectiveGather


class AllToAll:
    """One slab to, and one from, every rank of an axis; two flat buffers, slabs of any shape, one collective."""

    def __init__(
        self,
        axis: Axis,
        send_shapes: list[tuple[int, ...]],
        recv_shapes: list[tuple[int, ...]],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._axis = axis
        self._send_bytes = [prod(shape) * dtype.itemsize for shape in send_shapes]
        self._recv_bytes = [prod(shape) * dtype.itemsize for shape in recv_shapes]
        self._send = torch.empty(sum(map(prod, send_shapes)), dtype=dtype, device=device)
        # alone, what is written is what is read
        self._recv = self._send if axis.size == 1 else self._send.new_empty(sum(map(prod, recv_shapes)))
        self.outgoing = _views(self._send, send_shapes)
        self.incoming = _views(self._recv, recv_shapes)

    def deliver(self) -> Tensor:
        """Exchange, and return all that came in as one flat tensor, ordered by the rank it came from."""
        if self._axis.size > 1:
            # as bytes: one path for every dtype, also those a backend does not know
            recv, send = self._recv.view(torch.uint8), self._send.view(torch.uint8)
            dist.all_to_all_single(recv, send, self._recv_bytes, self._send_bytes, group=self._axis.group)
        return self._recv


class CollectiveToHeads:
    """q, k, v: all heads of my tokens -> my heads of all tokens, as one slab (L, B, h + 2g, D)."""

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
        """Where to write each rank's heads of my tokens."""
        return self._boxes

    def deliver(self, met: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """q (B, L, h, D), k and v (B, L, g, D): strided views of the received slab."""
        layout, (h, g) = self._layout, self._layout.counts(self._rank)
        slab = self._move.deliver().view(sum(layout.tokens), layout.batch, h + 2 * g, layout.head_dim)
        q, k, v = slab.transpose(0, 1).split((h, g, g), dim=2)
        return q, k, v


class CollectiveToTokens:
    """Attention output: my heads of all tokens -> all heads of my tokens."""

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
        """Where to write my heads of each rank's tokens, (l_r, B, h, D) each."""
        return self._boxes

    def deliver(self, met: bool = False) -> Tensor:
        """(B, l, H, D). Interleaving the heads of the ranks is the one copy that a collective cannot avoid."""
        self._move.deliver()
        for slab, place in zip(self._move.incoming, self._places, strict=True):
            # not copy_: torch's copies of strided views are not vectorized
            push(slab.transpose(0, 1), place)
        return self._out


class CollectiveKeyValues:
    """k and v of all tokens on every rank; q stays. No rule about heads."""

    flags: Flags | None = None

    def __init__(self, axis: Axis, layout: HeadLayout) -> None:
        self._groups = layout.kv_heads
        mine, rest = layout.tokens[axis.rank], (layout.batch, 2 * layout.kv_heads, layout.head_dim)
        # batch-major, because attention's output follows it: what projects that must find rows as on one rank
        q_shape = (layout.batch, mine, layout.heads, layout.head_dim)
        self._q_BlHD = torch.empty(q_shape, dtype=layout.dtype, device=layout.device)
        self._gather = CollectiveGather(axis, layout.tokens, rest, self._q_BlHD)
        k, v = self._gather.outbox().split((self._groups, self._groups), dim=2)
        box = Outbox(
            self._q_BlHD.transpose(0, 1), k, v, heads=slice(0, layout.heads), kv_heads=slice(0, layout.kv_heads)
        )
        self._boxes = Outboxes([box])

    def outboxes(self) -> Outboxes:
        """Where to write q, k and v of my tokens: once, for all."""
        return self._boxes

    def start_keys(self) -> None:
        """Nothing leaves yet: k goes with v, one message to a rank."""

    def start_values(self) -> None:
        """Send k and v while this rank goes on."""
        self._gather.start()

    def deliver(self, met: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """q (B, l, H, D) of my tokens, k and v (B, L, G, D) of all; valid until the next call of `outboxes`."""
        k, v = self._gather.deliver().transpose(0, 1).split((self._groups, self._groups), dim=2)
        return self._q_BlHD, k, v


def _views(flat: Tensor, shapes: list[tuple[int, ...]]) -> list[Tensor]:
    return [part.view(shape) for part, shape in zip(flat.split([prod(s) for s in shapes]), shapes, strict=True)]
