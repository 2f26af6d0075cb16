"""An arena: memory on every rank of an axis that all of these ranks have mapped and can write.

GPUs use torch's symmetric memory over NVLink, CPUs use files in memory, without names. Both follow the same protocol,
so tests on CPUs cover GPU code. All ranks must be processes of one machine.
"""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack
from functools import cache
from math import prod
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from seqpar.mesh.board import anonymous, name_of, path_of
from seqpar.mesh.inputs import collect_on_axis
from seqpar.mesh.mesh import Axis

T = TypeVar("T")
GRANULE = 1 << 21  # bytes; the driver allocates no less
ALIGN = 256  # bytes; a field starts on its own cache line, and vector accesses never straddle two lines
MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


class Arena:
    """`nbytes` of mapped memory on each rank of an axis, zero at first. Collective."""

    def __init__(self, axis: Axis, nbytes: int, device: torch.device) -> None:
        self._axis = axis
        self._ranks: list[Tensor] = []
        error = None
        try:
            # views keep neither the memory nor its mappings alive; the owner, the second value, does
            make = _on_gpus if device.type == "cuda" else _on_cpus
            self._ranks, self._owner = make(axis, nbytes, device)
            self._ranks[axis.rank].zero_()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        except RuntimeError as raised:
            error = raised
        # waits for all ranks: no rank writes before all memory is zero, or waits for a rank that failed
        if failed := first_reason(axis, None if error is None else str(error)):
            raise RuntimeError(failed) from error

    def view(self, rank: int, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a view of a rank's memory from byte `start` on."""
        nbytes = prod(shape) * dtype.itemsize
        return self._ranks[rank][start : start + nbytes].view(dtype).view(shape)

    def close(self) -> None:
        """Free the memory; views of it must not be used again. Collective."""
        if self._ranks and self._ranks[0].is_cuda:
            torch.cuda.synchronize(self._ranks[0].device)
        collect_on_axis(self._axis, None, None)
        self._ranks, self._owner = [], None


class Fields:
    """The layout of an arena: fields at the same places on every rank, each with the largest size of any rank."""

    def __init__(self) -> None:
        self.nbytes = 0

    def add(self, *sizes: int) -> int:
        """Add a field with the largest of these sizes (bytes on each rank); return its first byte."""
        start = self.nbytes
        self.nbytes += -(-max(sizes) // ALIGN) * ALIGN
        return start


def why_no_peers(axis: Axis, device: torch.device) -> str | None:
    """Return None if the ranks of an axis can write each other's memory, otherwise the reason. Collective."""
    if axis.size == 1:
        return None
    hosts = collect_on_axis(axis, socket.gethostname(), str)
    if len(set(hosts)) > 1:
        return f"the ranks are on {len(set(hosts))} machines"
    return first_reason(axis, _why_not_here(axis, device))


def first_reason(axis: Axis, reason: str | None) -> str | None:
    """Return the reason of the first rank that has one, on all ranks; None if no rank has one. Collective."""
    return next((text for text in collect_on_axis(axis, reason, str | None) if text is not None), None)


def _why_not_here(axis: Axis, device: torch.device) -> str | None:
    if device.type != "cuda":
        return None
    mine = torch.cuda.current_device() if device.index is None else device.index
    others = [other for other in collect_on_axis(axis, mine, int) if other != mine]
    if len(others) != axis.size - 1:
        return f"several ranks use cuda:{mine}: give each rank its own GPU, and make all GPUs visible to every rank"
    if unseen := [other for other in others if other >= torch.cuda.device_count()]:
        return f"a rank with GPU {mine} does not see GPU {unseen[0]}: make all GPUs visible to every rank"
    if blocked := [other for other in others if not torch.cuda.can_device_access_peer(mine, other)]:
        return f"GPU {mine} has no peer access to GPU {blocked[0]}"
    if os.environ.get(MULTICAST, "1") != "1":
        return f"{MULTICAST} is not 1, but this transport does not use multicast"
    return None


def _on_gpus(axis: Axis, nbytes: int, device: torch.device) -> tuple[list[Tensor], object]:
    os.environ.setdefault(MULTICAST, "1")  # torch reads it at the rendezvous, and would set multicast up otherwise
    rendezvous = _rendezvous()
    # torch counts the rendezvous of a process, not of a group, and ranks must have equal counts. Ranks with a lower
    # count (after other batches or other meshes) catch up with rendezvous in a group of one rank
    most = max(collect_on_axis(axis, rendezvous.count, int))
    alone, memory, error = None, None, None
    try:
        while rendezvous.count < most:
            alone = alone or _alone(axis)
            rendezvous.meet(rendezvous.memory(GRANULE, device), alone)
        memory = rendezvous.memory(nbytes, device)
    except RuntimeError as raised:
        error = str(raised)
    if failed := first_reason(axis, error):  # in the rendezvous all ranks would wait for the failed one
        raise RuntimeError(failed)
    if alone is not None:
        dist.destroy_process_group(alone)
    assert memory is not None
    assert axis.group is not None
    handle = rendezvous.meet(memory, axis.group)
    if getattr(handle, "multicast_ptr", 0):
        raise ValueError(f"symmetric memory with multicast is not supported; set {MULTICAST}=1")
    return [handle.get_buffer(rank, (nbytes,), torch.uint8, 0) for rank in range(axis.size)], (memory, handle)


class _Rendezvous:
    """Allocates torch's symmetric memory, and counts the rendezvous of this process."""

    def __init__(self) -> None:
        self.count = 0

    def memory(self, nbytes: int, device: torch.device) -> Tensor:
        from torch._C._distributed_c10d import _SymmetricMemory

        # not symmetric.empty: its pool may give ranks different slots, and then they would write to wrong places
        return _SymmetricMemory.empty_strided_p2p((nbytes,), (1,), torch.uint8, device)

    def meet(self, memory: Tensor, group: dist.ProcessGroup) -> Any:
        """Return the handle of the other ranks' memory; keep it with the local memory."""
        import torch.distributed._symmetric_memory as symmetric

        self.count += 1
        return symmetric.rendezvous(memory, group)


@cache
def _rendezvous() -> _Rendezvous:
    return _Rendezvous()


def _alone(axis: Axis) -> dist.ProcessGroup:
    group = dist.new_group([axis.ranks[axis.rank]], backend="gloo", use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return group


def _on_cpus(axis: Axis, nbytes: int, device: torch.device) -> tuple[list[Tensor], object]:
    with ExitStack() as opened:
        name, error = "", None
        try:
            # a file without a name in any folder: a rank that is killed here leaves nothing behind
            file = opened.enter_context(anonymous())
            name = name_of(file)
            os.posix_fallocate(file.fileno(), 0, nbytes)  # a write that finds no memory would kill the process
        except OSError as failed:
            error = f"cannot allocate {nbytes} bytes of shared memory: {failed.strerror or failed}"
        answers = collect_on_axis(axis, (name, error), tuple[str, str | None])
        if (failed := next((error for _, error in answers if error is not None), None)) is not None:
            raise ValueError(failed)
        buffers = list[Tensor]()
        try:
            for name, _ in answers:
                buffers.append(torch.from_file(path_of(name), shared=True, size=nbytes, dtype=torch.uint8))
        except RuntimeError as raised:
            error = str(raised)
        # all ranks have mapped all files, so that they can be closed; or all raise what failed on one
        if failed := first_reason(axis, error):
            raise RuntimeError(failed)
    return buffers, None
