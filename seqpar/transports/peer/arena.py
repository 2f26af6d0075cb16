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
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from seqpar.kernels._triton import triton
from seqpar.mesh import Axis

T = TypeVar("T")
GRANULE = 1 << 21  # bytes that the driver hands out at least
ALIGN = 256  # bytes; a field starts on a cache line of its own, and vector accesses never straddle two
MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


class Arena:
    """`nbytes` on each rank of an axis, zero at first. Every rank makes it at the same time, with the same size."""

    def __init__(self, axis: Axis, nbytes: int, device: torch.device) -> None:
        self._axis = axis
        self._ranks: list[Tensor] = []
        error = None
        try:
            # views do not keep the memory, nor peers' mappings of it: the second of the two does
            make = _on_gpus if device.type == "cuda" else _on_cpus
            self._ranks, self._owner = make(axis, nbytes, device)
            self._ranks[axis.rank].zero_()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        except RuntimeError as raised:
            error = raised
        # nobody writes to a peer before its zeros are there, or waits for one that has none
        if failed := first_told(axis, None if error is None else str(error)):
            raise RuntimeError(failed) from error

    def view(self, rank: int, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Part of a rank's memory, `start` bytes from its beginning."""
        nbytes = prod(shape) * dtype.itemsize
        return self._ranks[rank][start : start + nbytes].view(dtype).view(shape)

    def close(self) -> None:
        """Give the memory back, once no rank uses it any more; views of it must not be used again."""
        if self._ranks and self._ranks[0].is_cuda:
            torch.cuda.synchronize(self._ranks[0].device)
        together(self._axis, None)
        self._ranks, self._owner = [], None


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
    return first_told(axis, _why_not_here(axis, device))


def together(axis: Axis, value: T) -> list[T]:
    """A small picklable object of every rank of the axis, in order; nobody is past it before all are there."""
    values: list[T] = [value] * axis.size
    if axis.size > 1:
        dist.all_gather_object(values, value, group=axis.group)
    return values


def first_told(axis: Axis, reason: str | None) -> str | None:
    """The reason of the first rank that has one, the same on all; None where none has."""
    return next((told for told in together(axis, reason) if told is not None), None)


def _why_not_here(axis: Axis, device: torch.device) -> str | None:
    if device.type != "cuda":
        return None
    mine = torch.cuda.current_device() if device.index is None else device.index
    others = [other for other in together(axis, mine) if other != mine]
    if len(others) != axis.size - 1:
        return f"ranks name their GPUs alike (cuda:{mine}): give each its own, and let all see all GPUs"
    if unseen := [other for other in others if other >= torch.cuda.device_count()]:
        return f"a rank with GPU {mine} does not see GPU {unseen[0]}: let all see all GPUs"
    if blocked := [other for other in others if not torch.cuda.can_device_access_peer(mine, other)]:
        return f"GPU {mine} has no peer access to GPU {blocked[0]}"
    if triton is None:
        return "there is no Triton, whose kernels raise the flags"
    if os.environ.get(MULTICAST, "1") != "1":
        return f"{MULTICAST} is not 1, and multicast is never used here"
    return None


def _on_gpus(axis: Axis, nbytes: int, device: torch.device) -> tuple[list[Tensor], object]:
    os.environ.setdefault(MULTICAST, "1")  # read when ranks meet; otherwise they would set multicast up
    rendezvous = _rendezvous()
    # torch numbers the meetings of a process, not those of a group, and ranks meet under equal numbers only. Ranks
    # that have met less often (other batches, other worlds) make up for it alone
    most = max(together(axis, rendezvous.count))
    alone = None
    while rendezvous.count < most:
        alone = alone or _alone(axis)
        rendezvous.meet(GRANULE, device, alone)
    assert axis.group is not None
    memory, handle = rendezvous.meet(nbytes, device, axis.group)
    if getattr(handle, "multicast_ptr", 0):
        raise ValueError(f"got symmetric memory with multicast, expected none; set {MULTICAST}=1")
    return [handle.get_buffer(rank, (nbytes,), torch.uint8, 0) for rank in range(axis.size)], (memory, handle)


class _Rendezvous:
    """Symmetric memory of torch, and how often this process has met others for it."""

    def __init__(self) -> None:
        self.count = 0

    def meet(self, nbytes: int, device: torch.device, group: dist.ProcessGroup) -> tuple[Tensor, Any]:
        """(my memory, the handle with which to reach that of the others); both must be kept."""
        import torch.distributed._symmetric_memory as symmetric
        from torch._C._distributed_c10d import _SymmetricMemory

        # not symmetric.empty: its pool may hand ranks different slots, and then they would write to wrong places
        memory = _SymmetricMemory.empty_strided_p2p((nbytes,), (1,), torch.uint8, device)
        self.count += 1
        return memory, symmetric.rendezvous(memory, group)


@cache
def _rendezvous() -> _Rendezvous:
    """One for this process, because torch's counter is one, too."""
    return _Rendezvous()


def _alone(axis: Axis) -> dist.ProcessGroup:
    """A group of this rank only; no other rank need know."""
    assert axis.group is not None
    me = dist.get_process_group_ranks(axis.group)[axis.rank]
    group = dist.new_group([me], backend="gloo", use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return group


def _on_cpus(axis: Axis, nbytes: int, device: torch.device) -> tuple[list[Tensor], object]:
    folder = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())
    paths = together(axis, folder / f"seqpar-{uuid.uuid4().hex}")
    try:
        if (error := first_told(axis, _reserve(paths[axis.rank], nbytes))) is not None:
            raise ValueError(error)
        found = [torch.from_file(str(path), shared=True, size=nbytes, dtype=torch.uint8) for path in paths]
        together(axis, None)  # all are mapped: no file is left behind, however the ranks end
    finally:
        paths[axis.rank].unlink(missing_ok=True)
    return found, None


def _reserve(path: Path, nbytes: int) -> str | None:
    """Make a file of that size, its memory too: to find none when it is written to would kill the process."""
    try:
        with path.open("wb") as file:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, nbytes)
            else:
                file.truncate(nbytes)
    except OSError as error:
        return f"got {nbytes} bytes of shared memory to make in {path.parent}, which fails: {error.strerror or error}"
    return None
