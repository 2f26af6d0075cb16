"""Rows of `launch/benches/calls.py` for `seqpar.parallelize`: diffusers' own modules, or our model on their weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from launch.baselines.transformers import compile_blocks, shared_copy
from launch.benches.calls import Case, Row, Timed
from launch.benches.peers import LAUNCHES, Keeps

CALLS = 3  # before timing: the second call is captured


def adapters(case: Case, strategies: Sequence[str], transport: str) -> Iterator[Row]:
    """Yield our rows around diffusers' module: its own modules, then our model on its weights."""
    chosen = strategies if case.mesh.sequence.size > 1 else strategies[:1]
    launches = LAUNCHES if case.mesh.device.type == "cuda" else ("eager", "compiled blocks")
    for strategy in chosen:
        for native in (False, True) if case.model.native else (False,):
            for launch in launches:
                if not (native and "compiled" in launch):  # ours is fast without
                    ready = partial(_parallelized, case, strategy, transport, launch, native)
                    name = f"{'adapter, native' if native else 'generic'}, {strategy}, {launch}"
                    yield Row("ours", name, strategy, ready, {"strategy": strategy, "launch": launch})


@contextmanager
def _parallelized(case: Case, strategy: str, transport: str, launch: str, native: bool) -> Iterator[Timed]:
    from seqpar.adapter.call import Call
    from seqpar.adapter.parallelize import install, parallelize, release

    module, alone = shared_copy(case.theirs), case.mesh.sequence.size == 1
    if "compiled" in launch:
        compile_blocks(module)
    moves = "auto" if alone else transport
    parallelize(module, case.mesh, strategy=strategy, local=case.local, transport=moves, native=native)
    try:
        body = module.forward.body
        if native and "native" not in type(body).__module__:
            raise ValueError(f"got {type(module).__name__} by the generic way, expected our native model")
        if "graph" not in launch:
            install(module, Call(module, case.mesh, body, None))
        keeps = Keeps(case, launch)
        step = keeps(partial(module, **case.arguments, return_dict=False))
        for _ in range(CALLS):
            step()
        yield Timed(step, module.forward.check_delivered, keeps.facts)
    finally:
        release(module)
