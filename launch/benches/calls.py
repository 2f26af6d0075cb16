"""ms of a call of transformers that people run (FLUX, Qwen-Image, Wan), beside ceilings and other engines.

    torchrun --nproc_per_node=2 launch/bench.py calls --model flux.1-dev --strategy kv_first ulysses --out lines.jsonl

Our rows are `seqpar.parallelize` around diffusers' transformer: with our blocks on its weights, and with diffusers' own
modules; on an even number of ranks also both branches of guidance on a cfg axis. Peers are diffusers' own engine and
cache-dit. The reference of a row is the ceiling of its strategy: the GEMMs and the attention of one rank alone, in one
CUDA graph, without the GEMMs of the modulation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import seqpar
from launch.baselines.released import RELEASED, Released
from launch.baselines.transformers import (
    backend_for,
    backends_kept,
    cached,
    classes_kept,
    compile_blocks,
    device_mesh,
    engine,
    engine_name,
    in_8_bits,
    shared_copy,
)
from launch.benches.ceiling import Share, ceiling, share
from launch.benches.rows import Flags, Line, Reference, Row, Timed, measure
from launch.benches.timing import graphed
from seqpar.families._find import CUTS, WORK
from seqpar.families._find import STEPS as STEPS_OF
from seqpar.families._masks import JOINED
from seqpar.loop.loop import digest
from seqpar.mesh import exact
from seqpar.mesh.mesh import Mesh, default_dtype
from seqpar.planner.plan import choose_local
from seqpar.transformer.calibration import Precision
from seqpar.transformer.step_cache import StepCache
from seqpar.types.facts import Work

CALLS = 3  # before timing: the second call of a kind is captured, pairs of branches are known after a step
BRANCHES = ("cond", "uncond")


@dataclass(frozen=True)
class Calls(Flags):
    """Time calls of a released transformer with random weights on the running processes."""

    model: str = "flux.1-dev"
    """chroma1-hd, chroma1-hd-prompt (a text of 64 tokens, padded to 512), cogvideox-5b, flux.1-dev, flux.2-dev, flux.3,
    hunyuan-video, hunyuan-video-1.5, krea-2, krea-2-prompt (likewise), ltx-2, ltx-video-2b, ltx-video-13b, minimax-h3,
    qwen-image, qwen-image-edit, sd3.5-large, z-image, wan2.1-14b, wan2.2-14b or wan2.2-ti2v-5b; on a machine without
    GPUs it has few blocks and heads."""
    tokens: tuple[int, ...] = ()
    """Tokens of pictures, if not the model's usual number; a count that is not a square gives nearly a square."""
    text: int | None = None
    """Number of text tokens, if not the model's usual one."""
    layers: int | None = None
    """Number of blocks of each kind, if not the model's own."""
    strategy: tuple[str, ...] = ("kv_first", "ulysses")
    """Strategies of our rows."""
    transport: str = "auto"
    """Transport of our rows."""
    local: str = "auto"
    """Local attention of our rows and of ceilings; fp8 adds rows to those of --precision fp8."""
    masked: bool = False
    """Mask the last quarter of the text as padding, in models whose calls take such a mask."""
    peers: bool = True
    """Also time the same calls by other engines."""
    precision: Precision | None = None
    """Time our fused blocks in this precision beside the weights' own, in place of diffusers' modules; peers with
    torchao's layers in 8 bits, compiled and in a graph."""
    cache: str | None = None
    """Time our fused blocks also with this step cache, as dbcache:head=4: every step computed, and every second one."""
    exact: bool = False
    """Time the exact mode (seqpar/mesh/exact.py), with a digest of each result: equal digests are equal bits."""


