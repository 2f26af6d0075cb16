"""A transport for tests that delays every message by a random time and poisons a buffer as soon as it may not be read.

It shows that a new transport is one file, and it detects strategies that read or write at the wrong time.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from seqpar.kernels.flags import Flags
from seqpar.kernels.push import Destinations
from seqpar.mesh.mesh import Axis, Mesh
from seqpar.transports import _contract
from seqpar.transports._exchanges import Gather, Halo, HeadLayout, KeyValues, Rotation, ToHeads, ToTokens
from seqpar.types.outboxes import Outbox, Outboxes

FACTS = _contract.Facts(rates={"cuda": "nccl", "cpu": "gloo"})  # `auto` never picks it
LONGEST_S = 0.003


def why_not(mesh: Mesh) -> str | None:
    return None


def why_not_tried(axis: Axis, device: torch.device) -> str | None:
    return None


def poison(*tensors: Tensor) -> None:
    """Fill the tensors with values that make a later read visible."""
    for tensor in tensors:
        whole = tensor.dtype == torch.bool or not (tensor.is_floating_point() or tensor.is_complex())
        tensor.fill_(float("nan") if not whole else 1 if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).max)


def swap(axis: Axis, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
    """Send outgoing[r] to rank r and receive incoming[r] from it after a delay; then poison what was sent."""
    begun(axis, outgoing, incoming)()


def begun(axis: Axis, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> Callable[[], None]:
    """Do the same, but return a function that waits for what is received, and until then wait for no rank."""
    time.sleep(random.random() * LONGEST_S)
    # a tensor of one element may count as contiguous with any stride, which a view as bytes does not take
    sent = [tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8) for tensor in outgoing]
    got = [torch.empty(t.numel() * t.element_size(), dtype=torch.uint8, device=t.device) for t in incoming]
    got[axis.rank].copy_(sent[axis.rank])
    moves = []
    for rank in range(axis.size):
        if rank != axis.rank and sent[rank].numel():
            moves.append(dist.P2POp(dist.isend, sent[rank], group=axis.group, group_peer=rank))
        if rank != axis.rank and got[rank].numel():
            moves.append(dist.P2POp(dist.irecv, got[rank], group=axis.group, group_peer=rank))
    begun_moves = dist.batch_isend_irecv(moves) if moves else []
    poison(*outgoing)

    def finish() -> None:
        for move in begun_moves:
            move.wait()
        assert len(sent) == axis.size  # which must live as long as they are sent
        for tensor, new in zip(incoming, got, strict=True):
            tensor.copy_(new.view(tensor.dtype).view(tensor.shape))

    return finish


class DelayedToHeads:
    """Sends q, k, v to the ranks of their heads, as (tokens, B, h + 2 g, D) to and from each rank."""

    flags: Flags | None = None

    def __init__(self, axis: Axis, layout: HeadLayout) -> None:
        self._axis, self._split = axis, [*layout.counts(axis.rank), layout.counts(axis.rank)[1]]
        like = torch.empty(0, dtype=layout.dtype, device=layout.device)
        batch, dim, boxes = layout.batch, layout.head_dim, []
        self._outgoing = []
        for rank, (h, g) in enumerate(map(layout.counts, range(axis.size))):
            self._outgoing.append(like.new_empty(layout.tokens[axis.rank], batch, h + 2 * g, dim))
            q, k, v = self._outgoing[-1].split((h, g, g), dim=2)
            boxes.append(Outbox(q, k, v, layout.q_slice(rank), layout.kv_slice(rank)))
        self._boxes = Outboxes(boxes)
        self._slab = like.new_empty(sum(layout.tokens), batch, sum(self._split), dim)
        self._incoming = self._slab.split(layout.tokens)
        self._finish: Callable[[], None] | None = None

    def outboxes(self) -> Outboxes:
        self._finish = None
        poison(*self._outgoing, self._slab)
        return self._boxes

    def start(self) -> None:
        self._finish = begun(self._axis, self._outgoing, self._incoming)

    def deliver(self, met: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        (self._finish or begun(self._axis, self._outgoing, self._incoming))()
        q, k, v = self._slab.transpose(0, 1).split(self._split, dim=2)
        return q, k, v


class DelayedToTokens:
    """Sends attention's output to the ranks of its tokens."""

    flags: Flags | None = None

    def __init__(self, axis: Axis, layout: HeadLayout) -> None:
        self._axis, mine = axis, layout.tokens[axis.rank]
        batch, dim, heads = layout.batch, layout.head_dim, layout.counts(axis.rank)[0]
        like = torch.empty(0, dtype=layout.dtype, device=layout.device)
        self._out = like.new_empty(batch, mine, layout.heads, dim)
        self._boxes = Destinations([like.new_empty(tokens, batch, heads, dim) for tokens in layout.tokens])
        self._incoming = [self._out[:, :, layout.q_slice(rank)].transpose(0, 1) for rank in range(axis.size)]

    def outboxes(self) -> Destinations:
        poison(*self._boxes, self._out)
        return self._boxes

    def deliver(self, met: bool = False) -> Tensor:
        swap(self._axis, self._boxes, self._incoming)
        return self._out


