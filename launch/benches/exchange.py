"""Time of one exchange of an attention layer: each transport, a bare collective, and the collective with its permutes.

    torchrun --nproc_per_node=4 launch/bench.py exchange --out lines.jsonl

The moves are: q, k and v to the ranks that own their heads (ulysses in), the output back to the ranks that own its
tokens (ulysses back), keys and values to all ranks (kv gather), and both edges of a strip of rows to the neighbours
(halo). MB are the MiB that a rank writes, its own part included. On GPUs each way is timed in eager mode and in a CUDA
graph of several exchanges, as in a denoising step. The bench checks that every element arrives in its place before it
times a way. Each round times every way once; the time of the slowest rank counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import seqpar.transports
from launch.benches.moves import CODED_BYTES, MOVES, Way, bare, bytes_of, ours, permuted, tokens_for
from launch.benches.timing import append, attempt, calls_for, command, elapsed, environment, graphed, slowest
from seqpar import mesh as meshes
from seqpar.mesh import Mesh, default_dtype
from seqpar.planner.plan import choose_transport, load_transport
from seqpar.protocols import plugins
from seqpar.transports._contract import Transport
from seqpar.transports._layout import HeadLayout

LINK_BYTES = 478e9  # NVLink bytes a second of an H200 in each direction: 18 links of 26.6 GB/s
GRAPH_CALLS = 20  # exchanges in a graph, about as many as in a step, so that the launch costs each as little
Key = tuple[str, str]  # way, mode
Spread = dict[str, float]


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
    _, world = meshes.join()
    check(args, world)
    mesh = Mesh.from_env(device=meshes.pick_device(world))
    for move in MOVES:
        for size in args.megabytes:
            lines = measure(args, mesh, move, size)
            if mesh.is_main:
                for line in lines:
                    print(row(line), flush=True)
                append(lines, args.out)


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
    dtype = default_dtype(mesh.device)
    ranks, width = mesh.world.size, args.heads * args.head_dim
    tokens = tokens_for(move, megabytes, ranks, args.batch, width, dtype.itemsize)
    layout = HeadLayout(args.batch, (tokens,) * ranks, args.heads, args.heads, args.head_dim, dtype, mesh.device)
    with ExitStack() as transports:
        ways, refused = all_ways(mesh, move, layout, transports)
        works, unfit = all_works(ways, mesh)
        times = timed_in_turn(works, args, mesh)
    unfit |= {(name, mode): why for name, why in refused.items() for mode in modes(mesh)}
    case = {"move": move, "mb": megabytes, "tokens": tokens, "batch": args.batch, "heads": args.heads}
    case |= {"head_dim": args.head_dim, "dtype": str(dtype).removeprefix("torch."), "backend": backend(mesh)}
    made = {"bench": "exchange", "gpus": ranks, "bytes": bytes_of(move, layout)}
    end = {"command": command(), "env": environment(mesh.device)}
    return [
        made | {"case": case | {"way": way, "mode": mode}} | shown(made["bytes"], ranks, found) | end
        for (way, mode), found in (times | unfit).items()
    ]


def shown(nbytes: int, ranks: int, found: Spread | str) -> dict[str, Any]:
    """Return us, GB/s between ranks and the share of the links, or the reason why there is no time."""
    if isinstance(found, str):
        return {"us": None, "refused": found}
    us = {name: 1e3 * ms for name, ms in found.items()}
    rate = nbytes * (ranks - 1) / ranks / (us["median"] * 1e-6)
    return {"us": us, "gb_per_s": rate / 1e9, "share_of_links": rate / LINK_BYTES}


def all_ways(mesh: Mesh, move: str, layout: HeadLayout, transports: ExitStack) -> tuple[dict[str, Way], dict[str, str]]:
    """Return the checked ways (each transport, then the two plain collectives), and the reason for each missing one."""

    def by(name: str) -> Way:
        choose_transport(name, mesh)
        transport: Transport = load_transport(name)
        transports.callback(transport.release)
        transports.callback(transport.check)  # runs before the release
        return ours(move, transport, mesh.sequence, layout)

    builders: dict[str, Callable[[], Way]] = {
        f"ours, {name}": lambda name=name: by(name) for name in plugins(seqpar.transports)
    }
    builders["bare"] = lambda: bare(move, mesh.sequence, layout)
    builders["with permutes"] = lambda: permuted(move, mesh.sequence, layout)
    ways, refused = {}, {}
    for name, build in builders.items():
        way, why = attempt(build, mesh, ValueError)
        if way is None:
            refused[name] = str(why)
        else:
            check_arrivals(name, way, mesh)
            ways[name] = way
    return ways, refused


def check_arrivals(name: str, way: Way, mesh: Mesh) -> None:
    """Raise `RuntimeError` if an element does not arrive in its place; leaves a payload to time in the inputs."""
    for byte in reversed(range(CODED_BYTES)):
        way.fill(byte)
        together(mesh)  # one move alone has no return: only this stops a fast rank from overwriting
        wrong = [rank for rank, fine in enumerate(mesh.collect(way.arrived(byte), bool)) if not fine]
        if wrong:
            raise RuntimeError(f"{name}: ranks {wrong} did not get what was sent to them")


def together(mesh: Mesh) -> None:
    """Wait for this rank's device, then for all ranks."""
    if mesh.device.type == "cuda":
        torch.cuda.synchronize()
    mesh.collect(None, None)


def all_works(ways: Mapping[str, Way], mesh: Mesh) -> tuple[dict[Key, Callable[[], object]], dict[Key, str]]:
    """Return the calls to time (on GPUs also as CUDA graphs), and the reason for each graph that cannot be captured."""
    works: dict[Key, Callable[[], object]] = {(name, "eager"): way.run for name, way in ways.items()}
    refused: dict[Key, str] = {}
    for name, way in ways.items() if "graph" in modes(mesh) else ():
        replay, why = attempt(lambda way=way: graphed(way.run, GRAPH_CALLS), mesh, RuntimeError)
        if replay is None:
            refused[name, "graph"] = f"no graph: {why}"
        else:
            works[name, "graph"] = replay
    return works, refused


def timed_in_turn(works: Mapping[Key, Callable[[], object]], args: Exchange, mesh: Mesh) -> dict[Key, Spread]:
    """Return ms of one exchange of each way: median, least and most over rounds of the slowest rank."""
    calls = {key: calls_for(args.seconds, work, mesh) for key, work in works.items()}
    times: dict[Key, list[float]] = {key: [] for key in works}
    for _ in range(args.rounds):
        for key, work in works.items():
            share = GRAPH_CALLS if key[1] == "graph" else 1
            times[key].append(elapsed(work, calls[key], mesh.device) / share)
    together(mesh)  # no rank may free memory that another rank still writes
    return slowest(times, mesh)


def modes(mesh: Mesh) -> tuple[str, ...]:
    """Return how exchanges are launched: eager, and on GPUs also in a CUDA graph."""
    return ("eager", "graph") if mesh.device.type == "cuda" else ("eager",)


def backend(mesh: Mesh) -> str:
    """Return the name of the collectives' backend."""
    return "NCCL" if mesh.device.type == "cuda" else "gloo"


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
