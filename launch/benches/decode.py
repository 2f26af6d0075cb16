"""Decoding a latent into a picture or a video: ours on all ranks beside diffusers' on one GPU, whole and tiled.

    for n in 1 2 4; do
        torchrun --nproc_per_node=$n launch/bench.py decode --vae kl --size 1024 2048 4096 8192 --out lines.jsonl
        torchrun --nproc_per_node=$n launch/bench.py decode --vae wan --frames 81 --size 720x1280 --out lines.jsonl
    done

Decoders have their released sizes and random weights (`launch/baselines/decoders.py`). diffusers' rows run on rank 0
while the other ranks wait on the host. Each row is a JSON line: ms of the slowest rank, the memory that the worst rank
needs beside weights, both against diffusers' eager row of the same run; the error against fp32 on one GPU, where that
is affordable, and against diffusers' eager row; where the time goes, by the names of kernels. A row that is not
possible has the reason. On a CPU decoders are tiny and in fp32.
"""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from launch.baselines.decoders import DECODERS
from launch.baselines.graphs import graphed
from launch.benches.decode_table import EAGER, TILING, shown
from launch.benches.decode_times import GIB, free, memory, once, times, trace, worst
from launch.benches.decode_ways import Case, Decoding, Way, megapixels, ways
from launch.benches.difference import draw, far
from launch.benches.timing import append, attempt, command, environment, slowest
from seqpar import mesh as meshes
from seqpar.mesh import Mesh
from seqpar.shard import starts
from seqpar.transports.collective.point_to_point import gather
from seqpar.vae.cut import ROWS, Cut

REFUSALS = (ValueError, RuntimeError, AssertionError, TypeError)  # what torch and decoders raise for what cannot run
LATE = "left out: --seconds are over"
Line = dict[str, Any]


@dataclass(frozen=True)
class Decode:
    """Time decoding on all ranks, beside diffusers' on one GPU."""

    vae: tuple[str, ...] = ("kl",)
    """Decoders: kl, qwen (pictures), wan, hunyuan, ltx (videos)."""
    size: tuple[str, ...] = ("1024", "2048")
    """Pixels of a side, or height x width (720x1280); one for some decoder only begins with its name (kl:4096)."""
    frames: int = 81
    """Frames of videos."""
    rounds: int = 3
    """Most rounds of a row; each times at least one decoding."""
    row_seconds: float = 3.0
    """No further round of a row is started after this time."""
    seconds: float = 200.0
    """No row is started after this time."""
    only: tuple[str, ...] = ()
    """Time only rows whose name contains one of these words, and diffusers' eager one (ours, tiling, graph ...)."""
    graph_megapixels: float = 4.3
    """Capture CUDA graphs of decodings of at most this many million pixels."""
    eager_megapixels: float = 1000.0
    """Time diffusers' own decoding up to this many million pixels; larger ones may only run out of memory, late."""
    tiling_megapixels: float = 1000.0
    """Time diffusers' tiling up to this many million pixels."""
    truth_megapixels: float = 4.7
    """Compare with fp32 on one GPU up to this many million pixels; the first frames of videos."""
    trace: tuple[str, ...] = ("ours",)
    """Say where the time goes for rows whose name contains one of these words, and which run without a graph."""
    transport: str = "auto"
    """Transport of our rows."""
    picture: Path | None = None
    """Draw the differences to one GPU in this folder."""
    out: Path | None = None
    """Append JSON lines here."""


@dataclass
class Seen:
    """What rows of a case are compared with: pictures on rank 0, ms and GiB of diffusers' rows on every rank."""

    checked: Tensor | None = None  # the latents that are compared with fp32: all, or the first frames
    truth: Tensor | None = None
    one_gpu: float = 0.0  # the relative error of diffusers' eager row
    pictures: dict[str, Tensor] = field(default_factory=dict)
    ms: dict[str, float] = field(default_factory=dict)
    gib: dict[str, float] = field(default_factory=dict)

    def whole(self, case: Case) -> bool:
        """Return whether all frames are compared with fp32."""
        return self.checked is not None and self.checked.shape == case.z.shape


def main(args: Decode) -> None:
    """Measure all decoders and sizes, print a table on rank 0 last."""
    _, world = meshes.join()
    works = check(args)
    mesh = Mesh.from_env(cfg=1, device=meshes.pick_device(world))
    until, lines = time.monotonic() + args.seconds, list[Line]()
    gather(torch.zeros(1, device=mesh.device), mesh.world, (1,) * mesh.world.size)  # NCCL takes its memory now
    for name, sizes in works.items():
        decoder, on_gpu = DECODERS[name], mesh.device.type == "cuda"
        vae = decoder.build(meshes.default_dtype(mesh.device), mesh.device, tiny=not on_gpu)
        for size in sizes:
            case = Case(name, decoder, vae, size, args.frames if decoder.video else 1, mesh, args.transport)
            lines += measure(args, case, until)
    if mesh.is_main:
        print("\n" + "\n".join(map(shown, lines)), flush=True)


