"""Rows of `launch/benches/calls.py` for diffusers' own engine around its own modules.

Compiled modules are kept from the eager row to the graph's, because compiling takes a minute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from launch.baselines.transformers import (
    Parallel,
    backend_for,
    backends_kept,
    cached,
    classes_kept,
    compile_blocks,
    device_mesh,
    engine,
    parallels,
)
from launch.benches.calls import Case, Row, Timed
from launch.benches.timing import graphed

LAUNCHES = ("eager", "graph", "compiled blocks", "compiled blocks + graph")


def peers(case: Case) -> Iterator[Row]:
    """Yield diffusers' own engine: eager and with compiled blocks, each also in a CUDA graph.

    On an even number of ranks the fastest also computes both branches of true guidance, one call after the other.
    """
    model, on_gpu = case.model, case.mesh.device.type == "cuda"
    about = {"attention": backend_for(case.mesh.device, case.dtype)}
    for parallel in parallels(case.mesh.world.size, (model.tokens, *model.others), model.work.heads):
        made = cache(partial(_engine, case, parallel, cache(partial(device_mesh, parallel, case.mesh))))
        for launch in LAUNCHES:
            if on_gpu or launch in ("eager", "compiled blocks"):
                ready = partial(_peer, case, made, launch)
                name = f"{parallel.name}, {launch}"
                yield Row("peer", name, "ulysses", ready, about | {"engine": parallel.name, "launch": launch})
        if model.native and case.mesh.world.size % 2 == 0 and parallel.ulysses > 1:
            launch = LAUNCHES[-1] if on_gpu else "compiled blocks"
            name, both = (
                f"{parallel.name}, both branches, {launch}",
                {"engine": parallel.name, "launch": launch, "cfg": 1},
            )
            yield Row("peer", name, "ulysses", partial(_peer, case, made, launch, 2), about | both, branches=2)


def cache_dit(case: Case) -> Iterator[Row]:
    """Yield cache-dit's Ulysses (without caching) with compiled blocks in a CUDA graph, where the package is installed.

    It may come anywhere among the rows: what cache-dit replaces in diffusers is restored when its row ends.
    """
    if case.mesh.device.type == "cuda" and case.mesh.world.size > 1:
        launch = LAUNCHES[-1]
        about = {"engine": "cache-dit Ulysses", "launch": launch}
        yield Row("peer", f"cache-dit Ulysses, {launch}", "ulysses", partial(with_cache_dit, case, launch), about)


@contextmanager
def with_cache_dit(case: Case, launch: str) -> Iterator[Timed]:
    """Set cache-dit's row up; methods and backends of diffusers that it replaces are restored when the row ends."""
    case.truth.shape  # noqa: B018 (computed now, because diffusers' own call would fail while its methods are replaced)
    with (
        classes_kept(),
        backends_kept(),
        _peer(case, lambda _: cached(case.theirs, case.mesh.world.size), launch) as it,
    ):
        yield it


def _engine(case: Case, parallel: Parallel, ranks: Callable[[], DeviceMesh | None], compiled: bool) -> Any:
    """Return diffusers' module with its engine."""
    twin = engine(case.theirs, parallel, ranks(), case.mesh.device, case.dtype)
    if compiled:
        compile_blocks(twin)
    return twin


@contextmanager
def _peer(case: Case, made: Callable[[bool], Any], launch: str, branches: int = 1) -> Iterator[Timed]:
    module, keeps = made("compiled" in launch), Keeps(case, launch)
    step = keeps(partial(module, **case.arguments, return_dict=False))
    step()  # compile before the graph's warm-up: compiling tunes and loads on a stream of its own
    call = graphed(step) if "graph" in launch else step

    def every() -> None:
        for _ in range(branches):
            call()

    yield Timed(every, facts=keeps.facts)


class Keeps:
    """Keeps the last result of a call, to compare it with diffusers' on one rank when all is timed."""

    def __init__(self, case: Case, launch: str) -> None:
        self._case, self._launch = case, launch
        self.out: Tensor | None = None

    def __call__(self, work: Callable[[], Any]) -> Callable[[], object]:
        """Return the work without gradients; its first result is kept."""

        @torch.no_grad()
        def step() -> None:
            self.out = work()[0]

        return step

    def facts(self) -> dict[str, Any]:
        """Return the largest relative error of any rank's result."""
        assert self.out is not None
        truth = self._case.truth
        error = float((self.out.double() - truth.double()).norm() / truth.double().norm())
        return {"error": max(self._case.mesh.collect(error, float))}
