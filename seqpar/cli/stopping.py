"""Ctrl-C during a run: all ranks end at one step boundary, also those that the signal did not reach.

The step boundary is that of a server (`seqpar.mesh.boundary`). A step that takes longer than the grace of
`seqpar.cli.interrupted` is not waited for. When it wins: on several machines, where a terminal reaches its own ranks
alone, and the others would find out by waiting for these in vain.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from seqpar.cli.args import Args, ProfileArgs
from seqpar.cli.interrupted import Noted
from seqpar.mesh.boundary import CancelledError, Reason, StepBoundary
from seqpar.mesh.mesh import Mesh


class Stop(Noted):
    """A handler of SIGINT that notes it. asked: whether one has come."""

    def __init__(self) -> None:
        self.asked = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Note the signal."""
        self.asked = True

    def wants(self) -> Reason | None:
        """Return why this rank wants the run to end."""
        return "cancelled" if self.asked else None


@contextmanager
def stoppable(args: Args, mesh: Mesh) -> Iterator[Callable[[], None]]:
    """Yield the boundary that every rank passes between steps and parts; KeyboardInterrupt on all if one got SIGINT.

    Where something else handles SIGINT it stays with that. A profile has no boundary, which would be measured, too.
    """
    if isinstance(args, ProfileArgs):
        yield lambda: None
        return
    before, stop = signal.getsignal(signal.SIGINT), Stop()
    mine = before is signal.default_int_handler
    if mine:
        signal.signal(signal.SIGINT, stop)
    try:
        yield StepBoundary(mesh, stop.wants)
    except CancelledError:
        raise KeyboardInterrupt from None
    finally:
        if mine:
            signal.signal(signal.SIGINT, before)
    if stop.asked:  # after the last boundary
        raise KeyboardInterrupt
