"""Linear layers with an activation: SwiGLU of packed weights w1|w3, silu(x W1^T) * (x W3^T), and GELU of x W^T + bias.

The product is quack's (CuTe DSL) or, for GELU, cuBLAS's with the activation in its epilogue, or cuBLAS's followed by a
kernel of `activations.py`. Epilogues are used for shapes where they are faster (measured, docs/benchmarks), quack's if
it is installed. Here are also products that stay in fp32.
All of quack's tiles give the same bits, regardless of the number of rows (seen on an H200, and tested), so few rows may
use another tile. cuBLAS and quack give different bits, so the choice between them depends on the tokens of the whole
sequence or on the shape of the weights, never on the tokens of a rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from seqpar.kernels import _quack
from seqpar.kernels._quack import Shape, Tile
from seqpar.kernels._triton import fused
from seqpar.kernels.activations import bias_gelu, reference_gelu, reference_swiglu, swiglu
from seqpar.kernels.few_rows8 import MOST, few_rows8
from seqpar.kernels.weight8 import Weight8, plain
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


GATED_FASTER: Mapping[Shape, Faster] = {
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
    x_BlE: Tensor,
    packed_F2E: Tensor,
    bias_F2: Tensor | None = None,
    *,
    tokens: int | None = None,
    gate_last: bool = False,
) -> Tensor:
    """Return SwiGLU of x W^T + bias, (B, l, F); the rows of W are w1|w3, or w3|w1 with `gate_last`.

    With quack the product stays in fp32 and only the result is rounded; with cuBLAS the product is rounded, too, as
    torch does it. tokens: the number of tokens of the whole sequence; None means those of x.
    """
    batch, local, _ = x_BlE.shape
    packed_F2E = plain(packed_F2E)
    size = choice(x_BlE, packed_F2E) if bias_F2 is None and local and not gate_last else None
    tile = size and tile_for(size, batch * local, local if tokens is None else tokens)
    if tile is None:
        return swiglu(F.linear(x_BlE, packed_F2E, bias_F2), gate_last=gate_last)
    return launch(x_BlE, packed_F2E, tiled=tile)


def choice(x_BlE: Tensor, packed_F2E: Tensor) -> Faster | None:
    """Return the entry of `GATED_FASTER` for this GPU and these weights; None without one or without quack."""
    if x_BlE.dtype not in (torch.bfloat16, torch.float16) or not fused(x_BlE):
        return None
    width, inner = packed_F2E.shape
    tile = GATED_FASTER.get((torch.cuda.get_device_capability(x_BlE.device), width // 2, inner))
    return None if tile is None or _quack.why_not() is not None else tile


def tile_for(faster: Faster, rows: int, tokens: int) -> Tile | None:
    """Return the tile for this number of rows on a rank; None means cuBLAS and a kernel."""
    few = next((tile for most, tile in faster.few if rows <= most), None)
    if tokens >= faster.tokens:
        return few or faster.tile
    # with few rows the bits of cuBLAS depend on their number anyway, except in exact mode
    return None if exact.is_on() else few


def why_not_faster(weights: Iterable[Tensor]) -> str | None:
    """Return why quack computes none of these products, if it would be faster for one of them and its activation."""
    shapes = {(torch.cuda.get_device_capability(x.device), *x.shape) for x in weights if x.is_cuda}
    gated = {(capability, width // 2, inner) for capability, width, inner in shapes}
    return _quack.why_not() if shapes & GELU_FASTER or gated & GATED_FASTER.keys() else None


def reference(x_BlE: Tensor, packed_F2E: Tensor) -> Tensor:
    wide = state_dtype(x_BlE.dtype)
    return reference_swiglu(F.linear(x_BlE.to(wide), packed_F2E.to(wide))).to(x_BlE.dtype)


def launch(x_BlE: Tensor, packed_F2E: Tensor, *, tiled: Tile) -> Tensor:
    """Compute `gated_linear` by quack with this tile, without autotuning, where quack can be called."""
    quack: Any = _quack.load()
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


GELU_FASTER: frozenset[Shape] = frozenset(
    {
        ((9, 0), 13824, 5120),  # Wan 14B
        ((9, 0), 14336, 3072),  # Wan 2.2 5B
        ((9, 0), 16384, 4096),  # LTX-Video 13B, LTX-2
        ((9, 0), 8192, 2048),  # HunyuanVideo 1.5, LTX-Video 2B
        ((9, 0), 9728, 2432),  # SD3.5-large
    }
)
"""Shapes for which quack, where it is installed, adds the bias and applies GELU in the product's epilogue.

