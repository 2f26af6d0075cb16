"""ms a step of every layout on the processes that run, beside other engines and ceilings in the same run.

    for n in 1 2 4; do
        torchrun --nproc_per_node=$n launch/bench.py scale --tokens 4096 --out lines.jsonl
    done

Rows are our layouts (every layout by every transport; a data axis gives each of its ranks a picture), other engines
(`launch/baselines/engines.py`; eager and with compiled blocks, each also in a CUDA graph), and the *ceiling* of each
layout: the matrix products and the attention of one rank alone. Ways are set up, timed and freed one at a time, in
rounds (A B A B); the slowest rank counts. Each row is a JSON line, with the reason if it is not possible;
`launch/benches/table.py` computes the ratios from the lines of all runs.
"""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro

from launch.benches import calls
from launch.benches.adapters import adapters
from launch.benches.ceiling import flops_and_weights, roofline
from launch.benches.natives import natives
from launch.benches.peers import cache_dit, peers
from launch.benches.released import RELEASED
from launch.benches.split import split_of
from launch.benches.steps import Layout, fitting
from launch.benches.timing import Sensors, append, attempt, calls_for, command, elapsed, environment, slowest, timed
from launch.benches.ways import RUN_STEPS, Bench, Way, all_ways, data_layouts, make_bench
from seqpar import mesh as meshes
from seqpar.cli.planning import pick
from seqpar.mesh import Mesh
from seqpar.planner.plan import work_of
from seqpar.weights.find import locate

GIB = 1 << 30
SENSED_S = 1.5  # of a sensor's ten readings a second
TRACED_STEPS = 3
MOST_STEPS = 200
REFUSALS = (ValueError, RuntimeError, AssertionError)  # what engines and torch raise for a case they cannot run
Line = dict[str, Any]


@dataclass(frozen=True)
class Scale:
    """Time every layout, its ceiling and other engines on the processes that run."""

    model: str = "large-dit-7b"
    """A preset (random weights) or a checkpoint."""
    tokens: tuple[int, ...] = (256, 4096, 16384)
    """Token counts; a count that is not a square gives the picture that is closest to a square."""
    layouts: tuple[str, ...] = ()
    """Layouts of one picture, as strategy:cfg:ring (ulysses:2:1); all that fit if none are given."""
    data: bool = True
    """Also time several pictures at once."""
    peers: bool = True
    """Also time the same work by other engines."""
    named: tuple[str, ...] = ()
    """Run only the other engines whose name contains one of these words (Ulysses, compiled, graph ...)."""
    compiled: bool = True
    """Also time other engines with compiled blocks (minutes of compilation)."""
    local: str = "auto"
    """Local attention of our layouts and of plain Ulysses."""
    rounds: int = 3
    """Number of rounds; each round times every way once."""
    seconds: float = 0.3
    """Seconds that one way runs in a round."""
    digest_steps: int = 25
    """Number of steps of a run of 25 after which the bits of latents are compared; 0 compares none."""
    call: Annotated[calls.Call, tyro.conf.arg(name="")] = field(default_factory=calls.Call)
    """Flags of flux.1-dev, qwen-image and wan2.1-14b, which are timed by the call."""
    out: Path | None = None
    """Append JSON lines here."""


LABELS_ONLY = ("layouts", "data", "named", "digest_steps")  # flags that mean nothing to models timed by the call


@dataclass
class Found:
    """Results of a way so far: ms of each round on this rank, calls a round, digest, GiB, and its trace."""

    times: list[float] = field(default_factory=list)
    calls: int = 0
    bits: str | None = None
    memory: dict[str, float] = field(default_factory=dict)
    look: dict[str, Any] = field(default_factory=dict)


def main(args: Scale) -> None:
    """Measure all token counts, print a table on rank 0, append the lines of each when it is done."""
    _, world = meshes.join()
    check(args, world)
    device = meshes.pick_device(world)
    if args.model in RELEASED:
        by_the_call(args, device)
        return
    dtype = meshes.default_dtype(device)
    model = locate(args.model).build(dtype, device)
    layouts = [*fitting(args.layouts, world), *(data_layouts(world) if args.data else ())]
    bench = make_bench(model, layouts, args.local, device)
    for tokens in args.tokens:
        lines = measure(args, bench, tokens)
        if bench.mesh.is_main:
            append(lines, args.out)
            print("\n".join(map(row, lines)), flush=True)
        torch._dynamo.reset()


