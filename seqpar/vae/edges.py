"""Convolves a strip without a padded copy of it: the whole strip first, then its edge rows again.

The strip is convolved as it lies, with zeros beyond its edges, while the neighbours' rows travel. The few output rows
that need them are then computed from slabs: the rows that arrived, and the strip's own rows beside them.
When it wins: with strips of many rows, where a padded copy would cost memory and a pass over the strip.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from seqpar.vae.cut import Strip
from seqpar.vae.layout import memory_format
from seqpar.vae.padding import edge

LEAST = 8  # rows of a strip for each row of padding: with fewer, slabs are as large as the strip


def fits(strip: Strip, x: Tensor, pad: int, reach: int, stride: int) -> bool:
    """Return whether a convolution keeps the rows of the strip, and whether most of them need no neighbour.

    reach: rows of the kernel less one. Each rank may decide for itself: its neighbours send and get the same rows.
    """
    return stride == 1 and reach == 2 * pad and x.shape[strip.cut.dim] >= LEAST * pad


def convolve(strip: Strip, x: Tensor, pad: int, apply: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Return the convolution of a strip x with `pad` rows of its neighbours on both sides, or zeros at the outer edges.

    apply: the convolution of a tensor with so many rows of zeros on both sides.
    """
    cut, n, rows = strip.cut, len(x), x.shape[strip.cut.dim]
    slabs = _slabs(strip, x, pad)
    blocks = {
        "first": None if cut.first else edge(strip, x, 0, pad),
        "last": None if cut.last else edge(strip, x, rows - pad, pad),
        "before": None if cut.first else edge(strip, slabs[:n], 0, pad),
        "after": None if cut.last else edge(strip, slabs[n:], 2 * pad, pad),
    }
    with _travelling(strip, blocks):
        out = apply(x, pad)
    edges = apply(slabs[n * cut.first : n * (2 - cut.last)], 0)
    if not cut.first:
        out.narrow(cut.dim, 0, pad).copy_(edges[:n])
    if not cut.last:
        out.narrow(cut.dim, rows - pad, pad).copy_(edges[-n:])
    return out


def _slabs(strip: Strip, x: Tensor, pad: int) -> Tensor:
    """Return room for the rows before the strip and its first rows, and for its last rows and those after it.

    Both lie one after the other in the dim of the batch. The strip's own rows are written.
    """
    dim, n, rows = strip.cut.dim, len(x), x.shape[strip.cut.dim]
    shape = [2 * n, *x.shape[1:]]
    shape[dim] = 3 * pad
    slabs = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=memory_format(x))
    slabs[:n].narrow(dim, pad, 2 * pad).copy_(x.narrow(dim, 0, 2 * pad))
    slabs[n:].narrow(dim, 0, 2 * pad).copy_(x.narrow(dim, rows - 2 * pad, 2 * pad))
    return slabs


@contextmanager
def _travelling(strip: Strip, blocks: dict[str, Tensor | None]) -> Iterator[None]:
    """While it is entered edges are swapped, beside the current stream if the strip has a stream for it.

    At its end they have arrived. The current stream waits for them after an error, too: else the memory of strip and
    slabs would be given to others while the side stream still uses it.
    """
    side = strip.side
    if side is None:
        strip.exchanges.swap(**blocks)
        yield
        return
    here = torch.cuda.current_stream()
    side.wait_stream(here)
    try:
        with torch.cuda.stream(side):
            strip.exchanges.swap(**blocks)
        yield
    finally:
        here.wait_stream(side)
