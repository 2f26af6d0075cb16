"""SwiGLU of a matrix product with packed weights w1|w3: silu(x W1^T) * (x W3^T).

The product is quack's (CuTe DSL) with SwiGLU in its epilogue, or cuBLAS's followed by the kernel of `swiglu.py`. The
epilogue is used for shapes in `FASTER` (measured, docs/benchmarks), if quack is installed. All its tiles give the same
bits, regardless of the number of rows (seen on an H200, and tested), so few rows may use another tile. cuBLAS and quack
give different bits, so the choice between them depends on the tokens of the whole sequence, never on those of a rank.
Source: GLU variants (arXiv 2002.05202).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from seqpar.kernels import _quack, gelu, swiglu
from seqpar.kernels._quack import Shape, Tile
from seqpar.kernels._triton import fused
from seqpar.mesh import exact
from seqpar.types.protocols import state_dtype

CASES = (
    *({"batch": 2, "tokens": n, "inner": 4096, "width": 11008} for n in (256, 4096)),  # Large-DiT 7B
    {"batch": 2, "tokens": 4096, "inner": 3072, "width": 8192},  # 3B
    {"batch": 1, "tokens": 1023, "inner": 1536, "width": 4096},  # 600M
    {"batch": 1, "tokens": 256, "inner": 6144, "width": 18432},  # FLUX.2's text
)


class Faster(NamedTuple):
    """The tile of quack's product for a sequence of at least `tokens` tokens.

    few: (largest number of rows, tile), for ranks with few rows.
    """

    tokens: int
    tile: Tile
    few: tuple[tuple[int, Tile], ...] = ()


FASTER: Mapping[Shape, Faster] = {
    ((9, 0), 11008, 4096): Faster(1024, Tile(128, 192, 2), ((64, Tile(64, 192, 1, 2)), (128, Tile(128, 192, 1, 4)))),
    ((9, 0), 8192, 3072): Faster(0, Tile(128, 128, 2), ((128, Tile(128, 128)),)),
    ((9, 0), 4096, 1536): Faster(0, Tile(128, 128, 2), ((128, Tile(128, 128)),)),
    ((9, 0), 18432, 6144): Faster(0, Tile(128, 192, 2)),  # FLUX.2-dev
    ((9, 0), 9216, 3072): Faster(0, Tile(128, 192, 2)),  # FLUX.3
}
"""Tiles as docs/benchmarks/2026-11-20-h200-tuned.md, 2026-11-21-h200-tried.md and 2026-11-27-2xh200.md show.

For the 7B model at 256 and 512 rows cuBLAS and a kernel are 6 to 8 % faster. A short sequence has so few rows, and so
has a long one on several ranks, but the choice must not depend on the number of ranks."""


def gated_linear(
    x_BlE: Tensor, packed_F2E: Tensor, bias_F2: Tensor | None = None, *, tokens: int | None = None
) -> Tensor:
    """Return SwiGLU of x W^T + bias, (B, l, F); the rows of W are w1|w3.

    With quack the product stays in fp32 and only the result is rounded; with cuBLAS the product is rounded, too, as
    torch does it. tokens: the number of tokens of the whole sequence; None means those of x.
    """
    batch, mine, _ = x_BlE.shape
    size = choice(x_BlE, packed_F2E) if bias_F2 is None and mine else None
    tile = size and tile_for(size, batch * mine, mine if tokens is None else tokens)
    if tile is None:
        return swiglu.swiglu(F.linear(x_BlE, packed_F2E, bias_F2))
    return launch(x_BlE, packed_F2E, tiled=tile)


def choice(x_BlE: Tensor, packed_F2E: Tensor) -> Faster | None:
    """Return the entry of `FASTER` for this GPU and these weights; None if there is none or quack cannot be called."""
    if x_BlE.dtype not in (torch.bfloat16, torch.float16) or not fused(x_BlE, packed_F2E):
        return None
    width, inner = packed_F2E.shape
    tile = FASTER.get((torch.cuda.get_device_capability(x_BlE.device), width // 2, inner))
    return None if tile is None or _quack.why_not() is not None else tile


def tile_for(found: Faster, rows: int, tokens: int) -> Tile | None:
    """Return the tile for this number of rows on a rank; None means cuBLAS and a kernel."""
    few = next((tile for most, tile in found.few if rows <= most), None)
    if tokens >= found.tokens:
        return few or found.tile
    # with few rows the bits of cuBLAS depend on their number anyway, except in exact mode
    return None if exact.is_on() else few


def why_not_faster(weights: Iterable[Tensor]) -> str | None:
    """Return why quack computes none of these products, if it would be faster for one of them and its activation."""
    shapes = {(torch.cuda.get_device_capability(x.device), *x.shape) for x in weights if x.is_cuda}
    gated = {(capability, width // 2, inner) for capability, width, inner in shapes}
    return _quack.why_not() if shapes & gelu.FASTER or gated & FASTER.keys() else None


def reference(x_BlE: Tensor, packed_F2E: Tensor) -> Tensor:
    """Compute `gated_linear` in plain torch, rounded once."""
    wide = state_dtype(x_BlE.dtype)
    return swiglu.reference(F.linear(x_BlE.to(wide), packed_F2E.to(wide))).to(x_BlE.dtype)


def launch(x_BlE: Tensor, packed_F2E: Tensor, *, tiled: Tile) -> Tensor:
    """Compute `gated_linear` by quack with this tile, without autotuning; `ValueError` if quack is not installed."""
    quack = _quack.loaded()
    out = x_BlE.new_empty(*x_BlE.shape[:2], packed_F2E.shape[0] // 2)
    quack.gated.gemm(
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
