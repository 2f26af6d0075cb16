"""What the ranks of one checkout run for `launch/benches/compare.py`: they time calls whenever a file asks them to.

It uses nothing of the project but what every version has: the checkout is the first on the path.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def main(folder: Path, model: str, calls: int) -> None:
    """Set the model up, then answer each `ask-N` in the folder by an `answer-N`."""
    from launch.benches.called import small
    from launch.benches.released import RELEASED
    from seqpar.adapter.parallelize import parallelize
    from seqpar.mesh import Mesh

    name, _, how = model.partition(":")
    mesh = Mesh.from_env(cfg=2 if how == "cfg" else 1)
    known, dtype = RELEASED.get(name) or replace(small(), size=(8, 8), text=32), torch.bfloat16
    module = known.build(dtype, mesh.device)
    parallelize(module, mesh, native=how != "generic")
    step = _step(module, known.arguments(dtype, mesh.device), how == "cfg")
    for _ in range(5):  # the second call of a kind is captured; pairs of branches are known after a step
        step()
    out = step()
    number = 0
    while True:
        while not (folder / f"ask-{number}").exists():
            time.sleep(0.01)
        dist.barrier()
        answer = {"ms": _ms(step, calls, mesh.device) if number else 0.0, "digest": _digest(out)}
        if dist.get_rank() == 0:  # noqa: TID251
            (folder / "part").write_text(json.dumps(answer))
            (folder / "part").rename(folder / f"answer-{number}")
        number += 1


def _step(module: Any, arguments: dict[str, Any], guided: bool) -> Callable[[], Tensor]:
    """Return a call of the transformer, or both calls of a guided step."""

    @torch.no_grad()
    def step() -> Tensor:
        branches, latents = [], arguments["hidden_states"].clone()  # new in each step, as in a pipeline
        for name in ("cond", "uncond") if guided else ("cond",):
            with module.cache_context(name):
                branches.append(module(**{**arguments, "hidden_states": latents}, return_dict=False)[0])
        return branches[0] if len(branches) == 1 else 2 * branches[0] - branches[1]

    return step


def _ms(step: Callable[[], Tensor], calls: int, device: torch.device) -> float:
    """Return the milliseconds of a step on this rank, host and device together."""
    wait = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    step()
    wait()
    start = time.perf_counter()
    for _ in range(calls):
        step()
    wait()
    return 1e3 * (time.perf_counter() - start) / calls


def _digest(x: Tensor) -> str:
    return hashlib.sha256(x.detach().cpu().float().contiguous().numpy().tobytes()).hexdigest()[:16]


if __name__ == "__main__":
    sys.path[0] = os.environ["PYTHONPATH"].split(os.pathsep)[0]
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
