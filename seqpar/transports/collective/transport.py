"""Collectives of torch.distributed: NCCL between GPUs, gloo between CPUs. Works everywhere, between machines too.

When it wins: big blocks between machines; and where ranks cannot reach each other's memory it is the only one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from seqpar.mesh import Axis, Mesh
from seqpar.transports import _contract
from seqpar.transports._exchanges import Gather, KeyValues, Rotation, ToHeads, ToTokens
from seqpar.transports._layout import HeadLayout
from seqpar.transports.collective.exchange import CollectiveKeyValues, CollectiveToHeads, CollectiveToTokens
from seqpar.transports.collective.point_to_point import CollectiveGather, CollectiveRotation


def bare(axis: Axis, nbytes: int, device: torch.device) -> Callable[[], object]:
    """One all-to-all of `nbytes` to each rank, and nothing else."""
    send = torch.ones(nbytes * axis.size, dtype=torch.uint8, device=device)
    receive = torch.empty_like(send)
    return lambda: dist.all_to_all_single(receive, send, group=axis.group)


FACTS = _contract.Facts(rates={"cuda": "nccl", "cpu": "gloo"}, unasked={"cuda": "NCCL", "cpu": "gloo"}, bare=bare)


def why_not(mesh: Mesh) -> str | None:
    """None: it works on any mesh."""
    return None


def why_not_tried(axis: Axis, device: torch.device) -> str | None:
    """None: it works between any ranks that are in one process group."""
    return None


class Transport(_contract.Transport):
    """Exchanges by collectives; see `seqpar.transports._contract.Transport`. Deadlines are the process group's."""

    def _heads(self, axis: Axis, layout: HeadLayout) -> tuple[ToHeads, ToTokens]:
        """Two all-to-alls."""
        return CollectiveToHeads(axis, layout), CollectiveToTokens(axis, layout)

    def _key_values(self, axis: Axis, layout: HeadLayout, overlap: bool) -> KeyValues:
        """One group of sends and receives. A backend has streams or threads of its own, so overlap needs nothing."""
        return CollectiveKeyValues(axis, layout)

    def _ring(self, axis: Axis, sizes: tuple[int, ...], shape: tuple[int, ...], like: Tensor) -> Rotation:
        """A send and a receive a step."""
        return CollectiveRotation(axis, sizes, shape, like)

    def _gather(self, axis: Axis, sizes: tuple[int, ...], shape: tuple[int, ...], like: Tensor) -> Gather:
        """One group of sends and receives."""
        return CollectiveGather(axis, sizes, shape, like)
