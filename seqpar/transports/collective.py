"""Collectives of torch.distributed: NCCL between GPUs, gloo between CPUs. They work everywhere, also between machines.

One all-to-all takes q, k and v from sharded tokens to sharded heads, another takes the output back (DeepSpeed-Ulysses,
arXiv 2309.14509, uses three and one, and needs even counts). Gathers, rings and halos are groups of sends and receives
into views of buffers that are made once; gloo's `all_gather` rejects uneven sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from functools import partial
from math import prod
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from seqpar.kernels.flags import Flags
from seqpar.kernels.push import Destinations, push
from seqpar.mesh.mesh import Axis, Mesh
from seqpar.transports import _contract
from seqpar.transports._exchanges import Gather, Halo, HeadLayout, KeyValues, Rotation, ToHeads, ToTokens
from seqpar.types.outboxes import Outbox, Outboxes

T = TypeVar("T")


class Waits:
    """Starts an exchange and waits for it: by gloo on the host until the deadline, by NCCL on the device.

    Raises TimeoutError with the late rank; for NCCL the watchdog does (`seqpar.mesh.watch`). what: for the error.
    """

    def __init__(self, axis: Axis, what: str, device: torch.device) -> None:
        self._watch, self._ranks = axis.watch, axis.ranks
        self._what = f"axis {axis.name}, {what}"
        self.on_host = self._watch is not None and device.type != "cuda"

    def begun(self, start: Callable[[], T]) -> T:
        if self._watch is None:
            return start()
        with self._watch.context(self._what, self._ranks):
            return start()

    def end(self, works: Iterable[dist.Work]) -> None:
        """Wait for all works; by NCCL the current stream waits, not the host."""
        for work in works:
            if self._watch is not None and self.on_host:
                self.begun(partial(work.wait, timedelta(seconds=self._watch.limit_s)))
            else:
                self.begun(work.wait)


class AllToAll:
    """One collective that sends a slab of any shape to every rank and receives one from each, in two flat buffers."""

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
        self._work = self._exchange(wait=False)

    def deliver(self) -> Tensor:
        """Return the received slabs as one flat tensor, in rank order."""
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
        return self._boxes

    def start(self) -> None:
        self._move.start()

    def deliver(self, met: bool = False) -> tuple[Tensor, Tensor, Tensor]:
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
            layout.out_dtype,
            layout.device,
        )
        shape = (layout.batch, tokens, layout.heads, layout.head_dim)
        self._out = torch.empty(shape, dtype=layout.out_dtype, device=layout.device)
        self._boxes = Destinations(self._move.outgoing)
        places = (self._out[:, :, layout.q_slice(rank)].transpose(0, 1) for rank in range(axis.size))
        self._places = [Destinations([place]) for place in places]

    def outboxes(self) -> Destinations:
        return self._boxes

    def deliver(self, met: bool = False) -> Tensor:
        self._move.deliver()
        # one copy interleaves the heads of the ranks; a collective cannot avoid it
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
        return self._boxes

    def start(self) -> None:
        self._gather.start()

    def start_keys(self) -> None:
        """Send nothing yet: k and v are one message to each rank."""

    def start_values(self) -> None:
        self.start()

    def deliver(self, met: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        k, v = self._gather.deliver().transpose(0, 1).split((self._groups, self._groups), dim=2)
        return self._q_BlHD, k, v


class CollectiveRotation:
    """Passes one block per rank around an axis. A rank has two blocks: one is sent while the other is read."""

    def __init__(self, axis: Axis, sizes: tuple[int, ...], shape: tuple[int, ...], like: Tensor) -> None:
        self._axis, self._sizes = axis, sizes
        self._waits = Waits(axis, f"blocks of a ring of {sum(sizes)} tokens", like.device)
        count = 1 if axis.size == 1 else 2
        self._blocks = [like.new_empty((max(sizes), *shape)) for _ in range(count)]

    def outbox(self) -> Tensor:
        return self._blocks[0][: self._sizes[self._axis.rank]]

    def rotate(self) -> Iterator[tuple[int, Tensor]]:
        here, there = self._blocks[0], self._blocks[-1]
        for step in range(self._axis.size):
            owner = self._owner(step)
            block = here[: self._sizes[owner]]
            last = step + 1 == self._axis.size
            moves = [] if last else self._pass_on(block, there[: self._sizes[self._owner(step + 1)]])
            yield owner, block
            self._waits.end(moves)
            here, there = there, here

    def _owner(self, step: int) -> int:
        return (self._axis.rank - step) % self._axis.size

    def _pass_on(self, block: Tensor, room: Tensor) -> list[dist.Work]:
        after, before = (self._axis.rank + 1) % self._axis.size, (self._axis.rank - 1) % self._axis.size
        moves = [
            dist.P2POp(dist.isend, _bytes(block), group=self._axis.group, group_peer=after),
            dist.P2POp(dist.irecv, _bytes(room), group=self._axis.group, group_peer=before),
        ]
        return self._waits.begun(lambda: dist.batch_isend_irecv(moves))


class CollectiveGather:
    """Brings every rank's block to every rank, into one tensor (sum(sizes), *shape)."""

    def __init__(self, axis: Axis, sizes: tuple[int, ...], shape: tuple[int, ...], like: Tensor) -> None:
        self._axis = axis
        self._waits = Waits(axis, f"a gather of {sum(sizes)} rows", like.device)
        self._whole = like.new_empty((sum(sizes), *shape))
        self._slots = self._whole.split(sizes)
        self._moves: list[dist.Work] | None = None

    def outbox(self) -> Tensor:
        return self._slots[self._axis.rank]

    def start(self) -> None:
        peers = [(self._axis.rank + step) % self._axis.size for step in range(1, self._axis.size)]
        mine, group = _bytes(self.outbox()), self._axis.group
        moves = []
        for peer in peers:
            if mine.numel():
                moves.append(dist.P2POp(dist.isend, mine, group=group, group_peer=peer))
            if self._slots[peer].numel():
                moves.append(dist.P2POp(dist.irecv, _bytes(self._slots[peer]), group=group, group_peer=peer))
        self._moves = self._waits.begun(lambda: dist.batch_isend_irecv(moves)) if moves else []

    def deliver(self) -> Tensor:
        if self._moves is None:
            self.start()
        moves, self._moves = self._moves, None
        self._waits.end(moves or ())
        return self._whole


