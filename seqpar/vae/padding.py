"""Pads a strip: rows beyond it come from the neighbours, and at the outer edges from the mode of padding.

One tensor is allocated, the strip is copied into its middle, and the neighbours' rows arrive at its edges.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seqpar.vae.cut import Strip
from seqpar.vae.layout import memory_format

Pads = dict[int, tuple[int, int]]
"""Dim (counted from the end) -> how much is added before and after."""


def pad_strip(strip: Strip, x: Tensor, pads: Pads, mode: str = "constant", value: float = 0.0) -> Tensor:
    """Return a strip x padded along some dims. A mode other than constant, replicate and reflect is refused."""
    if mode not in ("constant", "replicate", "reflect"):
        strip.refuse(f"got padding of mode {mode!r}, expected constant, replicate or reflect")
    shape, cut = list(x.shape), strip.cut
    for dim, (before, after) in pads.items():
        shape[dim] += before + after
    padded = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=memory_format(x))
    lines = padded
    for dim, (before, _) in pads.items():
        if dim != cut.dim:
            lines = lines.narrow(dim, before, x.shape[dim])
    before, after = pads.get(cut.dim, (0, 0))
    lines.narrow(cut.dim, before, x.shape[cut.dim]).copy_(x)
    fill_halo(strip, lines, (before, after), mode, value)
    for dim, sides in pads.items():
        if dim != cut.dim:
            fill_edges(padded, dim, sides, mode, value)
    if before or after:
        strip.has_halo(padded)
    return padded


def fill_halo(strip: Strip, padded: Tensor, sides: tuple[int, int], mode: str = "constant", value: float = 0.0) -> None:
    """Write the edge rows of a padded strip whose inside is written: the neighbours' rows, or the outer padding."""
    cut, (before, after) = strip.cut, sides
    if not (before or after):
        return
    size = padded.shape[cut.dim] - before - after
    if min(cut.shares(size)) < max(before, after):
        strip.refuse(f"got strips of {min(cut.shares(size))} rows, expected at least {max(before, after)}")
    strip.exchanges.swap(
        first=edge(strip, padded, before, after) if not cut.first else None,
        last=edge(strip, padded, size, before) if not cut.last else None,
        before=edge(strip, padded, 0, before) if not cut.first else None,
        after=edge(strip, padded, before + size, after) if not cut.last else None,
    )
    fill_edges(padded, cut.dim, sides, mode, value, (cut.first, cut.last))


def edge(strip: Strip, x: Tensor, start: int, count: int) -> Tensor | None:
    """Return some rows of x, with their dims in the order in which they travel; None for no rows."""
    if not count:
        return None
    rows = x.narrow(strip.cut.dim, start, count)
    return rows.movedim(1, -1) if strip.channels_last else rows


def fill_edges(
    padded: Tensor, dim: int, sides: tuple[int, int], mode: str, value: float, which: tuple[bool, bool] = (True, True)
) -> None:
    """Write what a mode of padding puts before and after the inside of `padded` along a dim.

    which: whether to write before, and after.
    """
    before, after = sides[0] * which[0], sides[1] * which[1]
    end = padded.shape[dim] - sides[1]
    if mode == "constant":
        padded.narrow(dim, 0, before).fill_(value)
        padded.narrow(dim, end, after).fill_(value)
        return
    for step in range(before):
        source = sides[0] + (step + 1 if mode == "reflect" else 0)
        padded.narrow(dim, sides[0] - 1 - step, 1).copy_(padded.narrow(dim, source, 1))
    for step in range(after):
        source = end - 1 - (step + 1 if mode == "reflect" else 0)
        padded.narrow(dim, end + step, 1).copy_(padded.narrow(dim, source, 1))
