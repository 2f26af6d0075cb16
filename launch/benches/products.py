"""Matrix products with an activation in their epilogue, beside cuBLAS and a kernel; they decide `FASTER`, `EPILOGUE`.

Each row has TFLOP/s and the error against fp32 arithmetic. "alone" is the product without its activation.
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

from launch.benches import timing
from launch.benches.timing import append, command, environment, over, timed_over
from seqpar.kernels import gated_linear, gelu, swiglu
from seqpar.kernels.gated_linear import Tile, why_not

TILES = (
    Tile(128, 192, 2),
    Tile(128, 192, 1, 2),
    Tile(128, 192, 1, 4),
    Tile(128, 128, 2),
    Tile(128, 128),
    Tile(64, 192, 1, 2),
    Tile(128, 256, 1, 2, pingpong=False),
    Tile(256, 192, 2, pingpong=False),
)
ALONE = "cuBLAS alone"


@dataclass(frozen=True)
class Product:
    """x (rows, inner) times weights (columns, inner): its inputs, the ways to compute it, and the reference."""

    name: str
    inner: int
    columns: int
    data: Callable[[int], tuple[Tensor, ...]]
    ways: Mapping[str, Callable[..., Tensor]]
    reference: Callable[..., Tensor]


def products(device: str = "cuda") -> Sequence[Product]:
    """w1 and w3 with SwiGLU for three models, and the first layer of DiT-XL/2's feed-forward."""
    rand, ways = partial(timing.rand, device=device), gated_ways()

    def gated(inner: int, width: int, rows: int) -> tuple[Tensor, Tensor]:
        return rand(2, rows // 2, inner), rand(2 * width, inner) / inner**0.5

    return (
        *(
            Product(
                f"w1, w3 + SwiGLU, {name}", inner, 2 * width, partial(gated, inner, width), ways, gated_linear.reference
            )
            for name, inner, width in (("7B", 4096, 11008), ("3B", 3072, 8192), ("600M", 1536, 4096))
        ),
        Product(
            "fc1 + bias + GELU, DiT-XL/2",
            1152,
            4608,
            lambda n: (rand(2, n // 2, 1152), rand(4608, 1152) / 1152**0.5, rand(4608)),
            gelu_ways(),
            gelu.linear_reference,
        ),
    )


def gated_ways() -> Mapping[str, Callable[..., Tensor]]:
    """Name -> a function of x and weights that returns SwiGLU of their product."""
    two: dict[str, Callable[..., Tensor]] = {ALONE: F.linear}
    two["cuBLAS + SwiGLU kernel"] = lambda x, w: swiglu.launch(F.linear(x, w))
    if (reason := why_not()) is not None:
        print(f"quack is not compared: {reason}")
        return two
    return two | {f"quack, {tile}": partial(gated_linear.launch, tiled=tile) for tile in TILES}


def gelu_ways() -> Mapping[str, Callable[..., Tensor]]:
    """Name -> a function of x, weights and bias that returns GELU of their product."""
    return {
        ALONE: lambda x, w, b: F.linear(x, w),
        "cuBLAS + bias + GELU kernel": lambda x, w, b: gelu.launch(F.linear(x, w), b),
        "cuBLAS with GELU in its epilogue": gelu.linear_epilogue,
    }


def main(rows: Sequence[int], rounds: int, out: Path | None, named: str) -> None:
    """Measure the products whose name contains `named`, print a table, append the lines."""
    chosen = [product for product in products() if named in product.name]
    for product in chosen:
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
        {
            "bench": "products",
            "case": at | {"way": name},
            "ms": ms,
            **made,
            "error": errors[name],
            "tflops": 2 * rows * product.columns * product.inner / ms["median"] / 1e9,
        }
        for name, ms in times.items()
    ]


def works(name: str, way: Callable[..., Tensor], data: tuple[Tensor, ...]) -> bool:
    """Whether a way runs here; prints the reason if it does not. Compilers raise several types of errors."""
    try:
        way(*data)
        torch.cuda.synchronize()
    except (RuntimeError, ValueError, TypeError, AttributeError) as refused:
        print(f"not possible: {name}: {type(refused).__name__}: {str(refused).splitlines()[0][:150]}", flush=True)
        return False
    return True


def error(way: Callable[..., Tensor], product: Product, data: tuple[Tensor, ...]) -> float | None:
    """Relative error; None for the product alone, which has no activation to compare."""
    if way is product.ways[ALONE]:
        return None
    want = product.reference(*(x.float() for x in data))
    return float((way(*data) - want).norm() / want.norm())


def row(line: dict[str, Any]) -> str:
    """One line of the table."""
    case, wrong = line["case"], "-" if line["error"] is None else f"{line['error']:.1e}"
    return (
        f"{case['rows']:>6} rows  {case['product']:<28} {1e3 * line['ms']['median']:8.1f} us  "
        f"{line['tflops']:4.0f} TFLOP/s  error {wrong:<8} {case['way']}"
    )
