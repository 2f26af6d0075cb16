"""Calls of a parallelized diffusers transformer with changing pictures and prompts: memory must stay bounded.

It is the third part of `launch/benches/soak.py`. The transformer is FLUX.1 with few blocks and heads, computed once by
our own model and once by diffusers' modules. Each kind of call (tokens of the picture, tokens of the prompt) comes
three times in a row: on GPUs the second is captured as a CUDA graph and the third is replayed. The kind that came first
comes again in the end and must have the same bits; what was kept for it was freed meanwhile, if there were many kinds.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

import seqpar
from launch.benches.released import RELEASED, Released
from launch.benches.resident import memory
from seqpar.mesh import Mesh
from seqpar.sampling.loop import digest

WAYS = {"native": True, "generic": False}
SMALL = {"num_layers": 2, "num_single_layers": 2, "num_attention_heads": 4, "joint_attention_dim": 64}
ROWS, TEXT = range(8, 49, 4), (32, 77, 128, 512)  # of a picture's tokens, and a prompt's tokens
TIMES = 3  # that a kind comes in a row
Line = dict[str, Any]


def calls(count: int, dtype: torch.dtype, device: torch.device) -> Iterator[Line]:
    """Yield a line for each kind of call: seconds of its calls, the digest of the last result, memory afterwards.

    count: kinds of calls for each way to compute them; 0 does nothing.
    """
    if not count:
        return
    mesh, chosen = Mesh.from_env(cfg=1, device=device), kinds(count)
    for name, native in WAYS.items():
        model = small().build(dtype, device)
        seqpar.parallelize(model, mesh, native=native)
        for index, kind in enumerate([*chosen, chosen[0]]):
            start = time.perf_counter()
            bits, number = digest(called(model, kind, dtype, device)), chosen.index(kind)
            line = {"part": f"calls {name}", "picture": index, "kind": number, "time": 1 + index // len(chosen)}
            yield {**line, "seconds": time.perf_counter() - start, "digest": bits, **memory(mesh)}
        seqpar.release(model)


def small() -> Released:
    """Return FLUX.1 with few blocks and heads."""
    known = RELEASED["flux.1-dev"]
    return replace(known, config={**known.config, **SMALL})


def kinds(count: int) -> list[tuple[int, int, int]]:
    """(rows, columns, tokens of the prompt) of different kinds of calls, the largest first."""
    every = [(rows, columns, text) for rows in ROWS for columns in ROWS for text in TEXT]
    chosen = random.Random(2).sample(every, min(count, len(every)))
    largest = max(chosen, key=lambda kind: kind[0] * kind[1] + kind[2])
    return sorted(chosen, key=lambda kind: kind != largest)


def called(model: Any, kind: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Call a transformer several times and return the last result."""
    *size, text = kind
    inputs = replace(small(), size=tuple(size), text=text).arguments(dtype, device)
    with torch.no_grad():
        results = [model(**inputs, return_dict=False)[0] for _ in range(TIMES)]
    return results[-1]