class DelayedKeyValues:
    """Sends keys and values to all ranks; the outbox is poisoned as soon as they are started."""

    flags: Flags | None = None

    def __init__(self, axis: Axis, layout: HeadLayout) -> None:
        self._axis, self._finish = axis, dict[int, Callable[[], None]]()
        like = torch.empty(0, dtype=layout.dtype, device=layout.device)
        shape = layout.batch, layout.kv_heads, layout.head_dim
        self._q = like.new_empty(layout.batch, layout.tokens[axis.rank], layout.heads, layout.head_dim)
        self._mine = [like.new_empty(layout.tokens[axis.rank], *shape) for _ in range(2)]
        self._all = [like.new_empty(sum(layout.tokens), *shape) for _ in range(2)]
        self._tokens = layout.tokens
        (k, v), heads, kv_heads = self._mine, slice(0, layout.heads), slice(0, layout.kv_heads)
        self._boxes = Outboxes([Outbox(self._q.transpose(0, 1), k, v, heads, kv_heads)])

    def outboxes(self) -> Outboxes:
        self._finish.clear()
        poison(self._q, *self._mine, *self._all)
        return self._boxes

    def start(self) -> None:
        self._start(0)
        self._start(1)

    def start_keys(self) -> None:
        self._start(0)

    def start_values(self) -> None:
        self._start(1)

    def _start(self, part: int) -> None:
        outgoing = [self._mine[part].clone() for _ in self._tokens]
        self._finish[part] = begun(self._axis, outgoing, self._all[part].split(self._tokens))
        poison(self._mine[part])

    def deliver(self, met: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        for part in range(2):
            if part not in self._finish:
                self._start(part)
            self._finish.pop(part)()
        k, v = (whole.transpose(0, 1) for whole in self._all)
        return self._q, k, v


class DelayedRotation:
    """Passes blocks around an axis; a block that was passed on is poisoned."""

    def __init__(self, axis: Axis, sizes: tuple[int, ...], shape: tuple[int, ...], like: Tensor) -> None:
        self._axis, self._sizes, self._shape = axis, sizes, shape
        self._mine = like.new_empty(sizes[axis.rank], *shape)

    def outbox(self) -> Tensor:
        poison(self._mine)
        return self._mine

    def rotate(self) -> Iterator[tuple[int, Tensor]]:
        count, block, nothing = self._axis.size, self._mine.clone(), self._mine[:0]
        after, before = (self._axis.rank + 1) % count, (self._axis.rank - 1) % count
        poison(self._mine)
        for step in range(count):
            yield (self._axis.rank - step) % count, block
            if step + 1 < count:
                following = block.new_empty(self._sizes[(before - step) % count], *self._shape)
                outgoing = [block if rank == after else nothing for rank in range(count)]
                swap(self._axis, outgoing, [following if rank == before else nothing for rank in range(count)])
                block = following


class DelayedGather:
    """Gathers every rank's block on every rank."""

    def __init__(self, axis: Axis, sizes: tuple[int, ...], shape: tuple[int, ...], like: Tensor) -> None:
        self._axis, self._sizes = axis, sizes
        self._mine, self._whole = like.new_empty(sizes[axis.rank], *shape), like.new_empty(sum(sizes), *shape)

    def outbox(self) -> Tensor:
        poison(self._mine, self._whole)
        return self._mine

    def deliver(self) -> Tensor:
        swap(self._axis, [self._mine.clone() for _ in self._sizes], self._whole.split(self._sizes))
        return self._whole


class DelayedHalo:
    """Swaps edges with the neighbours; the places of what arrives are poisoned until then."""

    def __init__(self, axis: Axis, like: Tensor) -> None:
        self._axis, self._nothing = axis, like.new_empty(0)

    def swap(self, first: Tensor | None, last: Tensor | None, before: Tensor | None, after: Tensor | None) -> None:
        outgoing, incoming = ([self._nothing] * self._axis.size for _ in range(2))
        for step, mine, theirs in ((-1, first, before), (1, last, after)):
            if mine is not None:
                outgoing[self._axis.rank + step] = mine.clone()
            if theirs is not None:
                poison(theirs)
                incoming[self._axis.rank + step] = theirs
        swap(self._axis, outgoing, incoming)


class Transport(_contract.Transport):
    """The transport that the module's docstring describes."""

    def _heads(self, axis: Axis, layout: HeadLayout) -> tuple[ToHeads, ToTokens]:
        return DelayedToHeads(axis, layout), DelayedToTokens(axis, layout)

    def _key_values(self, axis: Axis, layout: HeadLayout, overlap: bool) -> KeyValues:
        return DelayedKeyValues(axis, layout)

    def _ring(self, axis: Axis, sizes: tuple[int, ...], shape: tuple[int, ...], like: Tensor) -> Rotation:
        return DelayedRotation(axis, sizes, shape, like)

    def _gather(self, axis: Axis, sizes: tuple[int, ...], shape: tuple[int, ...], like: Tensor) -> Gather:
        return DelayedGather(axis, sizes, shape, like)

    def _halo(self, axis: Axis, capacity: int, like: Tensor) -> Halo:
        return DelayedHalo(axis, like)
