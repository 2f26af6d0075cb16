"""Collectives of torch.distributed: NCCL between GPUs, gloo between CPUs. Works everywhere, between machines too.

When it wins: big blocks between machines; and where ranks cannot reach each other's memory it is the only one.
"""

from __future__ import annotations

from torch import Tensor

from seqpar.mesh import Axis, Mesh
from seqpar.transports._contract import Gather, KeyValues, Rotation, ToHeads, ToTokens
from seqpar.transports._layout import HeadLayout
from seqpar.transports.collective.exchange import CollectiveKeyValues, CollectiveToHeads, CollectiveToTokens
from seqpar.transports.collective.point_to_point import CollectiveGather, CollectiveRotation


def why_not(mesh: Mesh) -> str | None:
    """Any mesh."""
    return None


class Transport:
    """See `seqpar.transports._contract.Transport`. Deadlines are the process group's."""

    def heads(self, axis: Axis, layout: HeadLayout) -> tuple[ToHeads, ToTokens]:
        """Two all-to-alls."""
        return CollectiveToHeads(axis, layout), CollectiveToTokens(axis, layout)

    def key_values(self, axis: Axis, layout: HeadLayout, overlap: bool = False) -> KeyValues:
        """One group of sends and receives. A backend has streams or threads of its own, so overlap needs nothing."""
        return CollectiveKeyValues(axis, layout)

    def ring(self, axis: Axis, sizes: tuple[int, ...], shape: tuple[int, ...], like: Tensor) -> Rotation:
        """A send and a receive a step."""
        return CollectiveRotation(axis, sizes, shape, like)

    def gather(self, axis: Axis, sizes: tuple[int, ...], shape: tuple[int, ...], like: Tensor) -> Gather:
        """One group of sends and receives."""
        return CollectiveGather(axis, sizes, shape, like)

    def check(self) -> None:
        """Nothing to say: a collective that fails raises by itself."""

    def release(self) -> None:
        """Nothing that does not go with its exchange."""
