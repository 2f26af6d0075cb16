"""Peer memory: kernels write where the reader will read, and flags say when. One machine only.

When it wins: GPUs that reach each other's memory, small and middle-sized blocks most; see `seqpar.comm.peer`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from seqpar.comm.arena import why_no_peers
from seqpar.comm.exchange import HeadLayout
from seqpar.comm.peer import PeerGather, PeerHeads, PeerRotation, PeerToAll
from seqpar.comm.transport import DEADLINE_S, Back, Collect, Into, Rotate
from seqpar.mesh import Axis, Mesh


def supports(mesh: Mesh) -> str | None:
    """None where the ranks that exchange are on one machine and reach each other's memory, else why not."""
    # both are asked on every rank: the answer is the same on all ranks of an axis only
    reasons = [why_no_peers(axis, mesh.device) for axis in (mesh.sequence, mesh.cfg)]
    return next((reason for reason in reasons if reason is not None), None)


class Transport:
    """See `seqpar.comm.transport.Transport`."""

    def __init__(self, deadline_s: float = DEADLINE_S) -> None:
        self._deadline_s = deadline_s
        self._made: list[tuple[Axis, str, Any]] = []

    def heads(self, axis: Axis, layout: HeadLayout) -> tuple[Into, Back]:
        """Both ways in one arena."""
        both = self._keep(axis, f"q, k, v and output of {_shown(layout)}", PeerHeads(axis, layout, self._deadline_s))
        return both.into, both.back

    def everywhere(self, axis: Axis, layout: HeadLayout) -> Into:
        """Two slots that take turns."""
        return self._keep(axis, f"keys and values of {_shown(layout)}", PeerToAll(axis, layout, self._deadline_s))

    def ring(self, axis: Axis, sizes: tuple[int, ...], shape: tuple[int, ...], like: Tensor) -> Rotate:
        """Copies under attention."""
        rotation = PeerRotation(axis, sizes, shape, like, self._deadline_s)
        return self._keep(axis, f"ring blocks of {sum(sizes)} tokens", rotation)

    def gather(self, axis: Axis, sizes: tuple[int, ...], shape: tuple[int, ...], like: Tensor) -> Collect:
        """A copy to each peer."""
        collect = PeerGather(axis, sizes, shape, like, self._deadline_s)
        return self._keep(axis, f"blocks of {sizes} x {shape}", collect)

    def check(self) -> None:
        """See `seqpar.comm.transport.Transport`."""
        for axis, what, exchange in self._made:
            for flags in exchange.flags:
                late = flags.late.tolist()
                if any(late):
                    raise TimeoutError(_told(axis, what, late, self._deadline_s))

    def release(self) -> None:
        """See `seqpar.comm.transport.Transport`."""
        for _, _, exchange in self._made:
            exchange.arena.close()
        self._made.clear()

    def _keep(self, axis: Axis, what: str, exchange: Any) -> Any:
        self._made.append((axis, what, exchange))
        return exchange


def _shown(layout: HeadLayout) -> str:
    return f"{sum(layout.tokens)} tokens, {layout.heads} heads, batch {layout.batch}"


def _told(axis: Axis, what: str, late: list[int], deadline_s: float) -> str:
    # a rotation's only peer is a neighbour; elsewhere peers are numbered as on the axis
    peers = [str(rank) for rank, count in enumerate(late) if count] if len(late) == axis.size else ["a neighbour"]
    return (
        f"rank {axis.rank} of axis {axis.name} waited {deadline_s:g} s in vain for {', '.join(peers)} (exchange "
        f"{max(late)}: {what}); that rank died or is stuck: see its output"
    )