def check(args: Decode) -> dict[str, list[tuple[int, int]]]:
    """Return the sizes of each decoder as (height, width); `ValueError` for flags that cannot be measured."""
    named = [text.rpartition(":") for text in args.size]
    if unknown := [name for name in (*args.vae, *(name for name, _, _ in named)) if name and name not in DECODERS]:
        raise ValueError(f"got the decoder {unknown[0]}, expected one of {', '.join(DECODERS)}")
    if args.frames < 1 or args.rounds < 1:
        raise ValueError(f"got --frames {args.frames} --rounds {args.rounds}, expected at least 1 of each")
    for _, _, text in named:
        if not re.fullmatch(r"[1-9][0-9]*(x[1-9][0-9]*)?", text):
            raise ValueError(f"got --size {text}, expected a number of pixels, or two as in 720x1280")
    sides = [(name, [int(side) for side in text.split("x")]) for name, _, text in named]
    return {vae: [(each[0], each[-1]) for name, each in sides if name in ("", vae)] for vae in args.vae}


@torch.no_grad()
def measure(args: Decode, case: Case, until: float) -> list[Line]:
    """Time the rows of a case one after the other; append and print each line as soon as it is there."""
    seen, lines, mesh = Seen(), list[Line](), case.mesh
    if not mesh.share(time.monotonic() > until, bool):
        _find_truth(args, case, seen)
    for way in ways(case):
        if not _wanted(args, case, way):
            continue
        late = mesh.share(time.monotonic() > until, bool)
        found = {"ms": None, "refused": LATE} if late else _row(args, case, way, seen)
        line = _line(case, way, found, seen)
        lines.append(line)
        free(mesh.device)
        if mesh.is_main:
            append([line], args.out)
            print(shown(line), flush=True)
    if args.picture and EAGER in seen.pictures and mesh.is_main:
        base, name = seen.pictures.pop(EAGER), f"{case}".replace(" ", "-")
        draw(base, seen.pictures, args.picture / f"{name}-{mesh.world.size}.png")
    return lines


def _wanted(args: Decode, case: Case, way: Way) -> bool:
    if way.name == TILING and case.megapixels > args.tiling_megapixels:
        return False
    if way.name.startswith(EAGER) and case.megapixels > args.eager_megapixels:
        return False
    return way.name == EAGER or any(word in way.name for word in args.only or ("",))


