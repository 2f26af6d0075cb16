"""Meshes, inputs and a count of collectives that several tests use."""

from __future__ import annotations

import gc
import inspect
import re
import time
from collections import Counter
from collections.abc import Callable
from functools import cache, partial, wraps
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from seqpar.mesh.mesh import Mesh
from seqpar.mesh.shard import Tokens
from seqpar.planner.costs import exact_strategies, facts_of, strategies
from seqpar.planner.plan import load_strategy, load_transport
from seqpar.transports import _contract
from seqpar.transports._contract import Transport
from seqpar.types.protocols import Attend, Core


def ring_of(strategy: str, world: int) -> int:
    """Return the ring size on which a strategy is tested: both axes where it has both, or for 4 and 8 ranks."""
    axes = facts_of(strategy).axes
    if axes in (("ring",), ("ulysses",)):
        return world if axes == ("ring",) else 1
    return 2 if world % (2 if axes else 4) == 0 else 1


LAYOUTS = {name: partial(ring_of, name) for name in strategies()}
EXACT = exact_strategies()


TRANSPORTS = _contract.names()

# begins of the names of all public functions of torch.distributed that communicate with other ranks
TALKS = re.compile(
    "all_|barrier|batch_isend|broadcast|gather|irecv|isend|monitored_barrier|recv|reduce|scatter|send|"
    "new_group|new_subgroups|split_group"
)


@cache
def _mesh(group: object, device: torch.device, **axes: Any) -> Mesh:
    return Mesh.from_env(**axes, device=device)


forget = _mesh.cache_clear


def mesh(device: torch.device, **axes: int) -> Mesh:
    """Return the mesh of these axes, made once per process group because every mesh holds communicators."""
    return _mesh(dist.group.WORLD, device, **axes)


def mesh_for(strategy: str, world: int, device: torch.device, cfg: int = 1, data: int = 1) -> Mesh:
    """Return the mesh on which this strategy is tested."""
    rest = world // (cfg * data)
    return mesh(device, data=data, cfg=cfg, ring=ring_of(strategy, rest))


def refused(strategy: str, world: int, heads: int, kv_heads: int) -> str | None:
    """Return why a strategy cannot be tested with these heads on the mesh of `mesh_for`, as its file says, or None."""
    ring = ring_of(strategy, world)
    return facts_of(strategy).why_not(ring, world // ring, heads, kv_heads)


def random(
    shape: tuple[int, ...], seed: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float64
) -> Tensor:
    """Return random numbers that are the same on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(device, dtype)


def coded(batch: int, tokens: int, heads: int, dim: int, name: int) -> Tensor:
    """Return (B, L, H, D) in which every element encodes its own index, exactly in fp64."""
    count = batch * tokens * heads * dim
    return torch.arange(count, dtype=torch.float64).view(batch, tokens, heads, dim) + name * 10.0**9


def build(strategy: str, mesh: Mesh, tokens: Tokens, local: Core, transport: str | Transport = "collective") -> Attend:
    """Return a strategy's attention with this transport."""
    moves = load_transport(transport) if isinstance(transport, str) else transport
    return load_strategy(strategy).build(mesh, tokens, local, moves)


class Noted:
    """A transport of this name that notes its exchanges of keys and values, as its subclass made them."""

    def __init__(self, name: str) -> None:
        self.transport: Any = load_transport(name)
        self.made, make = list[Any](), self.transport._key_values
        self.transport._key_values = lambda *given: self.made.append(make(*given)) or self.made[-1]

    def as_in_a_graph(self) -> None:
        """Let exchanges by peer memory start as in a CUDA graph: eager ones wait for all ranks first."""
        for exchange in self.made:
            if hasattr(exchange, "open") and hasattr(exchange, "start_keys"):
                exchange.outboxes = lambda exchange=exchange: exchange.open(1, False)


def counted_calls(work: Callable[[], object]) -> dict[str, int]:
    """Count the calls that `work` makes to torch.distributed, without those that its functions make to each other."""
    counts: Counter[str] = Counter()
    inside: list[str] = []

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not inside:
                counts[name] += 1
            inside.append(name)
            try:
                return function(*args, **kwargs)
            finally:
                inside.pop()

        return call

    originals = talking()
    replaced = {name: counting(name, function) for name, function in originals.items()}
    # patch both modules, because batch_isend_irecv accepts only its own module's isend and irecv
    for name in originals:
        setattr(dist, name, replaced[name])
        setattr(distributed_c10d, name, replaced[name])
    try:
        work()
    finally:
        for name, function in originals.items():
            setattr(dist, name, function)
            setattr(distributed_c10d, name, function)
    return dict(counts)


def talking() -> dict[str, Callable[..., Any]]:
    """Return every public function of torch.distributed that communicates or makes process groups."""
    found = ((name, getattr(distributed_c10d, name)) for name in distributed_c10d.__all__ if TALKS.match(name))
    return {name: function for name, function in found if inspect.isfunction(function)}


def existing(kind: type) -> int:
    """Return how many objects of a class exist in this process."""
    gc.collect()
    return sum(type(each) is kind for each in gc.get_objects())


def comes(told: Path, limit_s: float = 20.0) -> bool:
    """Return whether another process makes a file within so many seconds."""
    end = time.monotonic() + limit_s
    while not told.exists() and time.monotonic() < end:
        time.sleep(0.001)
    return told.exists()
