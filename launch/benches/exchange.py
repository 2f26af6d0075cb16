"""Time of one exchange of an attention layer: each of our transports beside a plain collective of as many bytes.

    torchrun --nproc_per_node=4 launch/bench.py exchange --out lines.jsonl

The moves are: q, k and v to the ranks that own their heads (ulysses in), the output back to the ranks that own its
tokens (ulysses back), and keys and values to all ranks (kv gather). Ours are made as a strategy makes them, by the
kernels that write into the readers' buffers; a collective moves as many bytes in a layout that attention could not
read. MB are the MiB that a rank writes, its own part included. On GPUs each way is timed in eager mode and in a CUDA
graph of several exchanges, as in a denoising step. Each round times every way once; the slowest rank counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import seqpar.transports
from launch.baselines.graphs import graphed
from launch.benches.timing import append, attempt, calls_for, command, elapsed, environment, rand, slowest
from seqpar.kernels.prepare import prepare_into
from seqpar.kernels.push import push
from seqpar.mesh import Axis, Mesh, default_dtype
from seqpar.planner.plan import choose_transport, load_transport
from seqpar.protocols import Prepare, plugins
from seqpar.transports._contract import Transport
from seqpar.transports._layout import HeadLayout

MOVES = ("ulysses in", "ulysses back", "kv gather")
LINK_BYTES = 478e9  # NVLink bytes a second of an H200 in each direction: 18 links of 26.6 GB/s
GRAPH_CALLS = 20  # exchanges in a graph, about as many as in a step, so that the launch costs each as little
Move = Callable[[], object]


@dataclass(frozen=True)
class Exchange:
    """Time the exchanges of an attention layer by our transports and by plain collectives."""

    megabytes: tuple[float, ...] = (0.25, 1, 4, 16, 64, 256)
    """MiB that a rank writes, including its own part."""
    batch: int = 1
    """Batch rows; two if both guidance branches are in the batch."""
    heads: int = 32
    """Number of query heads, and of key-value heads."""
    head_dim: int = 128
    """Width of each head."""
    rounds: int = 5
    """Number of rounds; each round times every way once."""
    seconds: float = 0.1
    """Seconds that one way runs in a round."""
    out: Path | None = None
    """Append JSON lines here."""


def main(args: Exchange) -> None:
    """Measure all moves and sizes, print a table on rank 0, append the lines."""
    world = Mesh.joined()
    check(args, world.world.size)
    mesh = Mesh.from_env(cfg=1, device=world.device)
    for move in MOVES:
        for size in args.megabytes:
            for line in measure(args, mesh, move, size):
                if mesh.is_main:
                    print(row(line), flush=True)
                    append([line], args.out)


def check(args: Exchange, world: int) -> None:
    """Raise `ValueError` for flags that cannot be measured."""
    if world < 2:
        raise ValueError("got 1 process, expected at least 2; start with torchrun --nproc_per_node=2")
    if min(args.batch, args.heads, args.head_dim, args.rounds) < 1 or not args.seconds > 0:
        raise ValueError(
            f"got --batch {args.batch} --heads {args.heads} --head-dim {args.head_dim} --rounds {args.rounds} "
            f"--seconds {args.seconds:g}, expected at least 1 of each, and more than 0 seconds"
        )
    if not args.megabytes or min(args.megabytes) <= 0:
        raise ValueError(f"got --megabytes {args.megabytes}, expected sizes over 0")


@torch.no_grad()
def measure(args: Exchange, mesh: Mesh, move: str, megabytes: float) -> list[dict[str, Any]]:
    """Return one JSON line for each way and mode; the line of a way that is not possible has the reason."""
    dtype, ranks = default_dtype(mesh.device), mesh.world.size
    row_bytes = args.batch * args.heads * args.head_dim * dtype.itemsize
    tokens = max(1, round(megabytes * 2**20 / (_parts(move, ranks) * row_bytes)))
    layout = HeadLayout(args.batch, (tokens,) * ranks, args.heads, args.heads, args.head_dim, dtype, mesh.device)
    with ExitStack() as transports:
        works, refused = _works(mesh, move, layout, transports)
        times = _in_turn(works, args, mesh)
    case = {"move": move, "mb": megabytes, "tokens": tokens, "batch": args.batch, "heads": args.heads}
    case |= {"head_dim": args.head_dim, "dtype": str(dtype).removeprefix("torch.")}
    nbytes = _parts(move, ranks) * tokens * row_bytes
    end = {"command": command(), "env": environment(mesh.device)}
    return [
        {"bench": "exchange", "gpus": ranks, "bytes": nbytes, "case": case | {"way": way, "mode": mode}}
        | _rates(nbytes, ranks, result)
        | end
        for (way, mode), result in (times | refused).items()
    ]


def _parts(move: str, ranks: int) -> int:
    """Return how many tensors of a rank's tokens the rank writes."""
    return {"ulysses in": 3, "ulysses back": 1, "kv gather": 2 * ranks}[move]


