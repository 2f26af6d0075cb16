"""Memory of every rank of an axis that all of them can write: peers' buffers, mapped here.

On GPUs torch's symmetric memory over NVLink, on CPUs files in memory that all ranks map: the same protocol, so what is
tested on CPUs is what runs on GPUs. When it wins: a kernel writes where the reader will read, without a send buffer, a
collective or a copy on arrival. All ranks must be processes of one machine.
"""

from __future__ import annotations

import os
import socket
import tempfile
import uuid
from math import prod
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from seqpar.mesh import Axis

T = TypeVar("T")
ALIGN = 256  # bytes; a field starts on a cache line of its own, and vector accesses never straddle two
MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


class Arena:
    """`nbytes` on each rank of an axis, zero at first. Every rank makes it at the same time, with the same size."""

    def __init__(self, axis: Axis, nbytes: int, device: torch.device) -> None:
        self._axis = axis
        self._ranks = _on_gpus(axis, nbytes, device) if device.type == "cuda" else _on_cpus(axis, nbytes)
        self._ranks[axis.rank].zero_()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        together(axis, None)  # nobody writes to a peer before its zeros are there

    def view(self, rank: int, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Part of a rank's memory, `start` bytes from its beginning."""
        nbytes = prod(shape) * dtype.itemsize
        return self._ranks[rank][start : start + nbytes].view(dtype).view(shape)

    def close(self) -> None:
        """Give the memory back, once no rank uses it any more; views of it must not be used again."""
        if self._ranks and self._ranks[0].is_cuda:
            torch.cuda.synchronize(self._ranks[0].device)
        together(self._axis, None)
        self._ranks = []


class Fields:
    """Places in an arena, one after another: the same on every rank, because each field has its largest size."""

    def __init__(self) -> None:
        self.nbytes = 0

    def add(self, *sizes: int) -> int:
        """Room for the largest of these sizes (bytes, one a rank); returns where it starts."""
        start = self.nbytes
        self.nbytes += -(-max(sizes) // ALIGN) * ALIGN
        return start


def why_no_peers(axis: Axis, device: torch.device) -> str | None:
    """None where the ranks of an axis can write each other's memory, else the reason why not, the same on all."""
    if axis.size == 1:
        return None
    hosts = together(axis, socket.gethostname())
    if len(set(hosts)) > 1:
        return f"the ranks are on {len(set(hosts))} machines"
    return next((reason for reason in together(axis, _why_not_here(axis, device)) if reason is not None), None)


def together(axis: Axis, value: T) -> list[T]:
    """A small picklable object of every rank of the axis, in order; nobody is past it before all are there."""
    values: list[T] = [value] * axis.size
    if axis.size > 1:
        dist.all_gather_object(values, value, group=axis.group)
    return values


def _why_not_here(axis: Axis, device: torch.device) -> str | None:
    if device.type != "cuda":
        return None
    others = [other for other in together(axis, device.index) if other != device.index]
    if len(others) != axis.size - 1:
        return "several ranks share a GPU"
    blocked = [other for other in others if not torch.cuda.can_device_access_peer(device.index, other)]
    if blocked:
        return f"GPU {device.index} has no peer access to GPU {blocked[0]}"
    if os.environ.setdefault(MULTICAST, "1") != "1":
        return f"{MULTICAST} is not 1, and multicast is never used here"
    return None


def _on_gpus(axis: Axis, nbytes: int, device: torch.device) -> list[Tensor]:
    import torch.distributed._symmetric_memory as symmetric
    from torch._C._distributed_c10d import _SymmetricMemory

    assert axis.group is not None
    # not symmetric.empty: its pool may hand ranks different slots, and then they would write to wrong places
    memory = _SymmetricMemory.empty_strided_p2p((nbytes,), (1,), torch.uint8, device)
    handle = symmetric.rendezvous(memory, axis.group)
    if getattr(handle, "multicast_ptr", 0):
        raise ValueError(f"got symmetric memory with multicast, expected none; set {MULTICAST}=1 before CUDA starts")
    return [handle.get_buffer(rank, (nbytes,), torch.uint8, 0) for rank in range(axis.size)]


def _on_cpus(axis: Axis, nbytes: int) -> list[Tensor]:
    folder = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())
    paths = together(axis, folder / f"seqpar-{uuid.uuid4().hex}")
    mine = torch.from_file(str(paths[axis.rank]), shared=True, size=nbytes, dtype=torch.uint8)
    try:
        together(axis, None)  # all files are there, with their sizes
        found = [
            mine if rank == axis.rank else torch.from_file(str(path), shared=True, size=nbytes, dtype=torch.uint8)
            for rank, path in enumerate(paths)
        ]
        together(axis, None)  # all are mapped: no file is left behind, however the ranks end
    finally:
        paths[axis.rank].unlink(missing_ok=True)
    return found
