"""Collectives of torch.distributed: NCCL between GPUs, gloo between CPUs. They work everywhere, also between machines.

When it wins: big blocks between machines. Where ranks cannot reach each other's memory it is the only transport.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from seqpar.mesh.mesh import Axis, Mesh
from seqpar.transports import _contract
from seqpar.transports._exchanges import Gather, Halo, KeyValues, Rotation, ToHeads, ToTokens
from seqpar.transports._layout import HeadLayout
from seqpar.transports.collective.exchange import CollectiveKeyValues, CollectiveToHeads, CollectiveToTokens
from seqpar.transports.collective.point_to_point import CollectiveGather, CollectiveHalo, CollectiveRotation


def bare(axis: Axis, nbytes: int, device: torch.device) -> Callable[[], object]:
    """Return a function that sends `nbytes` to each rank in one all-to-all and does nothing else."""
    send = torch.ones(nbytes * axis.size, dtype=torch.uint8, device=device)
    receive = torch.empty_like(send)
    return lambda: dist.all_to_all_single(receive, send, group=axis.group)


FACTS = _contract.Facts(rates={"cuda": "nccl", "cpu": "gloo"}, unasked={"cuda": "NCCL", "cpu": "gloo"}, bare=bare)


def why_not(mesh: Mesh) -> str | None:
    """Return None, because collectives work on any mesh."""
    return None


def why_not_tried(axis: Axis, device: torch.device) -> str | None:
    """Return None, because collectives work between all ranks of a process group."""
    return None


class Transport(_contract.Transport):
    """Makes exchanges by collectives; see `seqpar.transports._contract.Transport`. The process group sets deadlines."""

    def _heads(self, axis: Axis, layout: HeadLayout) -> tuple[ToHeads, ToTokens]:
        """Make two all-to-alls, one for each direction."""
        return CollectiveToHeads(axis, layout), CollectiveToTokens(axis, layout)

    def _key_values(self, axis: Axis, layout: HeadLayout, overlap: bool) -> KeyValues:
        """Make one group of sends and receives; it can overlap because backends have their own streams or threads."""
        return CollectiveKeyValues(axis, layout)

    def _ring(self, axis: Axis, sizes: tuple[int, ...], shape: tuple[int, ...], like: Tensor) -> Rotation:
        """Make a ring with one send and one receive in each step."""
        return CollectiveRotation(axis, sizes, shape, like)

    def _gather(self, axis: Axis, sizes: tuple[int, ...], shape: tuple[int, ...], like: Tensor) -> Gather:
        """Make one group of sends and receives."""
        return CollectiveGather(axis, sizes, shape, like)

    def _halo(self, axis: Axis, capacity: int, like: Tensor) -> Halo:
        """Make one group of sends and receives with the neighbours."""
        return CollectiveHalo(axis, capacity, like)