def _rates(nbytes: int, ranks: int, result: dict[str, float] | str) -> dict[str, Any]:
    """Return us, GB/s between ranks and the share of the links, or the reason why there is no time.

    With n ranks, (n - 1) / n of the bytes leave the rank.
    """
    if isinstance(result, str):
        return {"us": None, "refused": result}
    us = {name: 1e3 * ms for name, ms in result.items()}
    rate = nbytes * (ranks - 1) / ranks / (us["median"] * 1e-6)
    return {"us": us, "gb_per_s": rate / 1e9, "share_of_links": rate / LINK_BYTES}


def _works(
    mesh: Mesh, move: str, layout: HeadLayout, transports: ExitStack
) -> tuple[dict[tuple[str, str], Move], dict[tuple[str, str], str]]:
    """Return the calls of each (way, mode), and the reason for each that is not possible."""

    def by(name: str) -> Move:
        choose_transport(name, mesh)
        transport: Transport = load_transport(name)
        transports.callback(transport.release)
        transports.callback(transport.check)  # runs before the release
        return ours(move, transport, mesh.sequence, layout)

    ways = {f"ours, {name}": partial(by, name) for name in plugins(seqpar.transports)}
    ways["bare"] = partial(bare, move, mesh.sequence, layout)
    works: dict[tuple[str, str], Move] = {}
    refused: dict[tuple[str, str], str] = {}
    for name, build in ways.items():
        works_of_way, why = attempt(lambda build=build: dict(_modes(build(), mesh)), mesh, ValueError, RuntimeError)
        if works_of_way is None:
            refused[name, "eager"] = str(why)
        else:
            works |= {(name, mode): work for mode, work in works_of_way.items()}
    return works, refused


def _modes(move: Move, mesh: Mesh) -> Iterator[tuple[str, Move]]:
    """Yield a move as it is, and on GPUs in a CUDA graph."""
    yield "eager", move
    if mesh.device.type == "cuda":
        yield "graph", graphed(move, GRAPH_CALLS)


def _in_turn(works: dict[tuple[str, str], Move], args: Exchange, mesh: Mesh) -> dict[Any, Any]:
    """Return ms of one exchange of each way: median, least and most over rounds of the slowest rank."""
    calls = {key: max(2, calls_for(args.seconds, elapsed(work, 1, mesh.device), mesh)) for key, work in works.items()}
    times: dict[tuple[str, str], list[float]] = {key: [] for key in works}
    for _ in range(args.rounds):
        for key, work in works.items():
            share = GRAPH_CALLS if key[1] == "graph" else 1
            times[key].append(elapsed(work, calls[key], mesh.device) / share)
    if mesh.device.type == "cuda":
        torch.cuda.synchronize()
    mesh.collect(None, None)  # no rank may free memory that another rank still writes
    return slowest(times, mesh)


# Moves ------------------------------------------------------------------------------------------------------------


def ours(move: str, transport: Transport, axis: Axis, layout: HeadLayout) -> Move:
    """Return our move as a strategy makes it: the prepare (or push) kernel writes into the readers' buffers."""
    mine, all_heads = layout.tokens[axis.rank], layout.q_slice(axis.rank)
    if move == "ulysses back":
        _, back = transport._heads(axis, layout)  # no turn check: this direction is used alone
        heads = len(range(layout.heads)[all_heads])
        (out,) = _inputs(layout, 1, sum(layout.tokens), heads)
        return lambda: back.deliver(push(out, back.outboxes(), back.flags))
    into = transport._heads(axis, layout)[0] if move == "ulysses in" else transport.key_values(axis, layout)
    q, k, v = _inputs(layout, 3, mine, layout.heads)
    return lambda: into.deliver(prepare_into(q, k, v, Prepare(), into.outboxes(), into.flags))


def bare(move: str, axis: Axis, layout: HeadLayout) -> Move:
    """Return one collective that moves as many bytes."""
    rows = layout.batch * layout.tokens[axis.rank] * layout.heads * layout.head_dim
    sent = _random(layout, {"ulysses in": 3 * rows, "ulysses back": rows, "kv gather": 2 * rows}[move])
    if move == "kv gather":
        received = sent.new_empty(axis.size * sent.numel())
        return lambda: dist.all_gather_into_tensor(received, sent, group=axis.group)
    sent = sent[: sent.numel() // axis.size * axis.size]
    received = torch.empty_like(sent)
    return lambda: dist.all_to_all_single(received, sent, group=axis.group)


def _random(layout: HeadLayout, *shape: int) -> Tensor:
    return rand(*shape, dtype=layout.dtype, device=str(layout.device))


def _inputs(layout: HeadLayout, count: int, tokens: int, heads: int) -> list[Tensor]:
    """Return tensors (B, tokens, heads, D) that are slices of one fused projection."""
    fused = _random(layout, layout.batch, tokens, count * heads, layout.head_dim)
    return list(fused.split(heads, dim=2))


def row(line: dict[str, Any]) -> str:
    """Format one line of the table."""
    case = line["case"]
    start = f"{case['move']:<12} {case['mb']:>7g} MB  {line['gpus']} x  {case['way']:<16} {case['mode']:<5}"
    if line["us"] is None:
        return f"{start}  {line['refused']}"
    us = line["us"]
    return (
        f"{start} {us['median']:9.1f} us ({us['min']:.1f} - {us['max']:.1f})  {line['gb_per_s']:6.1f} GB/s, "
        f"{100 * line['share_of_links']:.0f} % of the links"
    )
