"""SwiGLU in the epilogue of its matrix product: silu(x W1^T) * (x W3^T) from packed weights w1|w3, in one pass.

When it wins: decided by `launch/bench.py kernels`, shape by shape; `FASTER` holds what a committed table shows, and it
is empty: nothing has been measured yet. Until then this is cuBLAS and the kernel of `swiglu.py`, which writes and reads
2F numbers a row more. Against that: cuBLAS shares tiles between neighbouring multiprocessors, this does not, and while
a program's epilogue runs it multiplies nothing (two programs a multiprocessor fill each other's gaps).

Weights are used as the model holds them: a tile loads rows n.. of W1 and rows F + n.. of W3, into two accumulators.
Sums are fp32, over K in one order, and a tile's shape does not depend on the number of rows: nor do a row's bits.
Source: GLU variants (arXiv 2002.05202); persistent programs and the order of tiles: Triton's tutorials.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from seqpar.kernels import swiglu
from seqpar.kernels._quack import QuackTile, gated
from seqpar.kernels._triton import TensorDescriptor, fused, jit, tl, triton
from seqpar.protocols import state_dtype

T = TypeVar("T")
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
Table = Mapping[tuple[tuple[int, int], int, int], Tile]
FASTER: Mapping[tuple[tuple[int, int], int, int], Tile | QuackTile] = {}
"""(compute capability, F, K) -> the tile that beat cuBLAS and a kernel, in a table of docs/benchmarks; none so far."""


def gated_linear(x_BlE: Tensor, packed_F2E: Tensor, *, next_weight: Tensor | None = None) -> Tensor:
    """SwiGLU of x W^T, (B, l, F): rows of W are w1|w3; fp32 (fp64 for fp64) between the product and one rounding.

    Without an entry in `FASTER` the product is rounded too, as torch rounds it. next_weight (E, F): what the next
    product reads. SwiGLU's kernel may fetch it ahead (`ahead.py`), its reference and the product's own kernel do not
    (there the memory is busy until the end); changes no bit.
    """
    tiled = measured(FASTER, packed_F2E.shape[0] // 2, x_BlE, packed_F2E)
    if tiled is not None:
        return launch(x_BlE, packed_F2E, tiled=tiled)
    return swiglu.swiglu(F.linear(x_BlE, packed_F2E), next_weight=next_weight)


def measured(
    table: Mapping[tuple[tuple[int, int], int, int], T], width: int, x_BlE: Tensor, weight: Tensor, *others: Tensor
) -> T | None:
    """What a table says of `width` columns, this weight's inner dim and this chip; None where no kernel may run."""
    if not table or x_BlE.dtype == torch.float32 or not fused(x_BlE, weight, *others):
        return None
    return table.get((torch.cuda.get_device_capability(x_BlE.device), width, weight.shape[1]))


def reference(x_BlE: Tensor, packed_F2E: Tensor) -> Tensor:
    """The same in plain torch, rounded once."""
    wide = state_dtype(x_BlE.dtype)
    return swiglu.reference(F.linear(x_BlE.to(wide), packed_F2E.to(wide))).to(x_BlE.dtype)


def launch(x_BlE: Tensor, packed_F2E: Tensor, *, tiled: Tile | QuackTile = TILE) -> Tensor:
    """The same by the kernel, or quack's; rows have to start on 16 bytes."""
    if isinstance(tiled, QuackTile):
        return gated(x_BlE.flatten(0, 1), packed_F2E, tiled).unflatten(0, x_BlE.shape[:2])
    batch, tokens, inner = x_BlE.shape
    width, dtype = packed_F2E.shape[0] // 2, x_BlE.dtype
    out = x_BlE.new_empty(batch, tokens, width)
    rows, columns, depth, stages, warps, _ = tiled
    if programs := grid(batch * tokens, width, tiled, x_BlE.device):
        gated_kernel[(programs,)](
            descriptor("x", x_BlE.flatten(0, 1), rows, depth, dtype),
            descriptor("weights", packed_F2E, columns, depth, dtype),
            descriptor("output", out.flatten(0, 1), rows, columns, dtype),
            batch * tokens, width, inner, rows, columns, depth, GROUP, stages, num_warps=warps, enable_fp_fusion=True,
        )  # fmt: skip
    return out


def descriptor(name: str, matrix: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Any:
    """What the copy engine has to know of a matrix that it reads or writes by tiles; outside of it are zeros."""
    if matrix.stride(1) != 1 or matrix.data_ptr() % 16 or matrix.stride(0) * matrix.element_size() % 16:
        raise ValueError(f"got {name} with strides {matrix.stride()}, expected rows that start on 16 bytes")
    if matrix.dtype != dtype:
        raise ValueError(f"got {name} of {matrix.dtype}, expected {dtype}: one dtype for all")
    return TensorDescriptor.from_tensor(matrix, [rows, columns])


def grid(count: int, width: int, tiled: Tile, device: torch.device) -> int:
    """How many programs: no more than there are tiles, or than run at a time."""
    # on a CPU the interpreter runs: a few programs, so that each has several tiles
    units = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3
    return min(triton.cdiv(count, tiled.rows) * triton.cdiv(width, tiled.columns), units * tiled.programs)


@jit
def place(tile, count, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    """First row and column of a tile: GROUP tiles of rows use the same weights, then the next ones."""
    tall = tl.cdiv(count, ROWS)
    wide = tl.cdiv(width, COLUMNS)
    first = tile // (GROUP * wide) * GROUP
    together = tl.minimum(tall - first, GROUP)
    row = (first + tile % (GROUP * wide) % together) * ROWS
    return row, tile % (GROUP * wide) // together * COLUMNS


@jit
def gated_kernel(
    x, packed, out, count, width, inner, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    GROUP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program = every so many-th tile of the output; neighbours share weights first, then rows."""
    tiles = tl.cdiv(count, ROWS) * tl.cdiv(width, COLUMNS)
    # not flattened into the loop over K: then ptxas waits for each product before it starts the next (3.6, 3.9)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row, column = place(tile, count, width, ROWS, COLUMNS, GROUP)
        gate = tl.zeros((ROWS, COLUMNS), tl.float32)
        up = tl.zeros((ROWS, COLUMNS), tl.float32)
        for k in tl.range(0, inner, DEPTH, num_stages=STAGES):  # pyright: ignore[reportGeneralTypeIssues]
            # outside the matrices zeros are read; W1's last tile may hold rows of W3: those columns are not written
            x_RK = x.load([row, k])
            gate = tl.dot(x_RK, packed.load([column, k]).T, gate, input_precision="ieee")
            up = tl.dot(x_RK, packed.load([width + column, k]).T, up, input_precision="ieee")
        result = gate / (1.0 + tl.exp(-gate)) * up
        out.store([row, column], result.to(out.dtype))
