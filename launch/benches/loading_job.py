"""A process of `launch/bench.py loading`: write a pipeline's folder, or load it and print what that took.

python launch/benches/loading_job.py WAY MODEL FOLDER    # WAY: write, ours (one rank of torchrun) or theirs
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import diffusers
import torch

import seqpar
from launch.baselines.folders import saved
from seqpar.ranks.mesh import Mesh, default_dtype


def main(way: str, model: str, folder: Path) -> None:
    """Do what a command line names."""
    if way == "write":
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        saved(model, folder, default_dtype(device))
    else:
        print(json.dumps(_ours(folder) if way == "ours" else _theirs(folder)), flush=True)


def _ours(folder: Path) -> dict[str, Any]:
    mesh = Mesh.joined()
    mesh.collect(float(torch.ones(1, device=mesh.device)), float)  # all ranks and their GPUs are ready
    start = time.perf_counter()
    pipe = seqpar.load(folder)
    return _facts(start, mesh.device, pipe)


def _theirs(folder: Path) -> dict[str, Any]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.ones(1, device=device)
    start = time.perf_counter()
    kind: Any = diffusers.DiffusionPipeline  # pyright: ignore[reportPrivateImportUsage]
    pipe = kind.from_pretrained(folder, torch_dtype=default_dtype(device), device_map=device.type)
    return _facts(start, device, pipe)


def _facts(start: float, device: torch.device, pipe: Any) -> dict[str, Any]:
    """Return the seconds since `start`, with the bytes that lie on a GPU and that a process has read since it began."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    assert all(x.device.type == device.type for x in pipe.transformer.parameters())
    read = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())["rchar"]
    gpu = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    return {"seconds": seconds, "gpu_bytes": gpu, "read_bytes": int(read), "rank": os.environ.get("RANK")}


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