def _find_truth(args: Decode, case: Case, seen: Seen) -> None:
    """Decode on rank 0 in fp32 without TF32 (in fp64 if the decoder is in fp32), where that is affordable."""
    z = case.z
    while megapixels(case.decoder, z) > args.truth_megapixels and z.dim() == 5 and z.shape[2] > 1:
        z = z[:, :, : z.shape[2] // 2]
    if megapixels(case.decoder, z) > args.truth_megapixels:
        return

    def decoded() -> Tensor:
        wide = torch.float64 if case.dtype == torch.float32 else torch.float32
        twin: Any = torch.nn.Module.to(copy.deepcopy(case.vae), wide)
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            return twin.decode(z.to(wide), return_dict=False)[0]

    seen.truth, why = attempt(lambda: decoded() if case.mesh.is_main else None, case.mesh, *REFUSALS)
    seen.checked = None if why else z
    if case.mesh.is_main and why:
        print(f"{case}: no errors against one GPU in higher precision: {why}", flush=True)
    free(case.mesh.device)


# A row ------------------------------------------------------------------------------------------------------------


def _row(args: Decode, case: Case, way: Way, seen: Seen) -> Line:
    """Set a row up, time it, compare its result, and return what its line says. A collective call."""
    mesh = case.mesh
    if why := _unfit(args, case, way, seen):
        return {"ms": None, "refused": why}
    before = memory(mesh.device)
    with ExitStack() as stack:
        begun, why = attempt(lambda: _begin(case, way, stack), mesh, *REFUSALS)
        if why:
            return {"ms": None, "refused": why}
        work, step = begun or (None, None)
        ms = times(step, mesh, args.rounds, args.row_seconds)
        after = memory(mesh.device)
        found: Line = worst(mesh, {name: after[name] - before[name] for name in after})
        found["ms"] = slowest({"all": ms}, mesh)["all"]
        errors, why = attempt(partial(_errors, case, way, work, seen), mesh, *REFUSALS)
        found |= errors or ({"no_errors": why} if why else {})
        if mesh.device.type == "cuda" and not way.graph and any(word in way.name for word in args.trace):
            parts, why = attempt(lambda: trace(work) if work else None, mesh, *REFUSALS)
            found |= parts or ({"no_trace": why} if why else {})
    return found


def _begin(case: Case, way: Way, stack: ExitStack) -> tuple[_Work, Callable[[], object]] | None:
    """Set a row up on the ranks that decode, and decode once, which allocates, compiles and tunes."""
    if not (way.everywhere or case.mesh.is_main):
        return None
    work = _Work(stack.enter_context(way.ready()), case.z)
    step = graphed(work) if way.graph else work
    once(step, case.mesh.device)
    return work, step


class _Work:
    """Decodes the latents of a case, and keeps the result."""

    def __init__(self, decode: Decoding, z: Tensor) -> None:
        self.decode, self.z = decode, z
        self.out: Tensor | None = None

    def __call__(self) -> None:
        self.out = None  # its memory is free before the next one is made
        self.out = self.decode(self.z)


def _unfit(args: Decode, case: Case, way: Way, seen: Seen) -> str | None:
    """Return why a graph is not captured; its memory is kept beside that of the calls before the capture."""
    if not way.graph:
        return None
    if case.megapixels > args.graph_megapixels:
        return f"no graph of {case.megapixels:.1f} megapixels, more than --graph-megapixels {args.graph_megapixels:g}"
    need, left = 2 * seen.gib.get(EAGER, 0.0), torch.cuda.mem_get_info()[0] / GIB
    short = case.mesh.share(need > left, bool)
    return f"a graph would need some {need:.0f} GiB" if short else None


def _errors(case: Case, way: Way, work: _Work | None, seen: Seen) -> Line:
    """Return the distances to fp32 and to diffusers' eager row, on rank 0. All ranks decode what is compared."""
    if work is None or work.out is None:
        return {}
    checked = work.out if seen.whole(case) else None
    if seen.checked is not None and checked is None and not way.graph:
        checked = work.decode(seen.checked)
    if not case.mesh.is_main:
        return {}
    found: Line = {}
    cuts = _cuts(case) if way.everywhere and case.mesh.world.size > 1 else ()
    if seen.truth is not None and checked is not None:
        found["error"] = far(checked, seen.truth, cuts)
        seen.one_gpu = found["error"]["relative"] if way.name == EAGER else seen.one_gpu
        found["error"] |= {"x_one_gpu": found["error"]["relative"] / seen.one_gpu} if seen.one_gpu else {}
    if EAGER in seen.pictures:
        found["difference"] = far(work.out, seen.pictures[EAGER], cuts)
    if way.name in (EAGER, TILING) or way.kind == "ours":
        seen.pictures["ours" if way.kind == "ours" else way.name] = work.out.clone()
    return found


def _cuts(case: Case) -> tuple[int, ...]:
    """Return the rows of pixels at which strips begin; none where columns are cut."""
    rows, columns = case.z.shape[-2:]
    cut = Cut.of(case.mesh.world, rows, columns)
    found = starts(cut.sizes)[1:] if cut is not None and cut.dim == ROWS else ()
    return tuple(start * case.decoder.factor for start in found)


# Results ----------------------------------------------------------------------------------------------------------


def _line(case: Case, way: Way, found: Line, seen: Seen) -> Line:
    """Return the JSON line of a row, and keep what later rows are compared with."""
    about = {"vae": case.name, "size": list(case.size), "frames": case.frames, "what": str(case), "way": way.name}
    about |= {"dtype": str(case.dtype).removeprefix("torch."), "transport": case.transport, **way.facts}
    gpus = case.mesh.world.size if way.everywhere else 1
    line: Line = {"bench": "decode", "case": about, "gpus": gpus, "ranks": case.mesh.world.size, **found}
    if found["ms"] is not None:
        if way.name in (EAGER, TILING):
            seen.ms[way.name] = found["ms"]["median"]
            seen.gib |= {way.name: found["gib"]} if "gib" in found else {}
        line["times"] = {name: ms / found["ms"]["median"] for name, ms in seen.ms.items()}
        if found.get("gib") and EAGER in seen.gib:
            line["memory"] = (found["gib"] + found["outside_gib"]) / seen.gib[EAGER]
    return line | {"command": command(), "env": environment(case.mesh.device)}
