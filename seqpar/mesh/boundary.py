"""Cancellation points: where a run may end between two steps, on all ranks at once.

Each rank passes a cancellation point when it has queued a step, or a part of an encoder or decoder. It waits until at
most that step is left to compute; while it is computed, all ranks agree on one byte over the host's group: whether one
of them wants the run to end. So a cancel takes effect after the current step, no rank waits for another that is further
ahead, and no step waits for the agreement. For servers, whose clients disconnect; other runs queue all steps ahead.
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
AHEAD = 1  # steps that may be queued but not computed when the next one is queued


class CancelledError(BaseException):
    """A run was cancelled on all ranks. Not an Exception, so that no pipeline handles it as its own error."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(f"the run was cancelled: {reason}")
        self.reason: Reason = reason


class StepBoundary:
    """Collective: called by every rank at the same places of a run; raises CancelledError if one of them wants it.

    wants: returns why this rank wants the run to end, or None; called once per cancellation point.
    """

    def __init__(self, mesh: Mesh, wants: Callable[[], Reason | None]) -> None:
        self._mesh, self._wants = mesh, wants
        self._queued: deque[torch.cuda.Event] = deque()

    def __call__(self) -> None:
        """Pass a cancellation point; raises LostRankError if another rank is late or sends a malformed byte."""
        device, world = self._mesh.device, self._mesh.world
        if device.type == "cuda":
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
            self._queued.append(event)
            while len(self._queued) > AHEAD:
                over(self._queued.popleft(), world.watch)
        reason = self._wants()
        codes = torch.tensor([0 if reason is None else 1 + REASONS.index(reason)], dtype=torch.uint8)
        if world.size > 1:
            codes = gathered(world, device, codes, "the step boundary")
        if code := int(codes.max()):
            self._queued.clear()
            if code > len(REASONS):
                raise LostRankError(f"got reason {code} at the step boundary, expected 0 to {len(REASONS)}; {WHO}")
            raise CancelledError(REASONS[code - 1])
