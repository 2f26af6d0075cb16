"""Matrix products with arithmetic in their epilogue, against cuBLAS and a kernel: what decides `gated_linear.FASTER`.

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

from launch import timing
from launch.timing import append, command, environment, over, timed_over
from seqpar.kernels import gated_linear, gelu, swiglu
from seqpar.kernels.gated_linear import Tile

# what fits the registers and the shared memory of a Hopper multiprocessor, as ptxas counts
TILES = (
    Tile(128, 128, 64, 4, 8),
    Tile(128, 128, 64, 3, 8),
    Tile(256, 64, 64, 4, 8),
    Tile(128, 64, 64, 3, 4, programs=2),  # one program multiplies while the other is in its epilogue
    Tile(64, 128, 64, 2, 4, programs=2),
    Tile(128, 64, 128, 3, 4),
    Tile(64, 128, 64, 4, 4),  # few rows
)
ALONE = "cuBLAS alone"


@dataclass(frozen=True)
class Product:
    """x (rows, inner) times weights (columns, inner), the ways to compute it with its epilogue, and in plain torch."""

    name: str
    inner: int
    columns: int
    biased: bool
    ways: Mapping[str, Callable[..., Tensor]]
    reference: Callable[..., Tensor]

    def data(self, rows: int, device: str = "cuda") -> tuple[Tensor, ...]:
        """x, weights and, where there is one, a bias."""
        rand = partial(timing.rand, device=device)
        weights = rand(self.columns, self.inner) / self.inner**0.5
        return rand(2, rows // 2, self.inner), weights, *((rand(self.columns),) if self.biased else ())


def products() -> Sequence[Product]:
    """The 7B's w1|w3 with SwiGLU, and the first layer of DiT-XL/2's feed-forward with bias and GELU."""
    gated: dict[str, Callable[..., Tensor]] = {ALONE: F.linear}
    gated["cuBLAS + SwiGLU kernel"] = lambda x, w: swiglu.launch(F.linear(x, w))
    gated |= {f"one kernel, {tile}": partial(gated_linear.launch, tiled=tile) for tile in TILES}
    biased: dict[str, Callable[..., Tensor]] = {
        ALONE: lambda x, w, b: F.linear(x, w),
        "cuBLAS + bias + GELU kernel": lambda x, w, b: gelu.launch(F.linear(x, w), b),
        "cuBLAS with GELU in its epilogue": gelu.linear_epilogue,
    }
    return (
        Product("w1, w3 + SwiGLU, 7B", 4096, 2 * 11008, False, gated, gated_linear.reference),
        Product("fc1 + bias + GELU, DiT-XL/2", 1152, 4608, True, biased, gelu.linear_reference),
    )


def main(rows: Sequence[int], rounds: int, out: Path | None) -> None:
    """Measure, print a table, append the lines."""
    for product in products():
        for count in rows:
            lines = measure(product, count, rounds)
            print("".join(row(line) + "\n" for line in lines), end="", flush=True)
            append(lines, out)


def measure(product: Product, rows: int, rounds: int) -> list[dict[str, Any]]:
    """A line for each way."""
    size = 2 * (rows + product.columns) * product.inner
    sets = [product.data(rows) for _ in range(over(size))]
    errors = {name: error(way, product, sets[0]) for name, way in product.ways.items()}
    times = timed_over(product.ways, sets, rounds)
    at = {"product": product.name, "rows": rows, "dtype": "bfloat16"}
    made = {"gpus": 1, "command": command(), "env": environment(torch.device("cuda"))}
    return [
        {"bench": "products", "case": at | {"way": name}, "ms": ms, **made, "error": errors[name],
         "tflops": 2 * rows * product.columns * product.inner / ms["median"] / 1e9}
        for name, ms in times.items()
    ]  # fmt: skip


def error(way: Callable[..., Tensor], product: Product, data: tuple[Tensor, ...]) -> float | None:
    """Relative, of some rows; None for the product alone, which is something else."""
    if way is product.ways[ALONE]:
        return None
    want = product.reference(data[0][:, :64].float(), *(x.float() for x in data[1:]))
    return float((way(*data)[:, :64] - want).norm() / want.norm())


def row(line: dict[str, Any]) -> str:
    """One line of the table."""
    case, wrong = line["case"], "-" if line["error"] is None else f"{line['error']:.1e}"
    return (f"{case['rows']:>6} rows  {case['product']:<28} {1e3 * line['ms']['median']:8.1f} us  "
            f"{line['tflops']:4.0f} TFLOP/s  error {wrong:<8} {case['way']}")  # fmt: skip