It is faster than product and kernel (docs/benchmarks/2026-11-27-2xh200.md). A row's bits do not depend on the number of
rows (tested), and differ from those of product and kernel, so the shape alone decides."""
GELU_TILE = Tile(128, 192, 2)

GELU_EPILOGUE: frozenset[Shape] = frozenset({((9, 0), 4608, 1152), ((9, 0), 12288, 3072)})
"""Shapes for which cuBLAS adds the bias and applies GELU in the product's epilogue.

There it is faster than product and kernel (docs/benchmarks/2026-11-20-h200-tuned.md), and a row's bits do not depend on
the number of rows (tested)."""


def linear_gelu(x_BlE: Tensor, weight_FE: Tensor, bias_F: Tensor | None, *, exact: bool = False) -> Tensor:
    """Return GELU of x W^T + bias; the product is rounded before GELU, unless it is in the product's epilogue.

    exact: as for `bias_gelu`.
    """
    narrow, weight_FE = x_BlE.dtype in (torch.bfloat16, torch.float16), plain(weight_FE)
    if bias_F is not None and narrow and not exact and x_BlE.numel() and fused(x_BlE):
        width, inner = weight_FE.shape
        shape = torch.cuda.get_device_capability(x_BlE.device), width, inner
        if shape in GELU_FASTER and _quack.why_not() is None:
            return linear_quack(x_BlE, weight_FE, bias_F)
        if shape in GELU_EPILOGUE:
            return linear_epilogue(x_BlE, weight_FE, bias_F)
    return bias_gelu(F.linear(x_BlE, weight_FE), bias_F, exact=exact, reuse=True)


def linear_quack(x_BlE: Tensor, weight_FE: Tensor, bias_F: Tensor) -> Tensor:
    """Compute `linear_gelu` in one call of quack, rounded once, where it can be called."""
    quack: Any = _quack.load()
    out_RF = quack.gelu_of_product(x_BlE.flatten(0, 1), weight_FE, bias_F, GELU_TILE)
    return out_RF.view(*x_BlE.shape[:2], len(weight_FE))


def linear_epilogue(x_BlE: Tensor, weight_FE: Tensor, bias_F: Tensor) -> Tensor:
    """Compute `linear_gelu` in one call of cuBLASLt, rounded once; on GPUs only (CPUs would use the other GELU)."""
    out = torch.ops.aten._addmm_activation(bias_F, x_BlE.flatten(0, 1), weight_FE.t(), use_gelu=True)
    return out.view(*x_BlE.shape[:2], len(weight_FE))  # torch refuses -1 for the text of a rank that has none of it


def linear_reference(x_BlE: Tensor, weight_FE: Tensor, bias_F: Tensor) -> Tensor:
    wide = state_dtype(x_BlE.dtype)
    return reference_gelu(F.linear(x_BlE.to(wide), weight_FE.to(wide)), bias_F).to(x_BlE.dtype)


def product(x_RC: Tensor, weight_FC: Tensor) -> Tensor:
    """Return x W^T in fp32 (fp64 for fp64), not rounded to the dtype of x and the weight; one GEMM on GPUs.

    Few rows read a weight in 8 bits as it is in memory; in exact mode all do, since only so a row's bits are its own.
    """
    wide = state_dtype(x_RC.dtype)
    if isinstance(weight_FC, Weight8) and len(x_RC) and (len(x_RC) <= MOST or exact.is_on()):
        parts = [few_rows8(part, weight_FC.e4m3, weight_FC.scales) for part in x_RC.split(MOST)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)
    if x_RC.is_cuda and wide != x_RC.dtype:
        return torch.mm(x_RC, weight_FC.t(), out_dtype=wide)
    return F.linear(x_RC.to(wide), weight_FC.to(wide))


def bf16_parts(x_RC: Tensor) -> Tensor:
    """Split fp32 rows (R, C) into three bf16 parts (3 R, C) that add up to them, 8 of 24 bits each, largest first."""
    high = x_RC.bfloat16()
    middle = (x_RC - high).bfloat16()
    return torch.cat((high, middle, (x_RC - high - middle).bfloat16()))


def in_parts(wide: Tensor, weight: Tensor) -> bool:
    return wide.is_cuda and wide.dim() == 2 and (wide.dtype, weight.dtype) == (torch.float32, torch.bfloat16)
