"""Many pictures in one process: memory must stay flat, pictures must not become slower, bits must stay the same.

Four parts. `pictures` of changing kinds (size, classes, guidance, scheduler) come in a random order, then pictures of
`sizes` different sizes, then `calls` of a parallelized diffusers transformer with other pictures and prompts, the first
kind again at the end. Over each part memory must be bounded, later pictures of a kind must not be slower than earlier
ones, and all of a kind must have the same bits. Last, each strategy replays the graph of one step `replays` times, by
each transport, while ranks are held up at random; each time round the state must have the same bits.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

import torch
from diffusers.schedulers.scheduling_ddim import DDIMScheduler
from torch import Tensor

import seqpar
from launch.baselines.released import RELEASED, Released
from launch.benches.timing import judged, record
from seqpar.loop.distributed import DistributedDiT
from seqpar.loop.loop import Sampler, digest, draw_noise
from seqpar.mesh.mesh import Mesh, default_dtype
from seqpar.pipelines.classes import BUILTIN, DDIM_DEFAULT, Files, Pipeline
from seqpar.planner.costs import strategies
from seqpar.transports import _contract
from seqpar.types.guidance import Guidance

WAYS = {"fused": True, "generic": False}
ROWS, TEXT = range(8, 49, 4), (32, 77, 128, 512)  # of a picture's tokens, and a prompt's tokens
TIMES = 3  # that a kind of call comes in a row: on GPUs the second is captured and the third is replayed
STEPS = 25
LONGEST_S = 2e-3  # for which a rank is held up; several steps of the built-in model
CYCLES_A_S = 1.8e9  # of a GPU's clock
SHARE = 0.05  # of the steps after which a rank is held up
KINDS = 20  # of pictures in the first part
MOST_SLOWER = 1.1  # the later pictures of a kind, in times of the earlier ones
MOST_LARGER = 1.05  # memory of the later pictures, in times of the earlier ones
ROOM = 64 << 20  # bytes that do not count: what an allocator takes at a time, and Python's own
MEMORY = ("allocated", "used", "host")
Line = dict[str, Any]


@dataclass(frozen=True)
class Soak:
    """Make many pictures in one process and replay many steps; fail if memory grows, time grows or bits change."""

    model: str = "builtin"
    """"builtin", a diffusers pipeline folder of a model of classes, or a random model (without decoder)."""
    pictures: int = 200
    """Pictures of changing kinds; 0 leaves this part out."""
    sizes: int = 100
    """Different sizes, one picture each; 0 leaves this part out."""
    calls: int = 100
    """Kinds of calls (size, prompt; at most 484) of a parallelized FLUX.1 with few blocks; 0 leaves this part out."""
    replays: int = 10_000
    """Steps of each strategy and transport; 0 leaves this part out."""
    scale: int = 1
    """Factor of all sizes, which are half to three times the model's own otherwise."""
    steps: int = 4
    """Denoising steps of a picture."""
    seconds: float = 600
    """After this time only the last picture of a part is made."""
    out: Path | None = None
    """Append JSON lines here."""


@dataclass(frozen=True)
class Kind:
    """What distinguishes pictures. size: (height, width) in pixels, None for the model's own."""

    size: tuple[int, int] | None
    classes: tuple[int, ...]
    guidance: Guidance
    scheduler: str


def main(args: Soak) -> None:
    mesh, lines = Mesh.joined(), list[Line]()
    for line in measured(args, mesh.device):
        lines.append(line)
        if mesh.is_main:
            record({"bench": "soak", **line, "gpus": mesh.world.size}, args.out, mesh.device)
    if not judged(verdicts(lines), shows=mesh.is_main):
        raise SystemExit(1)


def measured(args: Soak, device: torch.device) -> Iterator[Line]:
    files, dtype = Files.locate(args.model), default_dtype(device)
    parts = {"mixed": mixed(files, args.pictures, args.scale), "sizes": sized(files, args.sizes, args.scale)}
    if args.pictures or args.sizes:
        mesh = Mesh.from_env(cfg=1, device=device)
        with Pipeline.load(files, mesh, dtype) as pipeline:
            for name, kinds in parts.items():
                yield from soaked(name, pipeline, kinds, args.steps, time.monotonic() + args.seconds)
            pipeline.dit.release()
    yield from calls(args.calls, dtype, device)
    yield from replays(args.replays, dtype, device)


# Pictures ---------------------------------------------------------------------------------------------------------