@dataclass(frozen=True)
class Case:
    """A model, its inputs' sizes and the ranks that run it."""

    args: Calls
    model: Released
    mesh: Mesh
    dtype: torch.dtype

    @property
    def wide_local(self) -> str:
        """The local attention in the weights' dtype."""
        return "auto" if self.args.local == "fp8" else self.args.local

    @cached_property
    def work(self) -> Work:
        return WORK[self.model.theirs](self.model.config, self.model.text)

    @cached_property
    def theirs(self) -> nn.Module:
        return self.model.build(self.dtype, self.mesh.device)

    @cached_property
    def arguments(self) -> dict[str, Any]:
        arguments, text = self.model.arguments(self.dtype, self.mesh.device), self.model.text
        masks = CUTS[self.model.theirs].masks.items() if self.args.masked else ()
        for name, stream in masks:
            length = text + self.model.tokens * (stream == JOINED)
            index = torch.arange(length, device=self.mesh.device)[None]
            arguments[name] = (index < text - text // 4) | (index >= text)
        return arguments

    @cached_property
    def truth(self) -> Tensor:
        with torch.no_grad():
            return first(self.theirs(**self.arguments, return_dict=False)[0])

    def ceiling(self, strategy: str) -> Reference:
        mine = share(self.work, self.model.tokens, strategy, self.mesh, 1, self.model.others)
        mine = replace(mine, masked=self.args.masked)
        return Reference(f"ceiling of {strategy}", partial(_ceiling, self, mine))


def main(args: Calls) -> None:
    if args.model not in RELEASED:
        raise ValueError(f"got --model {args.model}, expected one of {', '.join(RELEASED)}")
    if args.masked and not CUTS[RELEASED[args.model].theirs].masks:
        raise ValueError(f"got --masked for {args.model}, whose calls take no mask of padding; leave it out")
    if args.layers is not None and args.layers < 1:
        raise ValueError(f"got --layers {args.layers}, expected at least 1")
    args.check()
    if args.cache is not None:
        StepCache.of(args.cache)
    if args.exact:
        exact.turn_on()
    device = Mesh.joined().device
    mesh, known = Mesh.from_env(cfg=1, device=device), RELEASED[args.model]
    for tokens in args.tokens or (None,):
        sized = known.sized(tokens, args.text) if device.type == "cuda" else known.small().sized(tokens, args.text)
        model = sized.shortened(args.layers)
        case = Case(args, model, mesh, default_dtype(device))
        rows = [*ours(case), *((*peers(case), *cache_dit(case)) if args.peers else ())]
        about = {"model": model.name, "tokens": model.tokens, "text": model.text, "dtype": str(case.dtype)[6:]}
        about |= {name: getattr(args, name) for name in ("masked", "exact", "layers") if getattr(args, name)}
        measure("calls" if args.cache is None else "step cache", about, rows, mesh, args)
        torch._dynamo.reset()


# Ours -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """How our rows compute a call. local: None for the dtype of the weights; cache: with it a call makes two steps."""

    name: str
    native: bool = True
    precision: Precision | None = None
    local: str | None = None
    cache: StepCache | None = None


def ours(case: Case) -> Iterator[Row]:
    """Yield our rows: each strategy by our kernels and by diffusers' own modules, then both branches of guidance."""
    args, world, fused = case.args, case.mesh.world.size, [Way("fused blocks")]
    if (eight := args.precision) is not None:
        fused.append(Way(f"fused blocks, {eight}", precision=eight))
        fused += [Way(f"{fused[-1].name}, attention fp8", precision=eight, local="fp8")] if args.local == "fp8" else []
    ways = fused if eight is not None else [*fused, Way("generic", native=False)]
    for strategy in args.strategy if world > 1 else args.strategy[:1]:
        for way in ways:
            yield row(case, strategy, way, f"{way.name}, {strategy}")
        for way in fused if args.cache is not None else ():
            yield from with_step_cache(case, strategy, way)
    for way in fused if world % 2 == 0 else ():
        yield row(case, args.strategy[0], way, f"{way.name}, both branches on a cfg axis", BRANCHES, 2)


def with_step_cache(case: Case, strategy: str, way: Way) -> Iterator[Row]:
    """Yield a row for each schedule of a step cache: two steps of one call, and of two (the branches of guidance)."""
    cache = case.args.cache
    assert cache is not None
    for schedule, mask in {"each step computed": "1", "every second step computed": "10"}.items():
        for calls in (1, 2):
            name = f"{way.name}, {strategy}, {cache}, {schedule}" + (", two calls per step" if calls > 1 else "")
            about = {"launch": schedule, "cache": cache, "calls": calls}
            cached = replace(way, cache=replace(StepCache.of(cache), mask=mask))
            yield row(case, strategy, cached, name, BRANCHES[:calls], **about)


def row(
    case: Case, strategy: str, way: Way, name: str, branches: tuple[str, ...] = BRANCHES[:1], cfg: int = 1, **more: Any
) -> Row:
    about = {"strategy": strategy, "launch": way.name, "cfg": cfg}
    about |= {name: getattr(way, name) for name in ("precision", "local") if getattr(way, name) is not None}
    times = len(branches) * (1 if way.cache is None else 2)
    ready = partial(_ours, case, strategy, way, branches, cfg)
    return Row("ours", name, ready, case.ceiling(strategy), about | more, times)


STEPS = 1 << 16  # of a run; more than are timed


@contextmanager
def _ours(case: Case, strategy: str, way: Way, branches: tuple[str, ...], cfg: int) -> Iterator[Timed]:
    mesh = case.mesh if cfg == 1 else Mesh.from_env(cfg=2, device=case.mesh.device)
    module, steps = shared_copy(case.theirs), count()
    alone, time = mesh.sequence.size == 1, STEPS_OF[case.model.theirs].time if way.cache is not None else ""
    seqpar.parallelize(
        module,
        mesh,
        strategy="auto" if alone else strategy,
        transport="auto" if alone and cfg == 1 else case.args.transport,
        local=way.local or case.wide_local,
        native=way.native,
        precision=way.precision,
        calibrate=None if way.precision is None else lambda: module(**case.arguments),
        cache=way.cache,
    )

    def call() -> Tensor:
        if way.cache is None:
            return step_of(module, case, branches)
        out = torch.empty(0)
        for _ in range(2):  # each step has another timestep, as in a run
            now = case.arguments[time].float() * (1 - next(steps) / STEPS)
            out = step_of(module, case, branches, {time: now})
        return out

    try:
        keeps = Keeps(case)
        step = keeps(call)
        for _ in range(CALLS):
            step()
        yield Timed.of(step, mesh.device, keeps.facts)
    finally:
        seqpar.release(module)


def step_of(module: Any, case: Case, names: tuple[str, ...], more: Mapping[str, Any] | None = None) -> Tensor:
    state, out = case.model.state, []
    fresh = {**case.arguments, **(more or {}), state: tree_map(torch.clone, case.arguments[state])}
    for name in names:
        with module.cache_context(name) if hasattr(module, "cache_context") else nullcontext():  # SD3 has no such names
            out.append(first(module(**fresh, return_dict=False)[0]))
    return out[-1]


def first(result: Any) -> Tensor:
    """A transformer's result, or that of its first picture, if it returns a list of pictures."""
    return result[0] if isinstance(result, list) else result


class Keeps:
    """Keeps the last result of a step, to compare it with diffusers' on one rank when all is timed."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self.out: Tensor | None = None

    def __call__(self, work: Callable[[], Tensor]) -> Callable[[], object]:

        @torch.no_grad()
        def step() -> None:
            self.out = work()

        return step

    def facts(self) -> Line:
        assert self.out is not None
        truth = self._case.truth
        error = float((self.out.double() - truth.double()).norm() / truth.double().norm())
        bits = {"digest": digest(self.out)} if self._case.args.exact else {}
        return {"error": max(self._case.mesh.collect(error, float)), **bits}


# Ceilings ---------------------------------------------------------------------------------------------------------


@contextmanager
def _ceiling(case: Case, mine: Share) -> Iterator[Timed]:
    device = case.mesh.device
    local = choose_local(case.wide_local, device, case.dtype, case.work.head_dim, mine.masked).name
    step = ceiling(case.work, mine, local, case.dtype, device)
    yield Timed.of(graphed(step) if device.type == "cuda" else step, device)


LAUNCHES = ("eager", "graph", "compiled blocks", "compiled blocks + graph")
TORCHAO = " + torchao fp8"


def peer_launches(case: Case) -> tuple[str, ...]:
    """Return how engines are launched here, the fastest last."""
    if case.args.precision is not None:
        return LAUNCHES[-1:] if case.mesh.device.type == "cuda" else ()
    return LAUNCHES if case.mesh.device.type == "cuda" else LAUNCHES[:1]


def peers(case: Case) -> Iterator[Row]:
    """Yield diffusers' own engine: eager and with compiled blocks, each also in a CUDA graph; in 8 bits the fastest.

    On several GPUs the fastest also computes both branches of true guidance, one call after the other.
    """
    eight, launches = case.args.precision is not None, peer_launches(case)
    model, mesh, on_gpu = case.model, case.mesh, case.mesh.device.type == "cuda"
    split = engine_name(mesh.world.size, (model.tokens, *model.others, case.work.heads))
    name = split + (TORCHAO if eight else "")
    about = {"attention": backend_for(mesh.device, case.dtype), "engine": name}
    ranks, reference = cache(partial(device_mesh, mesh)), case.ceiling("ulysses")

    @cache  # compiling takes a minute: the row in a graph uses the module of the row without
    def made(compiled: bool) -> Any:
        theirs = in_8_bits(case.theirs) if eight else case.theirs
        twin = engine(theirs, split, ranks(), mesh.device, case.dtype)
        if compiled:
            compile_blocks(twin)
        return twin

    for launch in launches:
        ready = partial(_peer, case, made, launch)
        yield Row("peer", f"{name}, {launch}", ready, reference, about | {"launch": launch})
    if on_gpu and mesh.world.size % 2 == 0 and not eight:
        ready = partial(_peer, case, made, LAUNCHES[-1], 2)
        yield Row("peer", f"{name}, both branches, {LAUNCHES[-1]}", ready, reference, about | {"cfg": 1}, times=2)


def cache_dit(case: Case) -> Iterator[Row]:
    """Yield cache-dit's Ulysses (without caching) with compiled blocks, without a CUDA graph and in one.

    No graph can hold a forward that copies from the host, as Chroma's. The rows exist where the package is installed,
    and may come anywhere among others: what cache-dit replaces in diffusers is restored when a row ends.
    """
    name = "cache-dit Ulysses" + ("" if case.args.precision is None else TORCHAO)
    for launch in peer_launches(case)[-2:] if case.mesh.device.type == "cuda" and case.mesh.world.size > 1 else ():
        about = {"engine": name, "launch": launch}
        ready = partial(with_cache_dit, case, launch)
        yield Row("peer", f"{name}, {launch}", ready, case.ceiling("ulysses"), about)


@contextmanager
def with_cache_dit(case: Case, launch: str) -> Iterator[Timed]:
    """Set cache-dit's row up; methods and backends of diffusers that it replaces are restored when the row ends."""
    case.truth.shape  # noqa: B018 (computed now, because diffusers' own call would fail while its methods are replaced)
    theirs = case.theirs if case.args.precision is None else in_8_bits(case.theirs)
    with classes_kept(), backends_kept(), _peer(case, lambda _: cached(theirs, case.mesh.world.size), launch) as ready:
        yield ready


@contextmanager
def _peer(case: Case, twins: Callable[[bool], Any], launch: str, branches: int = 1) -> Iterator[Timed]:
    """Call another engine's module; branches: how often in a step."""
    module, keeps = twins("compiled" in launch), Keeps(case)
    step = keeps(lambda: first(module(**case.arguments, return_dict=False)[0]))
    step()  # compile before the graph's warm-up: compiling tunes and loads on its own stream
    call = graphed(step) if "graph" in launch else step

    def every() -> None:
        for _ in range(branches):
            call()

    yield Timed.of(every, case.mesh.device, keeps.facts)