def check(args: Scale, world: int) -> None:
    """Raise `ValueError` for flags that cannot be measured, before any weight is read."""
    ignored = ["call"] if args.model not in RELEASED else list(LABELS_ONLY)
    if given := [name for name in ignored if getattr(args, name) != getattr(Scale(), name)]:
        raise ValueError(f"got flags ({', '.join(given)}) that --model {args.model} does not use; leave them out")
    if not args.tokens or min(args.tokens) < 1:
        raise ValueError(f"got --tokens {args.tokens}, expected counts of at least 1")
    if args.rounds < 1 or args.seconds <= 0:
        raise ValueError(f"got --rounds {args.rounds} --seconds {args.seconds:g}, expected at least 1 and more than 0")
    if not 0 <= args.digest_steps <= RUN_STEPS:
        raise ValueError(f"got --digest-steps {args.digest_steps}, expected 0 to {RUN_STEPS}")
    fitting(args.layouts, world)


def by_the_call(args: Scale, device: torch.device) -> None:
    """Time calls of a model that people run; --tokens makes the picture other than it usually is."""
    mesh, flags, dtype = Mesh.from_env(cfg=1, device=device), args.call, meshes.default_dtype(device)
    until = time.monotonic() + 60 * flags.minutes
    for tokens in args.tokens if args.tokens != Scale.tokens else (None,):
        model = RELEASED[args.model].sized(tokens, flags.text)
        case = calls.Case(model, mesh, dtype, args.local)
        ours = (case, flags.strategy, flags.transport)
        others, last = (peers(case), cache_dit(case)) if args.peers else ((), ())
        rows = [*calls.ceilings(case, flags.strategy), *natives(*ours), *others, *adapters(*ours), *last]
        limits = calls.Limits(args.rounds, args.seconds, until, flags.trace)
        calls.measure(case, calls.asked(rows, flags.only), limits, args.out)
        torch._dynamo.reset()


def measure(args: Scale, bench: Bench, tokens: int) -> list[Line]:
    """One line for each way of one token count."""
    ways = wanted(args, all_ways(bench, tokens, args.digest_steps, args.peers, args.compiled))
    found, refused = {way.name: Found() for way in ways}, {}
    for round_ in range(args.rounds):
        for way in (way for way in ways if way.name not in refused):
            visited = partial(visit, args, bench, way, found[way.name])
            _, why = attempt(visited, bench.mesh, *REFUSALS)
            free(bench.mesh.device)
            if why is not None:
                refused[way.name] = why
            if bench.mesh.is_main:
                told = f"not possible: {why}" if why else f"{found[way.name].times[-1]:.3f} ms"
                print(f"round {round_ + 1}, {tokens} tokens, {way.name}: {told}", flush=True)
    done = [way for way in ways if way.name not in refused]
    times = slowest({way.name: found[way.name].times for way in done}, bench.mesh)
    for kind in ("peer", "ours"):  # ours is traced, and a profiler may slow what comes after it
        if mine := [way for way in done if (way.kind, way.images) == (kind, 1)]:
            best = min(mine, key=lambda way: times[way.name]["median"])
            closer = partial(look, bench, best, found[best.name], times[best.name]["median"])
            _, why = attempt(closer, bench.mesh, *REFUSALS, OSError)
            if why is not None and bench.mesh.is_main:
                print(f"no closer look at {best.name}: {why}", flush=True)
    mark_picks(bench, tokens, ways, found)
    return [line(args, bench, tokens, way, found[way.name], times.get(way.name), refused.get(way.name)) for way in ways]


def wanted(args: Scale, ways: list[Way]) -> list[Way]:
    """The ways to time: all, or without the other engines that --named leaves out."""
    named = args.named or ("",)
    return [way for way in ways if way.kind != "peer" or any(word in way.name for word in named)]


def mark_picks(bench: Bench, tokens: int, ways: list[Way], found: dict[str, Found]) -> None:
    """Mark the layouts of one picture that the planner would take."""
    picks = {
        transport: pick(bench.model, tokens, RUN_STEPS, bench.mesh, transport)
        for transport in dict.fromkeys(transport for _, transport in bench.engines)
    }
    for way in ways:
        if way.kind == "ours" and way.images == 1 and way.case is not None:
            best = picks[way.case["transport"]]
            name = str(Layout(best.strategy, best.cfg, best.ring, best.ulysses))
            found[way.name].look["picked"] = way.case["layout"] == name