class CollectiveHalo:
    """Swaps edges with the neighbours in one group of at most two sends and two receives.

    Contiguous blocks are sent and received in place, others through one of four buffers of the capacity.
    """

    def __init__(self, axis: Axis, capacity: int, like: Tensor) -> None:
        self._group = axis.group
        self._waits = Waits(axis, "edges of neighbours", like.device)
        self._sides = [
            (neighbour, like.new_empty(capacity), like.new_empty(capacity)) if 0 <= neighbour < axis.size else None
            for neighbour in (axis.rank - 1, axis.rank + 1)
        ]

    def swap(self, first: Tensor | None, last: Tensor | None, before: Tensor | None, after: Tensor | None) -> None:
        moves, late = [], []
        for side, outgoing, incoming in zip(self._sides, (first, last), (before, after), strict=True):
            if side is None:
                continue
            neighbour, send, receive = side
            if outgoing is not None and outgoing.numel():
                block = _packed(outgoing, send)
                moves.append(dist.P2POp(dist.isend, _bytes(block), group=self._group, group_peer=neighbour))
            if incoming is not None and incoming.numel():
                room = incoming if incoming.is_contiguous() else receive[: incoming.numel()].view(incoming.shape)
                moves.append(dist.P2POp(dist.irecv, _bytes(room), group=self._group, group_peer=neighbour))
                if room is not incoming:
                    late.append((incoming, room))
        self._waits.end(self._waits.begun(lambda: dist.batch_isend_irecv(moves)) if moves else ())
        for incoming, room in late:
            incoming.copy_(room)


def gather(block: Tensor, axis: Axis, sizes: tuple[int, ...], dim: int = 0) -> Tensor:
    """Gather blocks once, along any dim, into a new tensor."""
    first = block.movedim(dim, 0)
    exchange = CollectiveGather(axis, sizes, tuple(first.shape[1:]), block)
    exchange.outbox().copy_(first)
    return exchange.deliver().movedim(0, dim)


def _packed(block: Tensor, buffer: Tensor) -> Tensor:
    return block if block.is_contiguous() else buffer[: block.numel()].view(block.shape).copy_(block)


def _bytes(block: Tensor) -> Tensor:
    return block.flatten().view(torch.uint8)


def _views(flat: Tensor, shapes: list[tuple[int, ...]]) -> list[Tensor]:
    return [part.view(shape) for part, shape in zip(flat.split([prod(s) for s in shapes]), shapes, strict=True)]


def bare(axis: Axis, nbytes: int, device: torch.device) -> Callable[[], object]:
    """Return a function that sends `nbytes` to each rank in one all-to-all and does nothing else."""
    send = torch.ones(nbytes * axis.size, dtype=torch.uint8, device=device)
    receive = torch.empty_like(send)
    return lambda: dist.all_to_all_single(receive, send, group=axis.group)


FACTS = _contract.Facts(rates={"cuda": "nccl", "cpu": "gloo"}, unasked={"cuda": "NCCL", "cpu": "gloo"}, bare=bare)


def why_not(mesh: Mesh) -> str | None:
    return None


def why_not_tried(axis: Axis, device: torch.device) -> str | None:
    return None


class Transport(_contract.Transport):
    """Makes exchanges by collectives. The process group sets deadlines."""

    def _heads(self, axis: Axis, layout: HeadLayout) -> tuple[ToHeads, ToTokens]:
        return CollectiveToHeads(axis, layout), CollectiveToTokens(axis, layout)

    def _key_values(self, axis: Axis, layout: HeadLayout, overlap: bool) -> KeyValues:
        return CollectiveKeyValues(axis, layout)

    def _ring(self, axis: Axis, sizes: tuple[int, ...], shape: tuple[int, ...], like: Tensor) -> Rotation:
        return CollectiveRotation(axis, sizes, shape, like)

    def _gather(self, axis: Axis, sizes: tuple[int, ...], shape: tuple[int, ...], like: Tensor) -> Gather:
        return CollectiveGather(axis, sizes, shape, like)

    def _halo(self, axis: Axis, capacity: int, like: Tensor) -> Halo:
        return CollectiveHalo(axis, capacity, like)
