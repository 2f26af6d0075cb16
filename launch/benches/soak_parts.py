"""What a soak runs beside pictures: calls of a parallelized transformer, and replays while ranks are held up.

Both are parts of `launch/benches/soak.py`, which judges their lines.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from diffusers.schedulers.scheduling_ddim import DDIMScheduler
from torch import Tensor

import seqpar
from launch.baselines.released import RELEASED, Released
from seqpar.loop.distributed import DistributedDiT
from seqpar.loop.loop import Sampler, digest, draw_noise
from seqpar.mesh.mesh import Mesh
from seqpar.pipelines.classes import BUILTIN, DDIM_DEFAULT, Files
from seqpar.planner.costs import strategies
from seqpar.transports import _folder
from seqpar.types.guidance import Guidance

WAYS = {"fused": True, "generic": False}
ROWS, TEXT = range(8, 49, 4), (32, 77, 128, 512)  # of a picture's tokens, and a prompt's tokens
TIMES = 3  # that a kind of call comes in a row: on GPUs the second is captured and the third is replayed
STEPS = 25
LONGEST_S = 2e-3  # for which a rank is held up; several steps of the built-in model
CYCLES_A_S = 1.8e9  # of a GPU's clock
SHARE = 0.05  # of the steps after which a rank is held up
Line = dict[str, Any]


def memory(mesh: Mesh) -> dict[str, int]:
    """Bytes on the rank that has most: in torch's tensors, of the device as a whole (other ranks' mappings included),
    and resident on the host, once the device has done its work.
    """
    held = {"host": 0, "allocated": 0, "used": 0}
    with suppress(OSError):  # a system without /proc
        held["host"] = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    if mesh.device.type == "cuda":
        torch.cuda.synchronize(mesh.device)
        free, total = torch.cuda.mem_get_info(mesh.device)
        held |= {"allocated": torch.cuda.memory_allocated(mesh.device), "used": total - free}
    every = mesh.collect(held, dict[str, int])
    return {name: max(each[name] for each in every) for name in held}


# Calls ------------------------------------------------------------------------------------------------------------


def calls(count: int, dtype: torch.dtype, device: torch.device) -> Iterator[Line]:
    """Yield a line for each kind of call: seconds of its calls, the digest of the last result, memory afterwards.

    The transformer is FLUX.1 with few blocks and heads, computed once by fused blocks and once by diffusers' own.
    The kind that came first comes again in the end and must have the same bits; what was kept for it was freed
    meanwhile, if there were many kinds. count: kinds of calls for each way to compute them; 0 does nothing.
    """
    if not count:
        return
    mesh, chosen = Mesh.from_env(cfg=1, device=device), kinds(count)
    for name, native in WAYS.items():
        known = RELEASED["flux.1-dev"].small()
        model = known.build(dtype, device)
        seqpar.parallelize(model, mesh, native=native)
        for index, kind in enumerate([*chosen, chosen[0]]):
            start = time.perf_counter()
            bits, number = digest(_called(model, known, kind)), chosen.index(kind)
            line = {"part": f"calls {name}", "picture": index, "kind": number, "time": 1 + index // len(chosen)}
            yield {**line, "seconds": time.perf_counter() - start, "digest": bits, **memory(mesh)}
        seqpar.release(model)


def kinds(count: int) -> list[tuple[int, int, int]]:
    """(rows, columns, tokens of the prompt) of different kinds of calls, the largest first."""
    every = [(rows, columns, text) for rows in ROWS for columns in ROWS for text in TEXT]
    chosen = random.Random(2).sample(every, min(count, len(every)))
    largest = max(chosen, key=lambda kind: kind[0] * kind[1] + kind[2])
    return sorted(chosen, key=lambda kind: kind != largest)


@torch.no_grad()
def _called(model: Any, known: Released, kind: tuple[int, int, int]) -> Tensor:
    """Call a transformer several times and return the last result."""
    weight = next(model.parameters())
    inputs = replace(known, size=kind[:2], text=kind[2]).arguments(weight.dtype, weight.device)
    return [model(**inputs, return_dict=False)[0] for _ in range(TIMES)][-1]


# Replays ----------------------------------------------------------------------------------------------------------


def replays(count: int, dtype: torch.dtype, device: torch.device) -> Iterator[Line]:
    """Yield a line for each strategy and transport on all ranks: how often a run of 25 steps had other bits.

    A rank is held up by a kernel that only waits, queued between two steps, so that the other ranks' kernels wait for
    its blocks in the middle of a graph; on CPUs by a sleep. count: steps, of which the last run is completed; 0 does
    nothing.
    """
    world = Mesh.joined(device).world.size if count else 0
    for strategy, facts in strategies().items():
        for ring in (ring for ring in range(1, world + 1) if world % ring == 0):
            if not facts.names(ring, world // ring):
                continue
            mesh = Mesh.from_env(cfg=1, ring=ring, ulysses=world // ring, device=device)
            for transport in _folder.names():
                yield _held(mesh, strategy, transport, -(-count // STEPS), dtype)


def _held(mesh: Mesh, strategy: str, transport: str, runs: int, dtype: torch.dtype) -> Line:
    """Return the line of one strategy and transport: guided runs of the built-in model at its own size."""
    model = Files.locate(BUILTIN).blueprint.build(dtype, mesh.device)
    dit = DistributedDiT(model, mesh, strategy, "auto", transport)
    noise = draw_noise((1, dit.config.in_channels, *[dit.config.sample_size] * 2), torch.Generator().manual_seed(0))
    delays, digests, start = random.Random(mesh.world.rank), set[str](), time.perf_counter()

    def on_step(index: int) -> None:
        if delays.random() < SHARE:
            _hold_up(mesh.device, delays.random() * LONGEST_S)

    with Sampler(dit) as sampler:
        for _ in range(runs):
            scheduler, labels = DDIMScheduler.from_config(DDIM_DEFAULT), {"class_labels": torch.tensor([7])}
            told = {"steps": STEPS, "guidance": Guidance(4.0), "on_step": on_step}
            digests.add(digest(sampler(scheduler, noise, labels, **told)))
    dit.check_delivered()
    dit.release()
    about = {"part": "replays", "strategy": strategy, "ring": mesh.ring.size, "ulysses": mesh.ulysses.size}
    about |= {"transport": transport, "replays": runs * STEPS, "graph": mesh.device.type == "cuda"}
    about["bits"] = max(mesh.collect(len(digests), int))
    return about | {"digest": min(digests), "seconds": time.perf_counter() - start}


def _hold_up(device: torch.device, seconds: float) -> None:
    """Let this rank do nothing for a while, on the device where there is a GPU."""
    if device.type == "cuda":
        torch.cuda._sleep(int(seconds * CYCLES_A_S))
    else:
        time.sleep(seconds)