def visit(args: Scale, bench: Bench, way: Way, found: Found) -> None:
    """Set a way up and time it once."""
    mesh, before = bench.mesh, memory(bench.mesh.device)
    with way.ready() as ready:
        first = not found.times
        if first:
            found.bits = ready.bits()
            ready.before()
            # a state that is stepped again and again overflows, and then runs faster
            found.calls = min(MOST_STEPS, calls_for(args.seconds, ready.step, mesh))
        ready.before()
        mesh.collect(None, None)
        found.times.append(elapsed(ready.step, found.calls, mesh.device))
        ready.after()
        after = memory(mesh.device)
        found.memory = {name: (after[name] - before[name]) / GIB for name in after}


def look(bench: Bench, way: Way, found: Found, ms: float) -> None:
    """SM clock and joules of a step over all GPUs; of ours also where the time goes on rank 0."""
    device = bench.mesh.device
    if device.type != "cuda":
        return
    with way.ready() as ready:
        calls = min(found.calls, 100)  # a state that steps on and on would overflow
        with Sensors(device.index or 0) as sensors:
            for _ in range(max(1, int(1e3 * SENSED_S / (ms * calls)))):
                ready.before()
                timed(ready.step, calls)
        readings = bench.mesh.collect(sensors.medians(), tuple[float, float])
        found.look = {"sm_mhz": min(clock for clock, _ in readings)}
        found.look["joules"] = sum(watts for _, watts in readings) * ms * 1e-3
        if way.kind == "ours":
            ready.before()
            if (parts := split_of(ready.step, TRACED_STEPS)) is not None:
                found.look["split_ms"] = parts
            elif bench.mesh.is_main:
                print("the profiler saw no kernels: no split", flush=True)
        ready.after()
    free(device)


def memory(device: torch.device) -> dict[str, float]:
    """Bytes of this GPU: the most that torch's allocator gave out since it was last asked, and all that is not its own
    (memory shared with other ranks, communicators, graphs)."""
    if device.type != "cuda":
        return {}
    torch.cuda.synchronize()
    left, whole = torch.cuda.mem_get_info()
    found = {
        "gib": float(torch.cuda.max_memory_allocated()),
        "outside_gib": whole - left - torch.cuda.memory_reserved(),
    }
    torch.cuda.reset_peak_memory_stats()
    return found


def free(device: torch.device) -> None:
    """Free what a way held, so that the next way starts from the same state."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def line(
    args: Scale, bench: Bench, tokens: int, way: Way, found: Found, ms: dict[str, float] | None, why: str | None
) -> Line:
    """The JSON line of one row. It is a collective call."""
    world, device = bench.mesh.world.size, bench.mesh.device
    dtype = str(next(bench.model.parameters()).dtype).removeprefix("torch.")
    case = {"model": args.model, "tokens": tokens, "kind": way.kind, "way": way.name, "images": way.images}
    case |= {"local": bench.local, "dtype": dtype, **(way.case or {})}
    made = {"bench": "scale", "case": case, "gpus": world, "ms": ms}
    end = {"command": command(), "env": environment(device)}
    if ms is None:
        return made | {"refused": why} | end
    flops, weights = flops_and_weights(work_of(bench.model.config), tokens)
    flops *= way.images / world
    made |= {"tflops": flops / ms["median"] / 1e9, "roofline_ms": roofline(flops, weights)}
    made |= {"pictures_per_s": way.images / (RUN_STEPS * ms["median"] * 1e-3)}
    ranks = bench.mesh.collect(found.memory, dict[str, float])
    made |= {name: max(rank[name] for rank in ranks) for name in found.memory}
    if "gib" in made:
        made["gib"] += way.weights / GIB
    if found.bits is not None:
        made |= {"digest": found.bits, "digest_steps": args.digest_steps}
    return made | found.look | end


def row(line: Line) -> str:
    """One line of the table; the best layout has a second line, its time by kind of kernel."""
    case, ms = line["case"], line["ms"]
    start = f"{case['tokens']:>6} tokens  {line['gpus']} x  {case['way']:<52}"
    if ms is None:
        return f"{start}  {line['refused']}"
    memory = f"  {line['gib']:.1f} GiB + {line['outside_gib']:.1f}" if "gib" in line else ""
    told = (
        f"{start} {ms['median']:9.3f} ms ({ms['min']:.3f} - {ms['max']:.3f})  {line['tflops']:6.1f} TFLOP/s a GPU"
        f"{memory}  {line.get('digest', '')}"
    )
    if "split_ms" in line:
        told += (
            "\n" + f"{'':>14}of which, ms: " + ", ".join(f"{name} {ms:.2f}" for name, ms in line["split_ms"].items())
        )
    return told
