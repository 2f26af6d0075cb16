"""ms of a call of transformers that people run (FLUX, Qwen-Image, Wan), beside ceilings and other engines.

    torchrun --nproc_per_node=2 launch/bench.py calls --model flux.1-dev --strategy kv_first ulysses --out lines.jsonl

Our rows are `seqpar.parallelize` around diffusers' transformer: with our model or our blocks on its weights, with
diffusers' own modules, and with these compiled; on an even number of ranks also both branches of guidance on a cfg
axis. Peers (`launch/benches/peers.py`) are diffusers' own engine and cache-dit. The reference of a row is the ceiling
of its strategy: the matrix products and the attention of one rank alone, in one CUDA graph, without the products that
make the modulation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import seqpar
from launch.baselines.graphs import graphed
from launch.baselines.released import RELEASED, Released
from launch.baselines.transformers import compile_blocks, shared_copy
from launch.benches.ceiling import Share, ceiling, share
from launch.benches.rows import Flags, Line, Reference, Row, Timed, measure
from seqpar.families._find import CUTS, WORK
from seqpar.families._masks import JOINED
from seqpar.loop.loop import digest
from seqpar.mesh import exact
from seqpar.mesh.mesh import Mesh, default_dtype
from seqpar.planner.plan import choose_local
from seqpar.types.facts import Work

CALLS = 3  # before timing: the second call of a kind is captured, pairs of branches are known after a step
BRANCHES = ("cond", "uncond")


@dataclass(frozen=True)
class Calls(Flags):
    """Time calls of a released transformer with random weights on the running processes."""

    model: str = "flux.1-dev"
    """chroma1-hd, chroma1-hd-prompt (a text of 64 tokens, padded to 512), cogvideox-5b, flux.1-dev, flux.2-dev, flux.3,
    hunyuan-video, hunyuan-video-1.5, krea-2, krea-2-prompt (likewise), ltx-2, ltx-video-2b, ltx-video-13b, qwen-image,
    qwen-image-edit, sd3.5-large, z-image, wan2.1-14b, wan2.2-14b or wan2.2-ti2v-5b; on a machine without GPUs it has
    few blocks and heads."""
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
    """Local attention of our rows and of ceilings."""
    masked: bool = False
    """Mask the last quarter of the text as padding, in models whose calls take such a mask."""
    peers: bool = True
    """Also time the same calls by other engines."""
    exact: bool = False
    """Time the exact mode (seqpar/mesh/exact.py), with a digest of each result: equal digests are equal bits."""


@dataclass(frozen=True)
class Case:
    """A model, its inputs' sizes and the ranks that run it."""

    args: Calls
    model: Released
    mesh: Mesh
    dtype: torch.dtype

    @cached_property
    def work(self) -> Work:
        """Return the operations of a call."""
        return WORK[self.model.theirs](self.model.config, self.model.text)

    @cached_property
    def theirs(self) -> nn.Module:
        """Return diffusers' model with random weights."""
        return self.model.build(self.dtype, self.mesh.device)

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """Return the arguments of a call, the same on every rank."""
        arguments, text = self.model.arguments(self.dtype, self.mesh.device), self.model.text
        masks = CUTS[self.model.theirs].masks.items() if self.args.masked else ()
        for name, stream in masks:
            length = text + self.model.tokens * (stream == JOINED)
            index = torch.arange(length, device=self.mesh.device)[None]
            arguments[name] = (index < text - text // 4) | (index >= text)
        return arguments

    @cached_property
    def truth(self) -> Tensor:
        """Return the result of diffusers' model on one rank, as it comes."""
        with torch.no_grad():
            return first(self.theirs(**self.arguments, return_dict=False)[0])

    def ceiling(self, strategy: str) -> Reference:
        """Return the ceiling of a strategy, for one branch on all ranks."""
        mine = share(self.work, self.model.tokens, strategy, self.mesh, 1, self.model.others)
        mine = replace(mine, masked=self.args.masked)
        return Reference(f"ceiling of {strategy}", partial(_ceiling, self, mine))


def main(args: Calls) -> None:
    """Measure all token counts on the running processes; rank 0 prints and appends the lines."""
    if args.model not in RELEASED:
        raise ValueError(f"got --model {args.model}, expected one of {', '.join(RELEASED)}")
    if args.masked and not CUTS[RELEASED[args.model].theirs].masks:
        raise ValueError(f"got --masked for {args.model}, whose calls take no mask of padding; leave it out")
    if args.layers is not None and args.layers < 1:
        raise ValueError(f"got --layers {args.layers}, expected at least 1")
    args.check()
    if args.exact:
        exact.turn_on()
    from launch.benches.peers import cache_dit, peers  # they import this module

    device = Mesh.joined().device
    mesh, known = Mesh.from_env(cfg=1, device=device), RELEASED[args.model]
    for tokens in args.tokens or (None,):
        sized = known.sized(tokens, args.text) if device.type == "cuda" else known.small().sized(tokens, args.text)
        model = sized.shortened(args.layers)
        case = Case(args, model, mesh, default_dtype(device))
        rows = [*ours(case), *((*peers(case), *cache_dit(case)) if args.peers else ())]
        about = {"model": model.name, "tokens": model.tokens, "text": model.text, "dtype": str(case.dtype)[6:]}
        about |= {name: getattr(args, name) for name in ("masked", "exact", "layers") if getattr(args, name)}
        measure("calls", about, rows, mesh, args)
        torch._dynamo.reset()


# Ours -------------------------------------------------------------------------------------------------------------


def ours(case: Case) -> Iterator[Row]:
    """Yield our rows: each strategy by our kernels and by diffusers' own modules, then both branches of guidance."""
    world, on_gpu = case.mesh.world.size, case.mesh.device.type == "cuda"
    compiled = ["generic, compiled"] * (on_gpu and not case.args.exact)  # which exact mode refuses
    ways = ["fused blocks", "generic", *compiled]
    for strategy in case.args.strategy if world > 1 else case.args.strategy[:1]:
        for way in ways:
            about = {"strategy": strategy, "launch": way, "cfg": 1}
            yield Row("ours", f"{way}, {strategy}", partial(_ours, case, strategy, way), case.ceiling(strategy), about)
    if world % 2 == 0:
        strategy, way = case.args.strategy[0], ways[0]
        name, about = f"{way}, both branches on a cfg axis", {"strategy": strategy, "launch": way, "cfg": 2}
        yield Row("ours", name, partial(_ours, case, strategy, way, 2), case.ceiling(strategy), about, times=2)


@contextmanager
def _ours(case: Case, strategy: str, way: str, cfg: int = 1) -> Iterator[Timed]:
    """Parallelize a copy of diffusers' module, which shares its weights."""
    mesh = case.mesh if cfg == 1 else Mesh.from_env(cfg=2, device=case.mesh.device)
    module, alone = shared_copy(case.theirs), mesh.sequence.size == 1
    if "compiled" in way:
        compile_blocks(module)
    transport = "auto" if alone and cfg == 1 else case.args.transport
    chosen = {"local": case.args.local, "transport": transport, "native": not way.startswith("generic")}
    seqpar.parallelize(module, mesh, strategy="auto" if alone else strategy, **chosen)
    try:
        keeps = Keeps(case)
        step = keeps(partial(step_of, module, case, BRANCHES[:cfg]))
        for _ in range(CALLS):
            step()
        yield Timed.of(step, mesh.device, keeps.facts)
    finally:
        seqpar.release(module)


def step_of(module: Any, case: Case, names: tuple[str, ...]) -> Tensor:
    """Return the last result of a step: a call for each branch of guidance, on latents that are new in each step."""
    state, out = case.model.state, []
    fresh = {**case.arguments, state: tree_map(torch.clone, case.arguments[state])}
    for name in names:
        with module.cache_context(name) if hasattr(module, "cache_context") else nullcontext():  # SD3 has no such names
            out.append(first(module(**fresh, return_dict=False)[0]))
    return out[-1]


def first(result: Any) -> Tensor:
    """Return a transformer's result, or that of its first picture, if it returns a list of pictures."""
    return result[0] if isinstance(result, list) else result


class Keeps:
    """Keeps the last result of a step, to compare it with diffusers' on one rank when all is timed."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self.out: Tensor | None = None

    def __call__(self, work: Callable[[], Tensor]) -> Callable[[], object]:
        """Return the work without gradients; its last result is kept."""

        @torch.no_grad()
        def step() -> None:
            self.out = work()

        return step

    def facts(self) -> Line:
        """Return the largest relative error of any rank's result, and in exact mode a digest of this rank's."""
        assert self.out is not None
        truth = self._case.truth
        error = float((self.out.double() - truth.double()).norm() / truth.double().norm())
        bits = {"digest": digest(self.out)} if self._case.args.exact else {}
        return {"error": max(self._case.mesh.collect(error, float)), **bits}


# Ceilings ---------------------------------------------------------------------------------------------------------


@contextmanager
def _ceiling(case: Case, mine: Share) -> Iterator[Timed]:
    """Compute one rank's matrix products and attention alone."""
    device = case.mesh.device
    local = choose_local(case.args.local, device, case.dtype, case.work.head_dim, mine.masked).name
    step = ceiling(case.work, mine, local, case.dtype, device)
    yield Timed.of(graphed(step) if device.type == "cuda" else step, device)
