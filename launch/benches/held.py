"""Replays of a step's graph while ranks are held up at random: each time round the state must have the same bits.

It is the last part of `launch/benches/soak.py`. A rank is held up by a kernel that only waits, queued between two
steps, so that the other ranks' kernels wait for its blocks in the middle of a graph; on CPUs by a sleep.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import torch

from seqpar.engine.distributed import DistributedDiT
from seqpar.mesh import Mesh
from seqpar.pipelines.class_labels import BUILTIN, Files
from seqpar.planner.costs import strategies
from seqpar.sampling.guidance import Guidance
from seqpar.sampling.loop import digest, draw_noise
from seqpar.sampling.request import Request
from seqpar.sampling.run import Run, begin
from seqpar.transports import _folder

STEPS = 25
LONGEST_S = 2e-3  # for which a rank is held up; several steps of this model
CYCLES_A_S = 1.8e9  # of a GPU's clock
SHARE = 0.05  # of the steps before which a rank is held up
Line = dict[str, Any]


def replays(count: int, dtype: torch.dtype, device: torch.device) -> Iterator[Line]:
    """Yield a line for each strategy and transport on all ranks: how often the state had other bits after its steps.

    count: steps, of which the last round of 25 is completed; 0 does nothing.
    """
    world = Mesh.joined(device).world.size if count else 0
    for strategy, facts in strategies().items():
        for ring in (ring for ring in range(1, world + 1) if world % ring == 0):
            if not facts.names(ring, world // ring):
                continue
            mesh = Mesh.from_env(cfg=1, ring=ring, ulysses=world // ring, device=device)
            for transport in _folder.names():
                yield held(mesh, strategy, transport, -(-count // STEPS), dtype)


def held(mesh: Mesh, strategy: str, transport: str, rounds: int, dtype: torch.dtype) -> Line:
    """The line of one strategy and transport."""
    model = Files.locate(BUILTIN).blueprint.build(dtype, mesh.device)
    dit = DistributedDiT(model, mesh, strategy, "auto", transport)
    run, captured = started(dit)
    start, delays, differ = time.perf_counter(), random.Random(mesh.world.rank), torch.zeros_like(run.tokens[0, 0, 0])
    first = None
    for _ in range(rounds):
        run.rewind()
        for _ in range(STEPS):
            if delays.random() < SHARE:
                hold_up(mesh.device, delays.random() * LONGEST_S)
            run.step()
        first = run.tokens.clone() if first is None else first
        differ += (run.tokens != first).any()
    dit.check_delivered()
    others, seconds = max(mesh.collect(int(differ), int)), time.perf_counter() - start
    found = {"bits": 1 + others, "digest": digest(run.latents()), "seconds": seconds, "graph": captured}
    run.release()
    dit.release()
    layout = {"ring": mesh.ring.size, "ulysses": mesh.ulysses.size}
    return {
        "part": "replays",
        "strategy": strategy,
        **layout,
        "transport": transport,
        "replays": rounds * STEPS,
        **found,
    }


def started(dit: DistributedDiT) -> tuple[Run, bool]:
    """(a guided run of the model's own size, whether its step is a graph)."""
    config = dit.config
    noise = draw_noise((1, config.in_channels, *[config.sample_size] * 2), torch.Generator().manual_seed(0))
    scheduler = Files.locate(BUILTIN).schedule(None, STEPS)
    with torch.no_grad():
        run = begin(dit, Request(scheduler, noise, {"class_labels": torch.tensor([7])}, STEPS, Guidance(4.0)))
        if run.why_no_graph is None:
            run.capture()
    return run, run.why_no_graph is None


def hold_up(device: torch.device, seconds: float) -> None:
    """Let this rank do nothing for a while, on the device where there is a GPU."""
    if device.type == "cuda":
        torch.cuda._sleep(int(seconds * CYCLES_A_S))
    else:
        time.sleep(seconds)
