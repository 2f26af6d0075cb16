"""Waits for exchanges by collectives: by gloo on the host until the deadline, by NCCL on the device.

What a kernel of NCCL waits for is seen by the watch alone (`seqpar.mesh.watch`), which ends it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist

from seqpar.mesh.mesh import Axis

T = TypeVar("T")


class Waits:
    """Starts an exchange and waits for it; TimeoutError names the late rank. what: the exchange, for the error."""

    def __init__(self, axis: Axis, what: str, device: torch.device) -> None:
        self._watch, self._ranks = axis.watch, axis.ranks
        self._what = f"axis {axis.name}, {what}"
        self.on_host = self._watch is not None and device.type != "cuda"

    def begun(self, start: Callable[[], T]) -> T:
        """Return what `start` returns, which sends to other ranks."""
        if self._watch is None:
            return start()
        with self._watch.context(self._what, self._ranks):
            return start()

    def end(self, works: Iterable[dist.Work]) -> None:
        """Wait for all works; by NCCL the current stream waits, and the host does not."""
        for work in works:
            if self._watch is not None and self.on_host:
                self.begun(partial(work.wait, timedelta(seconds=self._watch.limit_s)))
            else:
                self.begun(work.wait)