def mixed(files: Files, count: int, scale: int = 1) -> list[Kind]:
    """Kinds in a random order in which each comes equally often; the first picture's kind is also the last one's."""
    drawn, own = random.Random(0), files.latent_size(None)[0] * files.factor
    sides = [scale * own * times // 2 for times in (1, 2, 3, 4)]
    every = itertools.product(
        [None, *itertools.product(sides, sides)],
        [(7,), (1, 7)],
        [Guidance(1.0), Guidance(4.0), Guidance(4.0, channels=3)],
        ["DDIMScheduler", "DPMSolverMultistepScheduler", "EulerDiscreteScheduler", "DDPMScheduler"],
    )
    kinds = drawn.sample([Kind(*one) for one in every], KINDS)
    order = [kinds[index % KINDS] for index in range(count)]
    drawn.shuffle(order)
    return [*order[:-1], order[0]] if order else []


def sized(files: Files, count: int, scale: int = 1) -> list[Kind]:
    own, unit = files.latent_size(None)[0], files.blueprint.config.patch_size
    sides, factor = range(own // 2, 3 * own, unit), scale * files.factor
    every = [(factor * height, factor * width) for height, width in itertools.product(sides, sides)]
    chosen = random.Random(1).sample(every, min(count, len(every)))
    largest = max(chosen, key=prod, default=None)
    chosen.sort(key=lambda size: size != largest)
    return [Kind(size, (7,), Guidance(4.0), "DDIMScheduler") for size in chosen]


def soaked(
    part: str, pipeline: Pipeline, kinds: Sequence[Kind], steps: int, end: float = float("inf")
) -> Iterator[Line]:
    """Yield a line for each picture: its kind, seconds, the digest of its latents, bytes of memory afterwards.

    end: the time after which only the last picture is made.
    """
    mesh, numbers = pipeline.dit.mesh, {kind: index for index, kind in enumerate(dict.fromkeys(kinds))}
    seen: dict[Kind, int] = {}
    for index, kind in enumerate(kinds):
        if index + 1 < len(kinds) and mesh.share(time.monotonic() > end, bool):
            continue
        seen[kind] = seen.get(kind, 0) + 1
        start, settings = time.perf_counter(), {"steps": steps, "guidance": kind.guidance}
        scheduler = pipeline.files.scheduler(kind.scheduler)
        made = pipeline.latents(kind.classes, size=kind.size, scheduler=scheduler, seed=numbers[kind], **settings)
        pipeline.decode(made)
        bits = digest(made)
        case = {"kind": numbers[kind], "time": seen[kind], "seconds": time.perf_counter() - start}
        yield {"part": part, "picture": index, **case, "digest": bits, **memory(mesh)}


# Verdicts ---------------------------------------------------------------------------------------------------------


def verdicts(lines: Sequence[Line]) -> Iterator[tuple[str, bool]]:
    """Yield what was found in each part, and whether it is right."""
    for part in dict.fromkeys(line["part"] for line in lines):
        found = [line for line in lines if line["part"] == part]
        if part != "replays":
            yield from _of_part(part, found)
            continue
        for line in found:
            how = "replays" if line["graph"] else "steps without a graph"
            told = f"{line['strategy']:9} by {line['transport']:10} {line['replays']} {how} in {line['seconds']:.1f} s"
            yield f"{told}: {line['bits']} set(s) of bits, {line['digest']}", line["bits"] == 1


def _of_part(part: str, lines: Sequence[Line]) -> Iterator[tuple[str, bool]]:
    cut = len(lines) * 3 // 4
    for name in (name for name in MEMORY if len(lines) > 3 and lines[-1][name]):
        before, after = (max(line[name] for line in some) for some in (lines[:cut], lines[cut:]))
        told = f"{part}: {name} memory at most {before / 2**20:.0f} MiB, in the last quarter {after / 2**20:.0f} MiB"
        yield told, after <= max(MOST_LARGER * before, before + ROOM)
    # the first two pictures of a kind compile and capture
    later = [[line["seconds"] for line in lines if line["kind"] == kind and line["time"] > 2] for kind in _kinds(lines)]
    ratios = [median(each[len(each) // 2 :]) / median(each[: len(each) // 2]) for each in later if len(each) > 1]
    if ratios:
        told = f"{part}: the later ones of a kind take {median(ratios):.3f} times the seconds of the earlier ones"
        yield told, median(ratios) <= MOST_SLOWER
    kinds, sets = len(_kinds(lines)), len({(line["kind"], line["digest"]) for line in lines})
    yield f"{part}: {len(lines)} of {kinds} kinds have {sets} sets of bits", sets == kinds


def _kinds(lines: Sequence[Line]) -> list[int]:
    return [*dict.fromkeys(line["kind"] for line in lines)]


def memory(mesh: Mesh) -> dict[str, int]:
    """Bytes on the rank that has most: in torch's tensors, of the device as a whole (other ranks' mappings included),
    and resident on the host, once the device has done its work.
    """
    held = {"host": 0, "allocated": 0, "used": 0}
    with suppress(OSError):  # a system without /proc
        held["host"] = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    if mesh.device.type == "cuda":
        torch.cuda.synchronize(mesh.device)
        free, total = torch.cuda.mem_get_info(mesh.device)
        held |= {"allocated": torch.cuda.memory_allocated(mesh.device), "used": total - free}
    every = mesh.collect(held, dict[str, int])
    return {name: max(each[name] for each in every) for name in held}


# Calls ------------------------------------------------------------------------------------------------------------


def calls(count: int, dtype: torch.dtype, device: torch.device) -> Iterator[Line]:
    """Yield a line for each kind of call: seconds of its calls, the digest of the last result, memory afterwards.

    The transformer is FLUX.1 with few blocks and heads, computed once by fused blocks and once by diffusers' own.
    The kind that came first comes again in the end and must have the same bits; what was kept for it was freed
    meanwhile, if there were many kinds. count: kinds of calls for each way to compute them; 0 does nothing.
    """
    if not count:
        return
    mesh, chosen = Mesh.from_env(cfg=1, device=device), kinds(count)
    for name, native in WAYS.items():
        known = RELEASED["flux.1-dev"].small()
        model = known.build(dtype, device)
        seqpar.parallelize(model, mesh, native=native)
        for index, kind in enumerate([*chosen, chosen[0]]):
            start = time.perf_counter()
            bits, number = digest(_called(model, known, kind)), chosen.index(kind)
            line = {"part": f"calls {name}", "picture": index, "kind": number, "time": 1 + index // len(chosen)}
            yield {**line, "seconds": time.perf_counter() - start, "digest": bits, **memory(mesh)}
        seqpar.release(model)


def kinds(count: int) -> list[tuple[int, int, int]]:
    """(rows, columns, tokens of the prompt) of different kinds of calls, the largest first."""
    every = [(rows, columns, text) for rows in ROWS for columns in ROWS for text in TEXT]
    chosen = random.Random(2).sample(every, min(count, len(every)))
    largest = max(chosen, key=lambda kind: kind[0] * kind[1] + kind[2])
    return sorted(chosen, key=lambda kind: kind != largest)


@torch.no_grad()
def _called(model: Any, known: Released, kind: tuple[int, int, int]) -> Tensor:
    weight = next(model.parameters())
    inputs = replace(known, size=kind[:2], text=kind[2]).arguments(weight.dtype, weight.device)
    return [model(**inputs, return_dict=False)[0] for _ in range(TIMES)][-1]


# Replays ----------------------------------------------------------------------------------------------------------


def replays(count: int, dtype: torch.dtype, device: torch.device) -> Iterator[Line]:
    """Yield a line for each strategy and transport on all ranks: how often a run of 25 steps had other bits.

    A rank is held up by a kernel that only waits, queued between two steps, so that the other ranks' kernels wait for
    its blocks in the middle of a graph; on CPUs by a sleep. count: steps, of which the last run is completed; 0 does
    nothing.
    """
    world = Mesh.joined(device).world.size if count else 0
    for strategy, facts in strategies().items():
        for ring in (ring for ring in range(1, world + 1) if world % ring == 0):
            if not facts.names(ring, world // ring):
                continue
            mesh = Mesh.from_env(cfg=1, ring=ring, ulysses=world // ring, device=device)
            for transport in _contract.names():
                yield _held(mesh, strategy, transport, -(-count // STEPS), min(count, STEPS), dtype)


def _held(mesh: Mesh, strategy: str, transport: str, runs: int, steps: int, dtype: torch.dtype) -> Line:
    model = Files.locate(BUILTIN).blueprint.build(dtype, mesh.device)
    dit = DistributedDiT(model, mesh, strategy, "auto", transport)
    noise = draw_noise((1, dit.config.in_channels, *[dit.config.sample_size] * 2), torch.Generator().manual_seed(0))
    delays, digests, start = random.Random(mesh.world.rank), set[str](), time.perf_counter()

    def on_step(index: int) -> None:
        if delays.random() < SHARE:
            _hold_up(mesh.device, delays.random() * LONGEST_S)

    with Sampler(dit) as sampler:
        for _ in range(runs):
            scheduler, labels = DDIMScheduler.from_config(DDIM_DEFAULT), {"class_labels": torch.tensor([7])}
            told = {"steps": steps, "guidance": Guidance(4.0), "on_step": on_step}
            digests.add(digest(sampler(scheduler, noise, labels, **told)))
    dit.check_delivered()
    dit.release()
    about = {"part": "replays", "strategy": strategy, "ring": mesh.ring.size, "ulysses": mesh.ulysses.size}
    about |= {"transport": transport, "replays": runs * steps, "graph": mesh.device.type == "cuda"}
    about["bits"] = max(mesh.collect(len(digests), int))
    return about | {"digest": min(digests), "seconds": time.perf_counter() - start}


def _hold_up(device: torch.device, seconds: float) -> None:
    """Let this rank do nothing for a while, on the device where there is a GPU."""
    if device.type == "cuda":
        torch.cuda._sleep(int(seconds * CYCLES_A_S))
    else:
        time.sleep(seconds)
