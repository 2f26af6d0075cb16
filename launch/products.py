"""Matrix products with arithmetic in their epilogue, against cuBLAS and a kernel: what decides `FASTER`, `EPILOGUE`.

Beside each way: TFLOP/s and the error against fp32 arithmetic. "alone" is the product without what follows it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.runtime.errors import OutOfResources

from launch import timing
from launch.timing import append, command, environment, over, timed_over
from seqpar.kernels import adaln, gated_linear, gelu, residual_linear, swiglu
from seqpar.kernels._quack import QuackTile, why_not
from seqpar.kernels.adaln import Gated, Norm
from seqpar.kernels.gated_linear import Tile

NORM = Norm("rms", 1e-5)

# what fits the registers and the shared memory of a Hopper multiprocessor, as ptxas counts
GATED = (
    Tile(128, 128, 64, 4, 8),
    Tile(128, 128, 64, 3, 8),
    Tile(256, 64, 64, 4, 8),
    Tile(128, 64, 64, 3, 4, programs=2),  # one program multiplies while the other is in its epilogue
    Tile(64, 128, 64, 2, 4, programs=2),
    Tile(128, 64, 128, 3, 4),
    Tile(64, 128, 64, 4, 4),  # few rows
)
QUACK = (
    QuackTile(128, 192, pingpong=True),
    QuackTile(128, 256),
    QuackTile(256, 128),
    QuackTile(256, 192),
    QuackTile(128, 256, 1, 2),
)
RESIDUAL = (
    Tile(128, 256, 64, 4, 8),
    Tile(128, 256, 64, 3, 8),
    Tile(128, 128, 64, 4, 8),
    Tile(128, 128, 64, 3, 4, programs=2),
    Tile(64, 256, 64, 4, 4),
    Tile(64, 128, 64, 6, 4),
)
ALONE = "cuBLAS alone"


@dataclass(frozen=True)
class Product:
    """x (rows, inner) times weights (columns, inner): what a way takes, the ways, and what they should make of it."""

    name: str
    inner: int
    columns: int
    data: Callable[[int], tuple[Tensor, ...]]
    ways: Mapping[str, Callable[..., Tensor]]
    reference: Callable[..., Tensor]


def products(device: str = "cuda") -> Sequence[Product]:
    """The 7B's w1, w3 with SwiGLU; its wo and w2 with all that follows; the first layer of DiT-XL/2's feed-forward."""
    rand = partial(timing.rand, device=device)

    def weights(columns: int, inner: int) -> Tensor:
        return rand(columns, inner) / inner**0.5

    def residual(inner: int, rows: int) -> tuple[Tensor, ...]:
        vectors = rand(2, 3, 4096, dtype=torch.float32).unbind(1)
        return rand(2, rows // 2, inner), weights(4096, inner), rand(2, rows // 2, 4096), *vectors

    return (
        Product("w1, w3 + SwiGLU, 7B", 4096, 2 * 11008, lambda n: (rand(2, n // 2, 4096), weights(2 * 11008, 4096)),
                gated_ways(), gated_linear.reference),
        *(Product(f"{name} + gate, residual, norm, 7B", inner, 4096, partial(residual, inner), residual_ways(),
                  lambda h, w, x, *vectors: branched(adaln.reference, F.linear(h, w), x, *vectors))
          for name, inner in (("wo", 4096), ("w2", 11008))),
        Product("fc1 + bias + GELU, DiT-XL/2", 1152, 4608,
                lambda n: (rand(2, n // 2, 1152), weights(4608, 1152), rand(4608)), gelu_ways(), gelu.linear_reference),
    )  # fmt: skip


def gated_ways() -> Mapping[str, Callable[..., Tensor]]:
    """x, weights -> SwiGLU of their product."""
    two: dict[str, Callable[..., Tensor]] = {ALONE: F.linear}
    two["cuBLAS + SwiGLU kernel"] = lambda x, w: swiglu.launch(F.linear(x, w))
    reason = why_not()
    if reason is not None:
        print(f"quack is not compared: {reason}")
    tiles: tuple[Tile | QuackTile, ...] = (*GATED, *(QUACK if reason is None else ()))
    return two | {f"one kernel, {tile}": partial(gated_linear.launch, tiled=tile) for tile in tiles}


def residual_ways() -> Mapping[str, Callable[..., Tensor]]:
    """h, weights, stream, gate, shift, scale -> what follows the stream, normalised and modulated."""

    def fused(tile: Tile) -> Callable[..., Tensor]:
        def way(h: Tensor, w: Tensor, x: Tensor, gate: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
            return adaln.launch(residual_linear.launch(x, gate, h, w, tiled=tile), None, shift, scale, NORM)[1]

        return way

    two: dict[str, Callable[..., Tensor]] = {ALONE: lambda h, w, *rest: F.linear(h, w)}
    two["cuBLAS + gate, residual, norm kernel"] = lambda h, w, *rest: branched(adaln.launch, F.linear(h, w), *rest)
    return two | {f"one kernel + norm kernel, {tile}": fused(tile) for tile in RESIDUAL}


def branched(
    adaln_by: Callable[..., tuple[Tensor, Tensor]], branch: Tensor, x: Tensor, gate: Tensor, shift: Tensor,
    scale: Tensor,
) -> Tensor:  # fmt: skip
    """The branch gated into the stream, and that normalised and modulated."""
    return adaln_by(x, Gated(gate, branch), shift, scale, NORM)[1]


def gelu_ways() -> Mapping[str, Callable[..., Tensor]]:
    """x, weights, bias -> GELU of their product."""
    return {
        ALONE: lambda x, w, b: F.linear(x, w),
        "cuBLAS + bias + GELU kernel": lambda x, w, b: gelu.launch(F.linear(x, w), b),
        "cuBLAS with GELU in its epilogue": gelu.linear_epilogue,
    }


def main(found: Sequence[Product], rows: Sequence[int], rounds: int, out: Path | None) -> None:
    """Measure, print a table, append the lines."""
    for product in found:
        for count in rows:
            lines = measure(product, count, rounds)
            print("".join(row(line) + "\n" for line in lines), end="", flush=True)
            append(lines, out)


def measure(product: Product, rows: int, rounds: int) -> list[dict[str, Any]]:
    """A line for each way."""
    size = 2 * (rows + product.columns) * product.inner
    sets = [product.data(rows) for _ in range(over(size))]
    ways = {name: way for name, way in product.ways.items() if name == ALONE or works(name, way, sets[0])}
    errors = {name: error(way, product, sets[0]) for name, way in ways.items()}
    times = timed_over(ways, sets, rounds)
    at = {"product": product.name, "rows": rows, "dtype": "bfloat16"}
    made = {"gpus": 1, "command": command(), "env": environment(torch.device("cuda"))}
    return [
        {"bench": "products", "case": at | {"way": name}, "ms": ms, **made, "error": errors[name],
         "tflops": 2 * rows * product.columns * product.inner / ms["median"] / 1e9}
        for name, ms in times.items()
    ]  # fmt: skip


def works(name: str, way: Callable[..., Tensor], data: tuple[Tensor, ...]) -> bool:
    """Whether a way runs here; says why not. Compilers have errors of their own."""
    try:
        way(*data)
        torch.cuda.synchronize()
    except (RuntimeError, ValueError, TypeError, AttributeError, OutOfResources) as refused:
        print(f"not possible: {name}: {type(refused).__name__}: {str(refused).splitlines()[0][:150]}", flush=True)
        return False
    return True


def error(way: Callable[..., Tensor], product: Product, data: tuple[Tensor, ...]) -> float | None:
    """Relative; None for the product alone, which is something else."""
    if way is product.ways[ALONE]:
        return None
    want = product.reference(*(x.float() for x in data))
    return float((way(*data) - want).norm() / want.norm())


def row(line: dict[str, Any]) -> str:
    """One line of the table."""
    case, wrong = line["case"], "-" if line["error"] is None else f"{line['error']:.1e}"
    return (f"{case['rows']:>6} rows  {case['product']:<28} {1e3 * line['ms']['median']:8.1f} us  "
            f"{line['tflops']:4.0f} TFLOP/s  error {wrong:<8} {case['way']}")  # fmt: skip
