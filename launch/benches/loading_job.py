"""A process of `launch/bench.py loading`: write a pipeline's folder, or load it and print what that took.

python launch/benches/loading_job.py WAY MODEL FOLDER    # WAY: write, ours (one rank of torchrun) or theirs
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import torch

import seqpar
from launch.baselines.folders import saved
from seqpar.kernels import _quack
from seqpar.mesh.mesh import Mesh, default_dtype


def main(way: str, model: str, folder: Path) -> None:
    """Do what a command line names. The tiny pipeline lies beside the whole one."""
    device, tiny = torch.device("cuda" if torch.cuda.is_available() else "cpu"), folder.with_name(f"{folder.name}-tiny")
    if way == "write":
        saved(model, folder, default_dtype(device))
        saved(model, tiny, default_dtype(device), small=True)
        return
    mesh = Mesh.joined()
    torch.ones(1, device=mesh.device)
    load = _ours if way == "ours" else _diffusers
    (first, tiny_s), facts = _timed(load, tiny, mesh), {"rank": os.environ.get("RANK")}
    if way == "ours":
        seqpar.release(first)
    del first
    pipe, seconds = _timed(load, folder, mesh)
    assert all(x.device.type == device.type for x in pipe.transformer.parameters())
    gpu = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    print(json.dumps({"seconds": seconds, "tiny_s": tiny_s, "gpu_bytes": gpu, **facts}), flush=True)


def _timed(load: Callable[[Path], Any], folder: Path, mesh: Mesh) -> tuple[Any, float]:
    """Return a pipeline and the seconds from when all ranks are here until its weights lie on the device."""
    mesh.on_all_ranks(lambda: None)
    start = time.perf_counter()
    pipe = load(folder)
    if mesh.device.type == "cuda":
        torch.cuda.synchronize()
    return pipe, time.perf_counter() - start


def _ours(folder: Path) -> Any:
    """Load a pipeline; quack, which only the whole one looks for, is imported with the tiny one, as all else is."""
    _quack.load()
    return seqpar.load(folder)


def _diffusers(folder: Path) -> Any:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind: Any = diffusers.DiffusionPipeline  # pyright: ignore[reportPrivateImportUsage]
    return kind.from_pretrained(folder, torch_dtype=default_dtype(device), device_map=device.type)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
