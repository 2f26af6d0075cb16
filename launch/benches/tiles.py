"""Time of each tile (rows a program, warps a row) of each kernel, fastest first; the winners belong in `tile(width)`.

The candidates keep many rows in flight without spilling, as ptxas counts registers for Hopper
(`tests/kernels/test_compiles.py` compiles them all). A kernel that is bound by memory needs about 50 KB in flight on
each multiprocessor; the fewer warps share a row, the fewer instructions its sums cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from launch.benches.kernels import Case, cases
from launch.benches.timing import append, command, copy_bandwidth, environment, timed_over
from seqpar.kernels import adaln, gelu, prepare, swiglu

WIDTHS = (4096, 3072, 1152)


@dataclass(frozen=True)
class Tiles:
    """Time every tile of every kernel that has tiles; run it on an idle GPU and write the winners into `tile`."""

    rows: tuple[int, ...] = (8192, 512, 32768)
    """Token rows (two batch rows of half as many)."""
    widths: tuple[int, ...] = WIDTHS
    """Model widths."""
    rounds: int = 5
    """Number of rounds; each round times every tile once."""
    out: Path | None = None
    """Append JSON lines here."""


def main(args: Tiles) -> None:
    """Measure, print a table, append the lines."""
    bandwidth = copy_bandwidth()
    print(f"copy: {bandwidth / 1e12:.2f} TB/s")
    for width in args.widths:
        for rows in args.rows:
            for case in cases(rows, width):
                lines = measure(case, rows, width, args.rounds, bandwidth)
                print("".join(row(line) + "\n" for line in lines), end="", flush=True)
                append(lines, args.out)


def candidates(case: Case, width: int) -> Sequence[Any]:
    """Tiles for a kernel at a model width; None, the current choice, comes first. Empty for a kernel without tiles."""
    per_row = adaln.block(width) // 32  # elements of a row for one warp's thread
    warps = [n for n in (1, 2, 4, 8, 16) if 16 <= per_row // n <= 64]
    if case.module is adaln:
        held = [adaln.Tile(rows, n) for n in warps if per_row // n <= 32 for rows in (1, 4)]
        return [None, *(adaln.Tile(rows, n, late=True) for n in warps for rows in (1, 2)), *held]
    if case.module is prepare:
        # below 4 warps a token's cosines are fewer than 16 bytes a thread
        return [None, *(prepare.Tile(n, early) for n in warps if n >= 4 for early in (False, True))]
    if case.module in (swiglu, gelu):
        shapes = [(1, 1024, 4), (2, 1024, 4), (4, 1024, 4), (1, 2048, 4), (2, 2048, 4), (4, 512, 2), (8, 512, 2)]
        return [None, *(case.module.Tile(*shape) for shape in shapes)]
    return []


def measure(case: Case, rows: int, width: int, rounds: int, bandwidth: float) -> list[dict[str, Any]]:
    """A line for each tile, the fastest first."""
    tiles = candidates(case, width)
    if not tiles:
        return []
    ways = {"today" if tile is None else str(tile): partial(case.module.launch, tiled=tile) for tile in tiles}
    times = timed_over(ways, case.sets(), rounds)
    at = {"kernel": case.name, "rows": rows, "width": width, "dtype": "bfloat16"}
    made = {
        "gpus": 1,
        "bytes": case.bytes,
        "copy_bytes_per_s": bandwidth,
        "command": command(),
        "env": environment(torch.device("cuda")),
    }
    return [
        {
            "bench": "tiles",
            "case": at | {"tile": tile},
            "ms": ms,
            **made,
            "share_of_copy": case.bytes / (ms["median"] * 1e-3) / bandwidth,
        }
        for tile, ms in sorted(times.items(), key=lambda item: item[1]["median"])
    ]


def row(line: dict[str, Any]) -> str:
    """One line of the table."""
    case = line["case"]
    return (
        f"{case['width']:>5} x {case['rows']:<6} {case['kernel']:<34} {1e3 * line['ms']['median']:8.1f} us  "
        f"{100 * line['share_of_copy']:5.1f} % of copy   {case['tile']}"
    )
