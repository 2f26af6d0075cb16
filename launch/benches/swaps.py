"""Models that requests swap on a server: seconds of each swap, and whether memory, files and threads stay flat.

    python launch/bench.py swaps --models builtin builtin-text --ranks 2 --swaps 50 --out lines.jsonl

One model is loaded at a time (`--loaded 1 --swap`), and each request names the next one.
"""

from __future__ import annotations

import signal
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from launch.benches.served import asked, processes, server, text_of, until_ready, used
from launch.benches.timing import append, command, environment

EVERY = 10  # swaps between two looks at the processes
PROMPTS = {"builtin": "cat"}  # other models take texts


@dataclass(frozen=True)
class Swaps:
    """Let requests swap the models of a server: seconds, memory, files and threads."""

    models: tuple[str, ...] = ("builtin", "builtin-text")
    """Models of `seqpar sample` that generate images."""
    ranks: int = 2
    """Number of ranks, on GPUs where the machine has them."""
    swaps: int = 50
    """Number of swaps."""
    steps: int = 4
    """Denoising steps of each image."""
    out: Path | None = None
    """Append JSON lines here."""


def main(args: Swaps) -> None:
    """Raises RuntimeError if an image has other bits after a swap than before."""
    images, swaps_s, lines = dict[str, str](), dict[str, list[float]](), list[dict[str, Any]]()
    with server(args.models, args.ranks, ["--loaded", "1", "--swap"]) as (process, port, _):
        until_ready(port)
        for number in range(args.swaps + 1):
            model = args.models[number % len(args.models)]
            body = {"model": model, "prompt": PROMPTS.get(model, "a red fox"), "seed": 1, "steps": args.steps}
            made = asked(port, body)
            if images.setdefault(model, made["data"][0]["b64_json"]) != made["data"][0]["b64_json"]:
                raise RuntimeError(f"the image of {model} has other bits after swap {number}")
            if number:
                swaps_s.setdefault(model, []).append(made["seqpar"]["seconds"]["swap"])
            if number % EVERY == 0:
                lines.append({"swaps": number, "gpu": _gpu(port), **_used(process.pid)})
                print(lines[-1], flush=True)
        process.send_signal(signal.SIGTERM)
        process.wait()
    seconds = {name: {"median": median(every), "most": max(every)} for name, every in swaps_s.items()}
    print(seconds, flush=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    line = {
        "bench": "swaps",
        "case": {**asdict(args), "out": None},
        "seconds": seconds,
        "every_s": swaps_s,
        "used": lines,
    }
    append([line | {"command": command(), "env": environment(device)}], args.out)


def _used(front: int) -> dict[str, list[list[int]]]:
    """[MiB, open files, threads] of the API server, and of each rank."""
    return {"front": [[*used(front).values()]], "ranks": [[*used(rank).values()] for rank in processes(front)]}


def _gpu(port: int) -> list[float]:
    """Bytes that each rank holds of its GPU, as the server's metrics have them; on CPUs those of its process."""
    return [
        float(x.split()[-1]) for x in text_of(port, "/metrics").splitlines() if x.startswith("seqpar_memory_bytes{")
    ]
