"""Seconds from a prompt to a PNG with FLUX.1, by part: our own loop, the adapter, and diffusers' pipeline.

    for n in 1 2; do torchrun --nproc_per_node=$n launch/bench.py pipeline --model flux.1-dev --out lines.jsonl; done

Every row (`launch/benches/pictures.py`) makes a first picture (compilation, captures), and then pictures in turn with
the other rows (A B C A B C). The slowest rank counts, for each part and for the whole picture; each line names what
wrote its PNG.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor

from launch.benches.calls import REFUSALS
from launch.benches.pictures import Case, Picture, Pipeline, Row, adapters, own, theirs
from launch.benches.released import RELEASED
from launch.benches.timing import append, attempt, command, environment, slowest
from seqpar import mesh as meshes
from seqpar.mesh import Mesh

PARTS = ("encode", "steps", "decode", "png")
Line = dict[str, Any]


def main(args: Pipeline) -> None:
    """Measure all rows and print a table on rank 0."""
    if args.model != "flux.1-dev":
        raise ValueError(f"got --model {args.model}, expected flux.1-dev: no other pipeline is made here yet")
    _, world = meshes.join()
    device = meshes.pick_device(world)
    side = args.size // 16
    released = RELEASED[args.model].sized(side * side, None)
    case = Case(args, released, Mesh.from_env(cfg=1, device=device), meshes.default_dtype(device))
    rows = [*own(case), *adapters(case), *theirs(case)]
    measure(case, [row for row in rows if any(word in row.name for word in args.only or ("",))])


def measure(case: Case, rows: Sequence[Row]) -> list[Line]:
    """Make first pictures of all rows, then rounds of pictures; append and print a line for each row."""
    mesh, until = case.mesh, time.monotonic() + 60 * case.args.minutes
    makers: dict[str, Picture] = {}
    lines: dict[str, Line] = {row.name: {"refused": "left out: --minutes are over"} for row in rows}
    times: dict[str, list[dict[str, float]]] = {row.name: [] for row in rows}
    latents: dict[str, Tensor] = {}
    with ExitStack() as stack:
        for row in rows:
            if mesh.share(time.monotonic() > until, bool):
                break
            begun = time.perf_counter()
            maker, why = attempt(lambda row=row: _first(stack, row), mesh, *REFUSALS)
            if maker is None:
                lines[row.name] = {"refused": why}
            else:
                makers[row.name], lines[row.name] = maker, {"first_s": time.perf_counter() - begun}
            if mesh.is_main:
                print(f"{row.name}: {why or f'first picture after {time.perf_counter() - begun:.1f} s'}", flush=True)
        for index in range(case.args.rounds):
            for name, maker in makers.items():
                if not mesh.share(time.monotonic() > until, bool):
                    ms, latents[name] = maker(f"{index} houses by the sea")
                    times[name].append(ms)
    made = [_line(case, row, lines[row.name], times[row.name], latents) for row in rows]
    if mesh.is_main:
        append(made, case.args.out)
        print("\n".join(map(shown, made)), flush=True)
    return made


def _first(stack: ExitStack, row: Row) -> Picture:
    """Set a row up, and make its first picture."""
    maker = stack.enter_context(row.ready())
    maker("a first picture")
    return maker


def _line(case: Case, row: Row, made: Line, times: Sequence[dict[str, float]], latents: dict[str, Tensor]) -> Line:
    """Return the JSON line of a row: ms of the whole picture, and of each part."""
    args, mesh = case.args, case.mesh
    about = {"model": args.model, "steps": args.steps, "size": args.size, "kind": row.kind, "way": row.name}
    about |= {"strategy": args.strategy, "png": row.writer}
    line: Line = {"bench": "pipeline", "case": about, "gpus": mesh.world.size, "ms": None, **made}
    if times:
        parts = {part: [ms[part] for ms in times] for part in PARTS} | {"all": [sum(ms.values()) for ms in times]}
        found = slowest(parts, mesh)
        line |= {"ms": found.pop("all"), "parts_ms": found, "ms_a_step": found["steps"]["median"] / args.steps}
        line.pop("refused", None)
    first = next((x for name, x in latents.items() if name.startswith("diffusers")), None)
    if first is not None and row.name in latents:
        line["difference"] = float((latents[row.name].double() - first.double()).norm() / first.double().norm())
    return line | {"command": command(), "env": environment(mesh.device)}


def shown(line: Line) -> str:
    """Return one line of the table."""
    name, ms = line["case"]["way"], line["ms"]
    if ms is None:
        return f"{name:<48} {line.get('refused', 'left out: --minutes are over')}"
    parts = ", ".join(f"{part} {1e-3 * each['median']:.3f}" for part, each in line["parts_ms"].items())
    told = f"{name:<48} {1e-3 * ms['median']:7.3f} s ({1e-3 * ms['min']:.3f} - {1e-3 * ms['max']:.3f}): {parts}"
    told += f" by {line['case']['png']}; {line['ms_a_step']:.1f} ms a step; first picture after {line['first_s']:.1f} s"
    return told + (f"; latents differ by {line['difference']:.1e}" if "difference" in line else "")
