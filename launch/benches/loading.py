"""Seconds until a pipeline's weights lie on every GPU: `seqpar.load` beside diffusers' fastest way.

    python launch/bench.py loading --model qwen-image --folder /tmp/qwen --ranks 2 --out lines.jsonl

The folder is written first, so that its files lie in the page cache. Each round starts new processes for either way,
which take turns. They first load a tiny pipeline of the same kind, whose seconds are those of imports, communicators
and small kernels; then the whole one. diffusers' processes know nothing of each other, as where each rank of its
context parallelism loads the pipeline.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import diffusers
import torch

import seqpar
from launch.baselines.pipelines import saved
from launch.benches.timing import record, spread
from seqpar.kernels import _quack
from seqpar.mesh.mesh import Mesh, default_dtype

ROOT = Path(__file__).parents[2]
RANKS = (sys.executable, "-m", "torch.distributed.run", "--standalone")
LIMIT_S = 300.0


@dataclass(frozen=True)
class Loading:
    """Time the loading of a whole pipeline on all ranks."""

    model: Literal["flux.1-dev", "qwen-image"] = "qwen-image"
    """The pipeline, of random weights."""
    folder: Path = Path("qwen-image")
    """Where it is written, unless it is there."""
    ranks: int = 2
    """Number of ranks, on GPUs where the machine has them."""
    rounds: int = 3
    """How often either way loads it."""
    out: Path | None = None
    """Append JSON lines here."""


def main(args: Loading) -> None:
    if args.ranks < 1 or args.rounds < 1:
        raise ValueError(f"got --ranks {args.ranks} --rounds {args.rounds}, expected at least 1")
    write(args.model, args.folder)
    names = (args.model, str(args.folder))
    found: dict[str, list[list[dict[str, Any]]]] = {"seqpar.load": [], "diffusers": []}
    for _ in range(args.rounds):
        found["seqpar.load"].append(_answers([_started([*RANKS, f"--nproc_per_node={args.ranks}"], ("ours", *names))]))
        each = [_started([sys.executable], ("theirs", *names), rank) for rank in range(args.ranks)]
        found["diffusers"].append(_answers(each))
    for way, rounds in found.items():
        _told(args, way, rounds)


def write(model: str, folder: Path) -> None:
    """Write a pipeline's folder unless it is there, by a separate process: afterwards no GPU holds anything of it."""
    _answers([_started([sys.executable], ("write", model, str(folder)))])


def _started(program: list[str], words: tuple[str, ...], gpu: int | None = None) -> subprocess.Popen[bytes]:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environ = {**os.environ, "PYTHONPATH": path, "HF_ENABLE_PARALLEL_LOADING": "yes"}
    if gpu is not None:
        environ["CUDA_VISIBLE_DEVICES"] = str(gpu)
    return subprocess.Popen([*program, __file__, *words], stdout=subprocess.PIPE, env=environ)


def _answers(processes: list[subprocess.Popen[bytes]]) -> list[dict[str, Any]]:
    said = [process.communicate(timeout=LIMIT_S)[0] for process in processes]
    if failed := [process for process in processes if process.returncode]:
        raise RuntimeError(f"got exit code {failed[0].returncode} of {failed[0].args}, expected 0")
    return [json.loads(line) for text in said for line in text.splitlines() if line.startswith(b'{"seconds"')]


def _told(args: Loading, way: str, rounds: list[list[dict[str, Any]]]) -> None:
    size = sum(file.stat().st_size for file in args.folder.rglob("*") if file.is_file())
    seconds = spread([max(rank["seconds"] for rank in ranks) for ranks in rounds])
    tiny = spread([max(rank["tiny_s"] for rank in ranks) for ranks in rounds])
    line = {"bench": "loading", "model": args.model, "ranks": args.ranks, "way": way, "bytes": size}
    record(line | {"seconds": seconds, "tiny_s": tiny, "rounds": rounds}, args.out)
    gpus = ", ".join(f"{rank['gpu_bytes'] / 2**30:.1f}" for rank in rounds[-1])
    shown = f"{seconds['median']:.2f} s ({seconds['min']:.2f} - {seconds['max']:.2f})"
    before = f"after a tiny one in {tiny['median']:.2f} s"
    print(f"{way}: {shown}, {before}; {size / 1e9:.2f} GB of files; GiB on each GPU: {gpus}", flush=True)


def job(way: str, model: str, folder: Path) -> None:
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
    job(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
