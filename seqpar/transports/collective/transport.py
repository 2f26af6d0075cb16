"""Collectives of torch.distributed: NCCL between GPUs, gloo between CPUs. Works everywhere, between machines too.

When it wins: big blocks between machines; and where ranks cannot reach each other's memory it is the only one.
"""

from __future__ import annotations

from torch import Tensor

from seqpar.mesh import Axis, Mesh
from seqpar.transports._contract import Back, Behind, Collect, Into, Rotate
from seqpar.transports._layout import HeadLayout
from seqpar.transports.collective.exchange import ToAll, ToHeads, ToTokens
from seqpar.transports.collective.point_to_point import Gather, Rotation


def supports(mesh: Mesh) -> str | None:
    """Any mesh."""
    return None


class Transport:
    """See `seqpar.transports._contract.Transport`. Deadlines are the process group's."""

    def heads(self, axis: Axis, layout: HeadLayout) -> tuple[Into, Back]:
        """Two all-to-alls."""
        return ToHeads(axis, layout), ToTokens(axis, layout)

    def everywhere(self, axis: Axis, layout: HeadLayout) -> Into:
        """One group of sends and receives."""
        return ToAll(axis, layout)

    def behind(self, axis: Axis, layout: HeadLayout) -> Behind:
        """The same: a backend has streams or threads of its own."""
        return ToAll(axis, layout)

    def ring(self, axis: Axis, sizes: tuple[int, ...], shape: tuple[int, ...], like: Tensor) -> Rotate:
        """A send and a receive a step."""
        return Rotation(axis, sizes, shape, like)

    def gather(self, axis: Axis, sizes: tuple[int, ...], shape: tuple[int, ...], like: Tensor) -> Collect:
        """One group of sends and receives."""
        return Gather(axis, sizes, shape, like)

    def check(self) -> None:
        """Nothing to say: a collective that fails raises by itself."""

    def release(self) -> None:
        """Nothing that does not go with its exchange."""
