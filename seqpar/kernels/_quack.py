"""Matrix products with arithmetic of ours in their epilogue, by quack (CuTe DSL): whether it can be called; its tiles.

quack-kernels 0.6.5 compiles for Hopper with nvidia-cutlass-dsl 4.8.1 (without a GPU, too: CUTE_DSL_ARCH=sm_90a and
QUACK_ARCH=90). Compiling takes seconds for each tile. All its tiles give the same bits, whatever the number of rows
(seen on an H200, and tested), so few rows may have another tile. Between cuBLAS and quack bits differ: which of the two
it is depends on the tokens of the whole sequence, never on those of a rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seqpar import exact
from seqpar.kernels._triton import fused


class Tile(NamedTuple):
    """rows x columns of the product, clusters of programs, whether two tiles take turns (pingpong)."""

    rows: int
    columns: int
    cluster_rows: int = 1
    cluster_columns: int = 1
    pingpong: bool = True


class Faster(NamedTuple):
    """From so many tokens of a sequence on the product is made by this tile; few: (most rows, tile), for few rows."""

    tokens: int
    tile: Tile
    few: tuple[tuple[int, Tile], ...] = ()


Table = Mapping[tuple[tuple[int, int], int, int], Faster]
"""By (compute capability, rows of the weights, columns of the weights)."""


def choose(table: Table, x_BlE: Tensor, weight: Tensor, tokens: int | None, *others: Tensor) -> Tile | None:
    """The tile for x W^T on a rank; None for cuBLAS and a kernel, also where quack cannot be called.

    tokens: of the whole sequence, those of x where None.
    """
    if x_BlE.dtype not in (torch.bfloat16, torch.float16) or not fused(x_BlE, weight, *others):
        return None
    (batch, mine, _), (rows, columns) = x_BlE.shape, weight.shape
    found = table.get((torch.cuda.get_device_capability(x_BlE.device), rows, columns))
    if found is None or why_not() is not None:
        return None
    return tile_for(found, batch * mine, mine if tokens is None else tokens)


def tile_for(found: Faster, rows: int, tokens: int) -> Tile | None:
    """The tile for so many rows on a rank; None for cuBLAS and a kernel."""
    few = next((tile for most, tile in found.few if rows <= most), None)
    if tokens >= found.tokens:
        return few or found.tile
    # at few rows cuBLAS rounds by their number anyhow, except in exact mode
    return None if exact.is_on() else few


def product(name: str, tile: Tile, *operands: Tensor | None, vectors: dict[str, Tensor], **options: Any) -> None:
    """The product with this epilogue of `_epilogues`, of A (.., M, K), B (.., N, K), to D, with C (.., M, N).

    `ValueError` where quack is not installed. No autotuning: bits do not depend on who ran first.
    """
    found = _load()
    if isinstance(found, str):
        raise ValueError(f"got a tile for quack, expected it installed: {found}; pip install 'seqpar[flash]'")
    getattr(found, name).gemm(
        *operands, epi_args=vectors, tile_M=tile.rows, tile_N=tile.columns, cluster_M=tile.cluster_rows,
        cluster_N=tile.cluster_columns, pingpong=tile.pingpong, **options,
    )  # fmt: skip


def why_not() -> str | None:
    """None where quack can be called, else the reason why not."""
    found = _load()
    return found if isinstance(found, str) else None


@cache
def _load() -> Any:
    """The module of epilogues, or why there is none."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        return "needs a Hopper GPU"
    try:
        from seqpar.kernels import _epilogues
    except ImportError as error:
        return f"quack is not installed: {error}"
    except TypeError as error:  # it refuses what it cannot tell the version of: a CuTe DSL outside site-packages
        return f"quack refuses: {str(error).splitlines()[0]}"
    return _epilogues
