"""Rows of `launch/benches/calls.py` for diffusers' own engine around its own modules, and for cache-dit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

from launch.baselines.graphs import graphed
from launch.baselines.transformers import (
    backend_for,
    backends_kept,
    cached,
    classes_kept,
    compile_blocks,
    device_mesh,
    engine,
    engine_name,
)
from launch.benches.calls import Case, Keeps, first
from launch.benches.rows import Row, Timed

LAUNCHES = ("eager", "graph", "compiled blocks", "compiled blocks + graph")


def peers(case: Case) -> Iterator[Row]:
    """Yield diffusers' own engine: eager and with compiled blocks, each also in a CUDA graph.

    On several GPUs the fastest also computes both branches of true guidance, one call after the other.
    """
    model, mesh, on_gpu = case.model, case.mesh, case.mesh.device.type == "cuda"
    name = engine_name(mesh.world.size, (model.tokens, *model.others, case.work.heads))
    about = {"attention": backend_for(mesh.device, case.dtype), "engine": name}
    ranks, reference = cache(partial(device_mesh, mesh)), case.ceiling("ulysses")

    @cache  # compiling takes a minute: the row in a graph uses the module of the row without
    def made(compiled: bool) -> Any:
        twin = engine(case.theirs, name, ranks(), mesh.device, case.dtype)
        if compiled:
            compile_blocks(twin)
        return twin

    for launch in LAUNCHES if on_gpu else LAUNCHES[:1]:
        ready = partial(_peer, case, made, launch)
        yield Row("peer", f"{name}, {launch}", ready, reference, about | {"launch": launch})
    if on_gpu and mesh.world.size % 2 == 0:
        ready = partial(_peer, case, made, LAUNCHES[-1], 2)
        yield Row("peer", f"{name}, both branches, {LAUNCHES[-1]}", ready, reference, about | {"cfg": 1}, times=2)


def cache_dit(case: Case) -> Iterator[Row]:
    """Yield cache-dit's Ulysses (without caching) with compiled blocks, without a CUDA graph and in one.

    No graph can hold a forward that copies from the host, as Chroma's. The rows exist where the package is installed,
    and may come anywhere among others: what cache-dit replaces in diffusers is restored when a row ends.
    """
    for launch in LAUNCHES[2:] if case.mesh.device.type == "cuda" and case.mesh.world.size > 1 else ():
        about = {"engine": "cache-dit Ulysses", "launch": launch}
        ready = partial(with_cache_dit, case, launch)
        yield Row("peer", f"cache-dit Ulysses, {launch}", ready, case.ceiling("ulysses"), about)


@contextmanager
def with_cache_dit(case: Case, launch: str) -> Iterator[Timed]:
    """Set cache-dit's row up; methods and backends of diffusers that it replaces are restored when the row ends."""
    case.truth.shape  # noqa: B018 (computed now, because diffusers' own call would fail while its methods are replaced)
    with (
        classes_kept(),
        backends_kept(),
        _peer(case, lambda _: cached(case.theirs, case.mesh.world.size), launch) as ready,
    ):
        yield ready


@contextmanager
def _peer(case: Case, twins: Callable[[bool], Any], launch: str, branches: int = 1) -> Iterator[Timed]:
    """Call another engine's module; branches: how often in a step."""
    module, keeps = twins("compiled" in launch), Keeps(case)
    step = keeps(lambda: first(module(**case.arguments, return_dict=False)[0]))
    step()  # compile before the graph's warm-up: compiling tunes and loads on a stream of its own
    call = graphed(step) if "graph" in launch else step

    def every() -> None:
        for _ in range(branches):
            call()

    yield Timed.of(every, case.mesh.device, keeps.facts)
