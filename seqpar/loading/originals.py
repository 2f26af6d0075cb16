"""Weights as they were before they were rounded to 8 bits, in memory that all ranks of a host share.

A switch of LoRAs adds to the weights of the files, and reading those through the page cache takes ten times as long as
copying them from page-locked memory. Each rank reads its part of them once.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any
from weakref import finalize

import torch
from torch import Tensor

from seqpar.kernels.weight8 import Weight8
from seqpar.loading.placing import Team
from seqpar.mesh.mesh import Mesh

SHARED = Path("/dev/shm")  # files in it are memory
ALIGNED = 256  # bytes


def hold(weights: Mapping[str, Weight8], mesh: Mesh) -> dict[str, Callable[[], Tensor]]:
    """Return functions that return these weights before they were rounded, from memory of the host. Collective.

    weights: of layers that were loaded from files, the same on every rank. Where the host's shared memory is too small
    they are read from their files each time; rank 0 prints it. Raises ValueError alike on all ranks if a file does not
    load.
    """
    sources = {name: source for name, x in weights.items() if (source := x.source) is not None}
    like = {name: torch.empty(weights[name].shape, dtype=weights[name].dtype, device="meta") for name in sources}
    ends = [*accumulate((-(-x.nbytes // ALIGNED) * ALIGNED for x in like.values()), initial=0)]
    if not sources:
        return {}
    team = Team.of(mesh)
    memory = _shared(ends[-1], team, mesh)
    if memory is None:
        if mesh.is_main:
            room = f"{SHARED} has no {ends[-1] / 2**30:.1f} GiB for them"
            print(f"seqpar: a switch of LoRAs reads weights from their files, because {room}", flush=True)
        return sources

    places = {
        name: memory[start : start + x.nbytes].view(x.dtype).view(x.shape)
        for (name, x), start in zip(like.items(), ends, strict=False)
    }

    def read() -> None:
        for name in [*sources][team.rank :: team.size]:
            places[name].copy_(sources[name]())

    mesh.on_all_ranks(read)
    if mesh.device.type == "cuda":
        _lock(memory, mesh.device)
    return {name: partial(_as_it_is, place) for name, place in places.items()}


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


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
                if _identity(path) != mine:  # containers of one host's name may have folders of their own
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


def _lock(memory: Tensor, device: torch.device) -> None:
    # without it, copies to the GPU go through the driver's own buffer, at a third of the rate
    runtime: Any = torch.cuda.cudart()
    with torch.cuda.device(device):
        if (error := int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))) != 0:
            print(
                f"seqpar: memory of the originals is not page-locked (CUDA error {error}); LoRAs switch slower",
                flush=True,
            )
            return
        finalize(memory.untyped_storage(), runtime.cudaHostUnregister, memory.data_ptr()).atexit = False
