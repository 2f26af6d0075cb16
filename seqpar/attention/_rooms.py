"""Memory for keys and values in another order than that in which they arrive (`_by_stream.py`, `_by_padding.py`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from seqpar.kernels.push import Destinations, push


class Rooms:
    """Brings k and v into another order, by one kernel each.

    It owns memory for each shape, which the next call overwrites. places: where the tokens that arrive belong, one
    slice after the other.
    """

    def __init__(self, places: Sequence[slice]) -> None:
        self._places = places
        self._kept: dict[tuple[object, ...], list[tuple[Tensor, Destinations]]] = {}

    def ordered(self, k_BLGD: Tensor, v_BLGD: Tensor) -> tuple[Tensor, Tensor]:
        """Return k and v in their places."""
        rooms = self._like(k_BLGD)
        for x, (_, into) in zip((k_BLGD, v_BLGD), rooms, strict=True):
            push(x, into)
        return rooms[0][0], rooms[1][0]

    def _like(self, k_BLGD: Tensor) -> list[tuple[Tensor, Destinations]]:
        kind = (k_BLGD.shape, k_BLGD.dtype, k_BLGD.device)
        if kind not in self._kept:
            with torch.inference_mode(False):  # buffers outlive the caller's mode
                rooms = [torch.empty(k_BLGD.shape, dtype=k_BLGD.dtype, device=k_BLGD.device) for _ in range(2)]
            self._kept[kind] = [(room, self._destinations(room)) for room in rooms]
        return self._kept[kind]

    def _destinations(self, room_BLGD: Tensor) -> Destinations:
        room_LBGD = room_BLGD.transpose(0, 1)
        return Destinations([room_LBGD[place] for place in self._places])
