"""SwiGLU in the epilogue of a matrix product by quack (CuTe DSL), where it is installed: an alternative to our own.

quack-kernels 0.5.3 and 0.6.0 compile for Hopper with nvidia-cutlass-dsl 4.7.1 and 4.8.1; 0.6.2 and 0.6.5 refuse their
own epilogue there (a TypeError about what it depends on). Compiling takes seconds for each shape of tile. There is no
autotuning: the tile is an argument, so bits do not depend on who ran first, or on the number of rows.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor


class QuackTile(NamedTuple):
    """rows x columns of the product before SwiGLU, clusters of programs, whether two tiles take turns (pingpong)."""

    rows: int
    columns: int
    cluster_rows: int = 2
    cluster_columns: int = 1
    pingpong: bool = False


def why_not() -> str | None:
    """None where quack can be called, else the reason why not."""
    found = _load()
    return found if isinstance(found, str) else None


def gated(x_ME: Tensor, packed_F2E: Tensor, tile: QuackTile) -> Tensor:
    """SwiGLU of x W^T, (M, F), rows of W being w1|w3."""
    found = _load()
    if isinstance(found, str):
        raise ValueError(f"got a tile for quack, expected it installed: {found}; pip install 'seqpar[flash]'")
    gemm_gated, config = found
    out = x_ME.new_empty(x_ME.shape[0], packed_F2E.shape[0] // 2)
    how = config(tile_m=tile.rows, tile_n=tile.columns, pingpong=tile.pingpong, cluster_m=tile.cluster_rows,
                 cluster_n=tile.cluster_columns, is_dynamic_persistent=False, device_capacity=9)  # fmt: skip
    gemm_gated(x_ME, packed_F2E.t(), None, out, None, None, "swiglu", None, None, False, how, ("B",))
    return out


@cache
def _load() -> tuple[Any, Any] | str:
    """(its function without autotuning, its config), or why not."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        return "needs a Hopper GPU"
    try:
        from quack.gemm_config import GemmConfig  # pyright: ignore[reportMissingImports]
        from quack.gemm_interface import gemm_gated_tuned  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        return f"quack is not installed: {error}"
    return gemm_gated_tuned.fn, GemmConfig
