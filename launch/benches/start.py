"""Seconds of each part between the start of a process and its first picture, with empty kernel caches.

Each round starts two processes. One makes a picture of 25 steps from random weights. The other is the floor: the same
imports of torch and diffusers, the device, as many random weights, one matrix product and one attention, and no code of
seqpar. Both have empty caches of compiled kernels. The difference is the cost of seqpar.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from launch.benches.timing import append, command, environment, spread
from seqpar.pipelines.class_labels import Files

ROOT = Path(__file__).parents[2]
# caches of Triton, inductor, the driver, FlashAttention-4 and its packages; TMPDIR holds caches without a name
CACHES = (
    "TRITON_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "CUDA_CACHE_PATH",
    "CUTE_DSL_CACHE_DIR",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR",
    "QUACK_CACHE_DIR",
    "TVM_FFI_CACHE_DIR",
    "TMPDIR",
)


@dataclass(frozen=True)
class Start:
    """Time a process from its start to its first picture, with empty kernel caches."""

    model: str = "large-dit-7b"
    """A preset, at the size it was made for."""
    steps: int = 25
    """Denoising steps."""
    rounds: int = 3
    """Number of rounds; the medians are over rounds."""
    out: Path | None = None
    """Append JSON lines here."""


def main(args: Start) -> None:
    """Measure, print the timeline, append the line."""
    if args.steps < 2 or args.rounds < 1:
        raise ValueError(f"got --steps {args.steps} --rounds {args.rounds}, expected at least 2 and 1")
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ValueError(f"got {os.environ['WORLD_SIZE']} processes, expected one: start this bench without torchrun")
    line = measure(args, Files.locate(args.model))
    print(timeline(line), flush=True)
    append([line], args.out)


def measure(args: Start, files: Files) -> dict[str, Any]:
    """The JSON line: median seconds of each part, and totals, for ours and for the floor."""
    numels = [parameter.numel() for parameter in files.blueprint.meta().parameters()]
    floor = {"numels": numels, "width": max(64, files.blueprint.config.width // 64 * 64)}
    ours, bare = [], []
    for _ in range(args.rounds):
        with TemporaryDirectory() as folder:
            picture = {"model": args.model, "steps": args.steps, "out": f"{folder}/picture.png"}
            ours.append(child(picture, Path(folder) / "ours"))
            bare.append(child(floor, Path(folder) / "floor"))
    side = files.blueprint.config.sample_size // files.blueprint.config.patch_size
    case = {"model": args.model, "tokens": side**2, "steps": args.steps, "parameters": sum(numels)}
    case |= {key: ours[0][key] for key in ("dtype", "local")}
    return {
        "bench": "start",
        "case": case,
        "gpus": 1,
        "seconds": medians(ours),
        "total": totals(ours),
        "floor_seconds": medians(bare),
        "floor_total": totals(bare),
        "digest": ours[0]["digest"],
        "command": command(),
        "env": environment(torch.device(ours[0]["device"])),
    }


def child(what: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The JSON line that a new process prints, with empty caches in `folder`."""
    caches = {name: str(folder / name.lower()) for name in CACHES}
    for path in caches.values():
        Path(path).mkdir(parents=True)
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    start = [sys.executable, "-m", "launch.benches.first_picture", repr(time.monotonic()), json.dumps(what)]
    done = subprocess.run(
        start, capture_output=True, text=True, check=False, env={**os.environ, **caches, "PYTHONPATH": path}
    )
    if done.returncode:
        raise ValueError(f"got exit code {done.returncode} from the timed process, expected 0; it said:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def medians(rounds: list[dict[str, Any]]) -> dict[str, float]:
    """Median seconds of each part."""
    return {part: median(one["seconds"][part] for one in rounds) for part in rounds[0]["seconds"]}


def totals(rounds: list[dict[str, Any]]) -> dict[str, float]:
    """Median, least and most of the sum of all parts."""
    return spread([sum(one["seconds"].values()) for one in rounds])


def timeline(line: dict[str, Any]) -> str:
    """A table for people: each part beside the floor's."""
    case, floor = line["case"], line["floor_seconds"]
    rows = [
        f"{part:<18} {seconds:8.2f} s   floor {floor.get(part, 0.0):8.2f} s"
        for part, seconds in line["seconds"].items()
    ]
    ours, bare = line["total"], line["floor_total"]
    rows.append(
        f"{'total':<18} {ours['median']:8.2f} s   floor {bare['median']:8.2f} s   "
        f"ours {ours['median'] - bare['median']:.2f} s   ({ours['min']:.2f} - {ours['max']:.2f})"
    )
    return "\n".join([f"{case['model']}, {case['tokens']} tokens, {case['steps']} steps, {case['dtype']}", *rows])
