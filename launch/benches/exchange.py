"""ms of one exchange of an attention layer: each of our transports beside a plain collective of as many bytes.

    torchrun --nproc_per_node=4 launch/bench.py exchange --out lines.jsonl

The moves are: q, k and v to the ranks that own their heads (ulysses in), the output back to the ranks that own its
tokens (ulysses back), and keys and values to all ranks (kv gather). Ours are made as a strategy makes them, by the
kernels that write into the readers' buffers; the reference is a bare collective, which moves as many bytes in a layout
that attention could not read. MB are the MiB that a rank writes, its own part included. On GPUs all are timed in CUDA
graphs of several exchanges, as in a denoising step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

import seqpar.transports
from launch.benches.rows import Flags, Line, Reference, Row, Timed, measure
from launch.benches.timing import elapsed, graphed
from seqpar.attention._streams import into as into_outboxes
from seqpar.kernels.push import push
from seqpar.mesh.mesh import Axis, Mesh, default_dtype
from seqpar.planner.plan import choose_transport, load_transport
from seqpar.transports._contract import Transport
from seqpar.transports._exchanges import HeadLayout
from seqpar.types.plugins import plugins
from seqpar.types.protocols import Prepare

MOVES = ("ulysses in", "ulysses back", "kv gather")
GRAPH_CALLS = 20  # exchanges in a graph, about as many as in a step, so that the launch costs each as little
Move = Callable[[], object]


@dataclass(frozen=True)
class Exchange(Flags):
    """Time the exchanges of an attention layer by our transports beside plain collectives."""

    megabytes: tuple[float, ...] = (0.25, 1, 4, 16, 64, 256)
    """MiB that a rank writes, including its own part."""
    batch: int = 1
    """Batch rows; two if both guidance branches are in the batch."""
    heads: int = 32
    """Number of query heads, and of key-value heads."""
    head_dim: int = 128
    """Width of each head."""


def main(args: Exchange) -> None:
    world = Mesh.joined()
    check(args, world.world.size)
    mesh = Mesh.from_env(cfg=1, device=world.device)
    for move in MOVES:
        for size in args.megabytes:
            layout, about = _layout(args, mesh, move, size)
            with torch.no_grad():
                measure("exchange", about, rows(mesh, move, layout), mesh, args)


def check(args: Exchange, world: int) -> None:
    if world < 2:
        raise ValueError("got 1 process, expected at least 2; start with torchrun --nproc_per_node=2")
    args.check()
    if min(args.batch, args.heads, args.head_dim) < 1 or not args.megabytes or min(args.megabytes) <= 0:
        told = f"--batch {args.batch} --heads {args.heads} --head-dim {args.head_dim} --megabytes {args.megabytes}"
        raise ValueError(f"got {told}, expected at least 1 of each, and sizes over 0")


def _layout(args: Exchange, mesh: Mesh, move: str, megabytes: float) -> tuple[HeadLayout, Line]:
    dtype, ranks = default_dtype(mesh.device), mesh.world.size
    parts = {"ulysses in": 3, "ulysses back": 1, "kv gather": 2 * ranks}[move]  # tensors of a rank's tokens
    row_bytes = parts * args.batch * args.heads * args.head_dim * dtype.itemsize
    tokens = max(1, round(megabytes * 2**20 / row_bytes))
    layout = HeadLayout(args.batch, (tokens,) * ranks, args.heads, args.heads, args.head_dim, dtype, mesh.device)
    about = {"move": move, "mb": megabytes, "bytes": tokens * row_bytes, "tokens": tokens, "batch": args.batch}
    return layout, about | {"heads": args.heads, "head_dim": args.head_dim, "dtype": str(dtype).removeprefix("torch.")}


def rows(mesh: Mesh, move: str, layout: HeadLayout) -> Iterator[Row]:
    reference = Reference("bare", partial(_bare, mesh, move, layout))
    for name in plugins(seqpar.transports):
        yield Row("ours", f"{move}, {name}", partial(_ours, mesh, move, layout, name), reference, {"transport": name})


@contextmanager
def _ours(mesh: Mesh, move: str, layout: HeadLayout, name: str) -> Iterator[Timed]:
    choose_transport(name, mesh)
    transport: Transport = load_transport(name)
    try:
        yield _timed(ours(move, transport, mesh.sequence, layout), mesh)
        transport.check()
    finally:
        mesh.collect(None, None)  # no rank may free memory that another rank still writes
        transport.release()


@contextmanager
def _bare(mesh: Mesh, move: str, layout: HeadLayout) -> Iterator[Timed]:
    yield _timed(bare(move, mesh.sequence, layout), mesh)


def _timed(move: Move, mesh: Mesh) -> Timed:
    if mesh.device.type != "cuda":
        return Timed.of(move, mesh.device)
    replay = graphed(move, GRAPH_CALLS)
    return Timed(lambda calls: elapsed(replay, -(-calls // GRAPH_CALLS), mesh.device) / GRAPH_CALLS)


# Moves ------------------------------------------------------------------------------------------------------------


def ours(move: str, transport: Transport, axis: Axis, layout: HeadLayout) -> Move:
    mine, all_heads = layout.tokens[axis.rank], layout.q_slice(axis.rank)
    if move == "ulysses back":
        _, back = transport._heads(axis, layout)  # no turn check: this direction is used alone
        heads = len(range(layout.heads)[all_heads])
        (out,) = _inputs(layout, 1, sum(layout.tokens), heads)
        return lambda: back.deliver(push(out, back.outboxes(), back.flags))
    into = transport._heads(axis, layout)[0] if move == "ulysses in" else transport.key_values(axis, layout)
    q, k, v = _inputs(layout, 3, mine, layout.heads)
    return lambda: into.deliver(into_outboxes(q, k, v, Prepare(), into.outboxes(), into.flags))


def bare(move: str, axis: Axis, layout: HeadLayout) -> Move:
    rows = layout.batch * layout.tokens[axis.rank] * layout.heads * layout.head_dim
    sent = _random(layout, {"ulysses in": 3 * rows, "ulysses back": rows, "kv gather": 2 * rows}[move])
    if move == "kv gather":
        received = sent.new_empty(axis.size * sent.numel())
        return lambda: dist.all_gather_into_tensor(received, sent, group=axis.group)
    sent = sent[: sent.numel() // axis.size * axis.size]
    received = torch.empty_like(sent)
    return lambda: dist.all_to_all_single(received, sent, group=axis.group)


def _random(layout: HeadLayout, *shape: int) -> Tensor:
    """Random data, because GPUs run faster on zeros than on real data."""
    return torch.randn(shape, dtype=torch.float32, device=layout.device).to(layout.dtype)


def _inputs(layout: HeadLayout, count: int, tokens: int, heads: int) -> list[Tensor]:
    fused = _random(layout, layout.batch, tokens, count * heads, layout.head_dim)
    return list(fused.split(heads, dim=2))
