"""The step boundary: where a run may end between two steps, on all ranks alike.

Every rank passes the boundary when it has queued a step, or a part of an encoder or decoder. There it waits until at
most that step is left to compute, and while it is computed, all ranks agree on one byte over the host's group: whether
one of them wants the run to end. So a cancel ends a run after the step that is being computed, no rank waits for
another that has gone on, and no step waits for the agreement.
When it wins: for servers, whose clients leave. A run without one queues all its steps ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Literal

import torch

from seqpar.mesh.errors import WHO
from seqpar.mesh.mesh import Mesh, gathered
from seqpar.mesh.watch import LostRankError, over

Reason = Literal["cancelled", "deadline"]
REASONS: tuple[Reason, ...] = ("cancelled", "deadline")
AHEAD = 1  # steps that may be queued and not computed when the next one is queued


class CancelledError(BaseException):
    """A run was given up on all ranks alike. No Exception, so that no pipeline takes it for a fault of its own."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(f"the run was given up: {reason}")
        self.reason: Reason = reason


class StepBoundary:
    """Called by every rank of a mesh at the same places of a run; raises CancelledError if one of them wants it.

    wants: returns why this rank wants the run to end, or None. It is asked once at each boundary.
    """

    def __init__(self, mesh: Mesh, wants: Callable[[], Reason | None]) -> None:
        self._mesh, self._wants = mesh, wants
        self._queued: deque[torch.cuda.Event] = deque()

    def __call__(self) -> None:
        """Pass the boundary. Raises LostRankError for a rank that this one waits for in vain, or that is no rank."""
        self._wait()
        reason = self._wants()
        mine = torch.tensor([0 if reason is None else 1 + REASONS.index(reason)], dtype=torch.uint8)
        world = self._mesh.world
        every = mine if world.size == 1 else gathered(world, self._mesh.device, mine, "the step boundary")
        if agreed := int(every.max()):
            self._queued.clear()
            if agreed > len(REASONS):
                raise LostRankError(f"got reason {agreed} at the step boundary, expected 0 to {len(REASONS)}; {WHO}")
            raise CancelledError(REASONS[agreed - 1])

    def _wait(self) -> None:
        """Wait until no more than `AHEAD` of the steps between boundaries are left on the device."""
        if self._mesh.device.type != "cuda":
            return
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._mesh.device))
        self._queued.append(event)
        while len(self._queued) > AHEAD:
            over(self._queued.popleft(), self._mesh.world.watch)
