"""How much memory a process and its GPU hold, for the soak."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import torch

from seqpar.mesh import Mesh


def memory(mesh: Mesh) -> dict[str, int]:
    """Bytes on the rank that has most: in torch's tensors, of the device as a whole (other ranks' mappings included),
    and resident on the host, once the device has done its work.
    """
    if mesh.device.type == "cuda":
        torch.cuda.synchronize(mesh.device)
    found = {"host": 0, "allocated": 0, "used": 0}
    with suppress(OSError):  # a system without /proc
        found["host"] = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    if mesh.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(mesh.device)
        found |= {"allocated": torch.cuda.memory_allocated(mesh.device), "used": total - free}
    every = mesh.collect(found, dict[str, int])
    return {name: max(each[name] for each in every) for name in found}
