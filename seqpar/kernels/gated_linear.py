"""SwiGLU in the epilogue of its matrix product: silu(x W1^T) * (x W3^T) from packed weights w1|w3, in one pass.

When it wins: decided by `launch/bench.py kernels`, shape by shape; `FASTER` holds what a committed table shows, and it
is empty: nothing has been measured yet. Until then this is cuBLAS and the kernel of `swiglu.py`, which writes and reads
2F numbers a row more. Against that: cuBLAS shares tiles between neighbouring multiprocessors, this does not, and while
a program's epilogue runs it multiplies nothing (two programs a multiprocessor fill each other's gaps).
The same for x + gate * (h W^T) was compiled and left: at 128 x 256, the tile that spares the cache, ptxas spills.

Weights are used as the model holds them: a tile loads rows n.. of W1 and rows F + n.. of W3, into two accumulators.
Sums are fp32, over K in one order, and a tile's shape does not depend on the number of rows: nor do a row's bits.
Source: GLU variants (arXiv 2002.05202); persistent programs and the order of tiles: Triton's tutorials.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from seqpar.kernels import swiglu
from seqpar.kernels._triton import TensorDescriptor, fused, jit, tl, triton
from seqpar.protocols import state_dtype

CASES = (
    *({"batch": 2, "tokens": n, "inner": 4096, "width": 11008} for n in (256, 4096)),  # Large-DiT 7B
    {"batch": 2, "tokens": 4096, "inner": 3072, "width": 8192},  # 3B
    {"batch": 1, "tokens": 1023, "inner": 1536, "width": 4096},  # 600M
    {"batch": 2, "tokens": 37, "inner": 72, "width": 136},  # only 8 divides either
    {"batch": 1, "tokens": 1, "inner": 40, "width": 8},
)
GROUP = 8
"""Tiles of rows that use the same weights while those are in the cache."""


class Tile(NamedTuple):
    """What one program computes at a time: rows x columns of the output, depth of K at a time; how it is done.

    stages: loads in flight, programs: on one multiprocessor. A row's bits depend on columns and depth.
    """

    rows: int
    columns: int
    depth: int
    stages: int
    warps: int
    programs: int = 1


TILE = Tile(128, 128, 64, 4, 8)
FASTER: Mapping[tuple[tuple[int, int], int, int], Tile] = {}
"""(compute capability, F, K) -> the tile that beat cuBLAS and a kernel, in a table of docs/benchmarks; none so far."""


def gated_linear(x_BlE: Tensor, packed_F2E: Tensor) -> Tensor:
    """SwiGLU of x W^T, (B, l, F): rows of W are w1|w3; fp32 (fp64 for fp64) between the product and one rounding.

    Without an entry in `FASTER` the product is rounded too, as torch rounds it.
    """
    if FASTER and fused(x_BlE, packed_F2E) and x_BlE.dtype != torch.float32:
        width, inner = packed_F2E.shape[0] // 2, packed_F2E.shape[1]
        if tiled := FASTER.get((torch.cuda.get_device_capability(x_BlE.device), width, inner)):
            return launch(x_BlE, packed_F2E, tiled=tiled)
    return swiglu.swiglu(F.linear(x_BlE, packed_F2E))


def reference(x_BlE: Tensor, packed_F2E: Tensor) -> Tensor:
    """The same in plain torch, rounded once."""
    wide = state_dtype(x_BlE.dtype)
    return swiglu.reference(F.linear(x_BlE.to(wide), packed_F2E.to(wide))).to(x_BlE.dtype)


def launch(x_BlE: Tensor, packed_F2E: Tensor, *, tiled: Tile = TILE) -> Tensor:
    """The same by the kernel; x's batch and tokens have to be one dim, rows have to start on 16 bytes."""
    x_RE, width = x_BlE.flatten(0, 1), packed_F2E.shape[0] // 2
    out_RF = x_BlE.new_empty(len(x_RE), width)
    for name, matrix in (("x", x_RE), ("weights", packed_F2E), ("output", out_RF)):
        if matrix.stride(1) != 1 or matrix.data_ptr() % 16 or matrix.stride(0) * matrix.element_size() % 16:
            raise ValueError(f"got {name} with strides {matrix.stride()}, expected rows that start on 16 bytes")
    if packed_F2E.dtype != x_BlE.dtype:
        raise ValueError(f"got x of {x_BlE.dtype} and weights of {packed_F2E.dtype}, expected one dtype")
    rows, columns, depth, stages, warps, programs = tiled
    tiles = triton.cdiv(len(x_RE), rows) * triton.cdiv(width, columns)
    if tiles:
        x = TensorDescriptor.from_tensor(x_RE, [rows, depth])
        packed = TensorDescriptor.from_tensor(packed_F2E, [columns, depth])
        out = TensorDescriptor.from_tensor(out_RF, [rows, columns])
        kernel[(min(tiles, programs * _multiprocessors(x_BlE.device)),)](
            x, packed, out, len(x_RE), width, x_RE.shape[1], rows, columns, depth, GROUP, stages,
            num_warps=warps, enable_fp_fusion=True,
        )  # fmt: skip
    return out_RF.view(*x_BlE.shape[:2], width)


def _multiprocessors(device: torch.device) -> int:
    # on a CPU the interpreter runs: a few programs, so that each has several tiles
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


@jit
def kernel(
    x, packed, out, count, width, inner, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    GROUP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program = every so many-th tile of the output; neighbours share weights first, then rows."""
    tall = tl.cdiv(count, ROWS)
    wide = tl.cdiv(width, COLUMNS)
    # not flattened into the loop over K: then ptxas waits for each product before it starts the next (3.6, 3.9)
    for tile in range(tl.program_id(0), tall * wide, tl.num_programs(0)):
        first = tile // (GROUP * wide) * GROUP
        together = tl.minimum(tall - first, GROUP)
        row = (first + tile % (GROUP * wide) % together) * ROWS
        column = tile % (GROUP * wide) // together * COLUMNS
        gate = tl.zeros((ROWS, COLUMNS), tl.float32)
        up = tl.zeros((ROWS, COLUMNS), tl.float32)
        for k in tl.range(0, inner, DEPTH, num_stages=STAGES):  # pyright: ignore[reportGeneralTypeIssues]
            # outside the matrices zeros are read; W1's last tile may hold rows of W3: those columns are not written
            x_RK = x.load([row, k])
            gate = tl.dot(x_RK, packed.load([column, k]).T, gate, input_precision="ieee")
            up = tl.dot(x_RK, packed.load([width + column, k]).T, up, input_precision="ieee")
        result = gate / (1.0 + tl.exp(-gate)) * up
        out.store([row, column], result.to(out.dtype))
