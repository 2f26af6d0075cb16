"""What the strips of one VAE tell each other: edge rows, sums of norms, keys and values.

Exchanges are made at the first use of a shape and kept, so that a CUDA graph may replay them. A computation that runs
several strips on one device gives `Place` an object with the same four methods.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from seqpar.mesh import Axis
from seqpar.transports._contract import Gather, Transport
from seqpar.transports.collective.point_to_point import CollectiveGather


class Exchanges(Protocol):
    """What `Place` asks for. All ranks make the same calls in the same order."""

    def swap(self, first: Tensor | None, last: Tensor | None, before: Tensor | None, after: Tensor | None) -> None:
        """Send `first` to the rank before and `last` to the rank after; write what they sent to `before`, `after`.

        `before` has the shape of the previous rank's `last`, `after` that of the next rank's `first`. They may be
        strided views. None: nothing moves in that direction, on either side; the first rank has no `before` and the
        last one no `after`, and what they give as `first` and `last` is not sent.
        """
        ...

    def every(self, block: Tensor) -> Tensor:
        """Return the blocks of all ranks, stacked in a new first dim; valid until the next call with this shape."""
        ...

    def tokens(self, sizes: tuple[int, ...], shape: tuple[int, ...], like: Tensor) -> Gather:
        """Return a gather of blocks (sizes[r], *shape) for one use."""
        ...


class TransportExchanges:
    """`Exchanges` between the ranks of an axis."""

    def __init__(self, axis: Axis, transport: Transport) -> None:
        self._axis, self._transport = axis, transport
        self._gathers: dict[tuple[object, ...], Gather] = {}

    def swap(self, first: Tensor | None, last: Tensor | None, before: Tensor | None, after: Tensor | None) -> None:
        """See `Exchanges.swap`."""
        for ours, theirs, step in ((last, before, -1), (first, after, 1)):
            block = theirs if ours is None else ours
            if block is None:
                continue
            every = self.every(torch.zeros_like(block) if ours is None else ours)
            if theirs is not None:
                theirs.copy_(every[self._axis.rank + step])

    def every(self, block: Tensor) -> Tensor:
        """See `Exchanges.every`."""
        key = (block.shape, block.dtype, block.device)
        if key not in self._gathers:
            sizes = (1,) * self._axis.size
            self._gathers[key] = self._transport.gather(self._axis, sizes, tuple(block.shape), block)
        gather = self._gathers[key]
        gather.outbox()[0].copy_(block)
        return gather.deliver()

    def tokens(self, sizes: tuple[int, ...], shape: tuple[int, ...], like: Tensor) -> Gather:
        """See `Exchanges.tokens`. The buffers are not kept, because they can be larger than a layer."""
        return CollectiveGather(self._axis, sizes, shape, like)

    def release(self) -> None:
        """Free the buffers of all exchanges; every rank must call this."""
        self._gathers.clear()
        self._transport.release()
