"""Sizes that a server makes a picture or video of before it is ready, so that nobody waits for their first one.

The first run of a size compiles kernels, sets up exchanges and captures graphs, and the first partial picture of a
model fits a map; later sizes do the same when they are asked for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from seqpar.mesh.mesh import Mesh
from seqpar.serve.messages import ImageRequest, size_of
from seqpar.serve.ranks.found import Found

OWN = "auto"
STEPS = 4  # a call is captured when it comes for the second time


def warming(found: Sequence[Found], sizes: Sequence[str]) -> dict[str, list[ImageRequest]]:
    """Return model -> orders of the sizes that it takes, before any weight is read.

    sizes: WIDTHxHEIGHT in pixels, or "auto" for the size of each model. Raises ValueError for one that no model takes.
    """
    orders: dict[str, list[ImageRequest]] = {each.name: [] for each in found}
    for text in dict.fromkeys(sizes):
        size, reasons = _parsed(text), list[str]()
        for each in found:
            shown = 0 if each.video else 1  # a partial picture, so that their map is fitted, too
            order = ImageRequest("", each.name, each.prompt, steps=STEPS, size=size, partial_images=shown)
            try:
                each.job(order, each.begun)
                orders[each.name].append(order)
            except ValueError as reason:
                reasons.append(str(reason))
        if len(reasons) == len(found):
            raise ValueError(f"got --warm {text}, which no model that is served takes: {'; '.join(reasons)}")
    return orders


def _parsed(text: str) -> tuple[int, int] | None:
    """Return height and width of WIDTHxHEIGHT, None for "auto"."""
    size = size_of(text)
    if size is None and text != OWN:
        raise ValueError(f"got --warm {text}, expected WIDTHxHEIGHT in pixels, such as 1024x768, or {OWN}")
    return size


def warm(mesh: Mesh, orders: Sequence[ImageRequest], make: Callable[[ImageRequest], object]) -> None:
    """Make what the orders ask for, on every rank; rank 0 prints the seconds of each. make: makes that of one."""
    for order in orders:
        start = time.perf_counter()
        make(order)
        if mesh.is_main:
            size = OWN if order.size is None else f"{order.size[1]}x{order.size[0]}"
            print(f"seqpar: {order.model} is warm for {size} after {time.perf_counter() - start:.1f} s", flush=True)
