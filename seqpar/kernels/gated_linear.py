"""SwiGLU of a matrix product from packed weights w1|w3, silu(x W1^T) * (x W3^T): in the product's epilogue where that
is faster than cuBLAS and the kernel of `swiglu.py`.

When it wins: see `FASTER`, which holds what docs/benchmarks shows. The product is quack's (CuTe DSL), where it is
installed; quack-kernels 0.6.5 compiles for Hopper with nvidia-cutlass-dsl 4.8.1, in seconds for each tile. All its
tiles give the same bits, whatever the number of rows (seen on an H200, and tested), so few rows may have another tile.
Between cuBLAS and quack bits differ: which of the two it is depends on the tokens of the whole sequence, never on those
of a rank.
Source: GLU variants (arXiv 2002.05202).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from types import ModuleType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from seqpar import exact
from seqpar.kernels import swiglu
from seqpar.kernels._triton import fused
from seqpar.protocols import state_dtype

CASES = (
    *({"batch": 2, "tokens": n, "inner": 4096, "width": 11008} for n in (256, 4096)),  # Large-DiT 7B
    {"batch": 2, "tokens": 4096, "inner": 3072, "width": 8192},  # 3B
    {"batch": 1, "tokens": 1023, "inner": 1536, "width": 4096},  # 600M
)


class Tile(NamedTuple):
    """rows x columns of the product before SwiGLU, clusters of programs, whether two tiles take turns (pingpong)."""

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


QUACK = "0.6.5"  # others have other functions, or compile with another CuTe DSL; also in pyproject.toml

FASTER: Mapping[tuple[tuple[int, int], int, int], Faster] = {
    ((9, 0), 11008, 4096): Faster(1024, Tile(128, 192, 2), ((64, Tile(64, 192, 1, 2)), (128, Tile(128, 192, 1, 4)))),
    ((9, 0), 8192, 3072): Faster(0, Tile(128, 128, 2), ((128, Tile(128, 128)),)),
    ((9, 0), 4096, 1536): Faster(0, Tile(128, 128, 2), ((128, Tile(128, 128)),)),
}
"""(compute capability, F, K): as docs/benchmarks/2026-11-20-h200-tuned.md and 2026-11-21-h200-tried.md show. For the 7B
at 256 and 512 rows cuBLAS and a kernel are 6 to 8 % faster, which are a short sequence's rows; a long one's are the
same on several ranks."""


def gated_linear(x_BlE: Tensor, packed_F2E: Tensor, tokens: int | None = None) -> Tensor:
    """SwiGLU of x W^T, (B, l, F): rows of W are w1|w3; fp32 (fp64 for fp64) between the product and one rounding.

    tokens: of the whole sequence, those of x where None. Where `FASTER` has no entry for it the product is rounded,
    too, as torch rounds it.
    """
    batch, mine, _ = x_BlE.shape
    found = choice(x_BlE, packed_F2E)
    tile = found and tile_for(found, batch * mine, mine if tokens is None else tokens)
    if tile is None:
        return swiglu.swiglu(F.linear(x_BlE, packed_F2E))
    return launch(x_BlE, packed_F2E, tiled=tile)


def choice(x_BlE: Tensor, packed_F2E: Tensor) -> Faster | None:
    """What `FASTER` says of this chip and these weights; None also where quack cannot be called."""
    if x_BlE.dtype not in (torch.bfloat16, torch.float16) or not fused(x_BlE, packed_F2E):
        return None
    width, inner = packed_F2E.shape
    found = FASTER.get((torch.cuda.get_device_capability(x_BlE.device), width // 2, inner))
    return None if found is None or why_not() is not None else found


def tile_for(found: Faster, rows: int, tokens: int) -> Tile | None:
    """The tile for so many rows on a rank; None for cuBLAS and a kernel."""
    few = next((tile for most, tile in found.few if rows <= most), None)
    if tokens >= found.tokens:
        return few or found.tile
    # at few rows cuBLAS rounds by their number anyhow, except in exact mode
    return None if exact.is_on() else few


def reference(x_BlE: Tensor, packed_F2E: Tensor) -> Tensor:
    """The same in plain torch, rounded once."""
    wide = state_dtype(x_BlE.dtype)
    return swiglu.reference(F.linear(x_BlE.to(wide), packed_F2E.to(wide))).to(x_BlE.dtype)


def launch(x_BlE: Tensor, packed_F2E: Tensor, *, tiled: Tile) -> Tensor:
    """The same by quack; `ValueError` where it is not installed. No autotuning: bits do not depend on who ran first."""
    found = _load()
    if isinstance(found, str):
        raise ValueError(f"got a tile for quack, expected it installed: {found}; pip install 'seqpar[flash]'")
    out = x_BlE.new_empty(*x_BlE.shape[:2], packed_F2E.shape[0] // 2)
    found.gated.gemm(
        x_BlE.flatten(0, 1),
        packed_F2E,
        None,
        epi_args={"out": out.flatten(0, 1)},
        concat_layout=("B",),
        tile_M=tiled.rows,
        tile_N=tiled.columns,
        cluster_M=tiled.cluster_rows,
        cluster_N=tiled.cluster_columns,
        pingpong=tiled.pingpong,
    )
    return out


def why_not() -> str | None:
    """None where quack can be called, else the reason why not."""
    found = _load()
    return found if isinstance(found, str) else None


@cache
def _load() -> ModuleType | str:
    """The module of epilogues, or why there is none."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        return "needs a Hopper GPU"
    try:
        if (found := version("quack-kernels")) != QUACK:
            return f"needs quack-kernels {QUACK}, {found} is here"
        from seqpar.kernels import _epilogues
    except ImportError as error:
        return f"needs quack-kernels {QUACK}: {error}"
    except TypeError as error:  # it refuses what it cannot tell the version of: a CuTe DSL outside site-packages
        return f"quack refuses: {str(error).splitlines()[0]}"
    return _epilogues
