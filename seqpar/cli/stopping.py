"""Ctrl-C, or a closed terminal, during a run: all ranks end at one step boundary, also those it did not reach.

The step boundary is that of a server (`seqpar.mesh.boundary`). A step that takes longer than the grace of
`seqpar.cli.interrupted` is not waited for. When it wins: on several machines, where a terminal reaches its own ranks
alone, and the others would find out by waiting for these in vain. SIGTERM is not noted: whoever ends ranks after one
has failed (the starter, torchrun's agent) sends it, and then nobody comes to the boundary.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from seqpar.cli.args import Args, ProfileArgs
from seqpar.cli.interrupted import Noted, Stopped, handled
from seqpar.mesh.boundary import CancelledError, Reason, StepBoundary
from seqpar.mesh.mesh import Mesh

NOTED = (signal.SIGINT, signal.SIGHUP)


class Stop(Noted):
    """A handler that notes a signal. number: the last one that has come; SIGINT if another rank got one."""

    def __init__(self) -> None:
        self.number, self._asked = int(signal.SIGINT), False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Note the signal."""
        self.number, self._asked = number, True

    def wants(self) -> Reason | None:
        """Return why this rank wants the run to end."""
        return "cancelled" if self._asked else None


@contextmanager
def stoppable(args: Args, mesh: Mesh) -> Iterator[Callable[[], None]]:
    """Yield the boundary that every rank passes between steps and parts; `Stopped` on all if one got a signal.

    A signal that something else handles stays with that. A profile has no boundary, which would be measured, too.
    """
    if isinstance(args, ProfileArgs):
        yield lambda: None
        return
    stop = Stop()
    try:
        with handled(stop, NOTED):
            yield StepBoundary(mesh, stop.wants)
    except CancelledError:
        raise Stopped(stop.number) from None
    if stop.wants():  # after the last boundary
        raise Stopped(stop.number)
