"""A program of torchrun's ranks: digests of calls in exact mode, by one rank alone and by all of them, as JSON lines.

The models have their released widths and tokens, random weights and two blocks of each kind.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch

import seqpar
from launch.baselines.released import RELEASED
from launch.baselines.transformers import shared_copy
from launch.benches.calls import Calls, Case, step_of
from launch.benches.rows import free
from seqpar.loop.loop import digest
from seqpar.mesh import exact
from seqpar.mesh.mesh import Mesh, default_dtype
from tests.support.meshes import EXACT, TRANSPORTS

MODELS = ("flux.1-dev", "qwen-image", "sd3.5-large", "wan2.1-14b")
LAYERS = 2
CALLS = 3  # the last one replays a graph


def main() -> None:
    """Compare all models; rank 0 prints a line for each, and for its blocks by functions and by their own forward."""
    exact.turn_on()
    mesh = Mesh.from_env(cfg=1)
    for name in MODELS:
        args = Calls(model=name, exact=True)
        case = Case(args, RELEASED[name].shortened(LAYERS), mesh, default_dtype(mesh.device))
        for native in (True, False):
            alone, others = bits(case, Mesh.single(mesh.device), native), dict(every(case, native))
            if mesh.is_main:
                line = {"model": name, "native": native, "alone": alone, "others": others}
                print(json.dumps(line), flush=True)
        del case
        free(mesh.device)


def every(case: Case, native: bool) -> Iterator[tuple[str, list[str]]]:
    """Yield each strategy and transport (of own forwards the first and the last), and the digests of all ranks."""
    ways = [(strategy, transport) for strategy in EXACT for transport in TRANSPORTS]
    for strategy, transport in ways if native else (ways[0], ways[-1]):
        mine = bits(case, case.mesh, native, strategy=strategy, transport=transport)
        yield f"{strategy}, {transport}", case.mesh.collect(mine, str)


@torch.no_grad()
def bits(case: Case, mesh: Mesh, native: bool, **chosen: Any) -> str:
    """Return the digest of the last of some calls."""
    module = shared_copy(case.theirs)
    seqpar.parallelize(module, mesh, native=native, **chosen)
    for _ in range(CALLS - 1):
        step_of(module, case, ("cond",))
    found = digest(step_of(module, case, ("cond",)))
    seqpar.release(module)
    return found


if __name__ == "__main__":
    main()
