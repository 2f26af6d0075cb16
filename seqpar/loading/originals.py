"""Weights before a LoRA, in memory that all ranks of a host share: of those that are stored in 8 bits or parked.

A switch of LoRAs adds to the weights of the files, and reading those through the page cache takes ten times as long as
copying them from page-locked memory. Each rank reads its part of them once.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any
from weakref import finalize

import torch
from torch import Tensor

from seqpar.kernels.weight8 import Weight8, in_memory
from seqpar.loading.placing import Team
from seqpar.mesh.mesh import Mesh
from seqpar.types.say import say

SHARED = Path("/dev/shm")  # files in it are memory
ALIGNED = 256  # bytes


def hold(
    like: Mapping[str, Tensor], sources: Mapping[str, Callable[[], Tensor]], mesh: Mesh
) -> dict[str, Callable[[], Tensor]]:
    """Return functions that return these weights as their sources do now, from memory of the host. Collective.

    like: tensors like what the sources return, the same on every rank. A `Weight8` may change later; others are read
    from files each time where the host's shared memory is too small; rank 0 prints it. Raises ValueError alike on
    all ranks if a file does not load.
    """
    parts = {name: in_memory(like[name]) for name in sources}
    ends = [*accumulate((-(-x.nbytes // ALIGNED) * ALIGNED for of in parts.values() for x in of), initial=0)]
    if not sources:
        return {}
    team = Team.of(mesh)
    memory = _shared(ends[-1], team, mesh)
    if memory is None:
        room = f"{SHARED} has no {ends[-1] / 2**30:.1f} GiB for the weights without them"
        say(f"a switch of LoRAs takes longer, because {room}", mesh)
        eight = [name for name in sources if isinstance(like[name], Weight8)]
        return {**sources, **{name: partial(_as_it_is, sources[name]().to("cpu", copy=True)) for name in eight}}

    starts = iter(ends)
    places = {
        name: [memory[(at := next(starts)) : at + x.nbytes].view(x.dtype).view(x.shape) for x in of]
        for name, of in parts.items()
    }

    def read() -> None:
        for name in [*sources][team.rank :: team.size]:
            for place, x in zip(places[name], in_memory(sources[name]()), strict=True):
                place.copy_(x)

    mesh.on_all_ranks(read)
    if mesh.device.type == "cuda":
        lock(memory, mesh.device, "of the originals")
    return {name: partial(_as_it_is, _as(like[name], of)) for name, of in places.items()}


def arriving(weights: Sequence[tuple[Tensor, Callable[[], Tensor]]]) -> Iterator[Tensor]:
    """Yield the originals of weights on their device, in their dtype, while the next one is copied there.

    weights: with functions that return their originals. A tensor holds its numbers until the next one is asked for.
    Copies to a GPU take turns in two buffers, on another stream, and the host waits for none.
    """
    if not weights or weights[0][0].device.type != "cuda":
        yield from (source().to(weight.device, weight.dtype) for weight, source in weights)
        return
    device = weights[0][0].device
    main, side = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    # of a weight in its dtype, or in 8 bits with scales
    sizes = (weight.numel() * weight.itemsize + 4 * len(weight) for weight, _ in weights)
    size = (max(sizes) // ALIGNED + 2) * ALIGNED
    buffers = torch.empty(2, size, dtype=torch.uint8, device=device)
    consumed = [main.record_event()] * 2  # after which a buffer may be written
    copied = consumed.copy()

    def copy(number: int) -> Tensor:
        (weight, source), rest, places = weights[number], buffers[number % 2], list[Tensor]()
        with torch.cuda.stream(side):  # a source may compute on the GPU
            side.wait_event(consumed[number % 2])
            original = source()
            original = original if isinstance(original, Weight8) else original.to(weight.dtype)
            for x in in_memory(original):
                places.append(rest[: x.nbytes].view(x.dtype).view(x.shape).copy_(x, non_blocking=True))
                rest = rest[-(-x.nbytes // ALIGNED) * ALIGNED :]
            copied[number % 2] = side.record_event()
        return _as(original, places)

    try:
        following = copy(0)
        for number in range(len(weights)):
            original = following
            if number + 1 < len(weights):
                following = copy(number + 1)
            main.wait_event(copied[number % 2])
            yield original
            consumed[number % 2] = main.record_event()
    finally:
        main.wait_stream(side)  # before other tensors get the buffers


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _as(weight: Tensor, places: Sequence[Tensor]) -> Tensor:
    # a weight like this one in other memory
    return Weight8(places[0], places[1], weight.dtype) if isinstance(weight, Weight8) else places[0]


def _shared(size: int, team: Team, mesh: Mesh) -> Tensor | None:
    # Memory that the ranks of this host share; None on all ranks if one host lacks it. Its file has no name as soon as
    # all ranks have it, so that it goes with the last of them.
    with tempfile.NamedTemporaryFile(dir=SHARED if SHARED.is_dir() else None, prefix="seqpar-", delete=False) as file:
        try:
            first = team.rank == 0
            if first:
                os.truncate(file.fileno(), size)
            path = mesh.collect(file.name if first else "", str)[team.ranks[0]]
            mine = mesh.collect(_identity(file.name) if first else "", str)[team.ranks[0]]

            def mapped() -> Tensor | None:
                if _identity(path) != mine:  # containers with one host name may have other folders
                    return None
                return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)  # takes nothing yet

            memory = mesh.on_all_ranks(mapped)
        finally:
            os.unlink(file.name)
        enough = memory is not None
        if first:
            try:
                os.posix_fallocate(file.fileno(), 0, size)
            except OSError:
                enough = False
        return memory if all(mesh.collect(enough, bool)) else None


def _identity(path: str) -> str:
    try:
        facts = os.stat(path)
    except OSError:
        return ""
    return f"{facts.st_dev} {facts.st_ino}"


def lock(memory: Tensor, device: torch.device, what: str) -> None:
    """Lock pages of host memory as long as it exists: else copies to the GPU go through the driver's own buffer, at a
    third of the rate. what: of the memory, for the line that is printed where the host refuses.
    """
    runtime: Any = torch.cuda.cudart()
    with torch.cuda.device(device):
        if (error := int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))) != 0:
            # torch's bindings cannot take the error back, and the next kernel would raise it
            ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}").cudaGetLastError()
            say(f"memory {what} is not page-locked (CUDA error {error}): copies take longer")
            return
        finalize(memory.untyped_storage(), runtime.cudaHostUnregister, memory.data_ptr()).atexit = False
