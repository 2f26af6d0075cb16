"""What the strips of one VAE tell each other: edge rows, sums of norms, keys and values.

Exchanges are made at the first use of a shape and kept, so that a CUDA graph may replay them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seqpar.mesh.mesh import Axis
from seqpar.transports._contract import Gather, Halo, Transport
from seqpar.transports.collective.point_to_point import CollectiveGather


class Exchanges:
    """Exchanges between the ranks of an axis, all of which make the same calls in the same order."""

    def __init__(self, axis: Axis, transport: Transport) -> None:
        self._axis, self._transport = axis, transport
        self._gathers: dict[tuple[object, ...], Gather] = {}
        self._halos: dict[tuple[object, ...], Halo] = {}

    def swap(self, first: Tensor | None, last: Tensor | None, before: Tensor | None, after: Tensor | None) -> None:
        """Send `first` to the rank before and `last` to the rank after; write what they sent to `before`, `after`.

        See `seqpar.transports._exchanges.Halo.swap`; all ranks call, in the same order, with blocks of any size.
        """
        blocks = [block for block in (first, last, before, after) if block is not None]
        if self._axis.size == 1 or not blocks:
            return
        # one exchange for all sizes between two powers of two: their buffers are small, and a CUDA graph keeps them
        capacity = 1 << (max(block.numel() for block in blocks) - 1).bit_length()
        key = (capacity, blocks[0].dtype, blocks[0].device)
        if key not in self._halos:
            self._halos[key] = self._transport.halo(self._axis, capacity, blocks[0])
        self._halos[key].swap(first, last, before, after)

    def every(self, block: Tensor) -> Tensor:
        """Return the blocks of all ranks, stacked in a new first dim; valid until the next call with this shape."""
        key = (block.shape, block.dtype, block.device)
        if key not in self._gathers:
            sizes = (1,) * self._axis.size
            with torch.inference_mode(False):  # buffers outlive the caller's mode
                self._gathers[key] = self._transport.gather(self._axis, sizes, tuple(block.shape), block)
        gather = self._gathers[key]
        gather.outbox()[0].copy_(block)
        return gather.deliver()

    def tokens(self, sizes: tuple[int, ...], shape: tuple[int, ...], like: Tensor) -> Gather:
        """Return a gather of blocks (sizes[r], *shape) for one use; it is not kept, as it can exceed a layer."""
        return CollectiveGather(self._axis, sizes, shape, like)

    def release(self) -> None:
        """Free the buffers of all exchanges; every rank must call this."""
        self._gathers.clear()
        self._halos.clear()
        self._transport.release()
