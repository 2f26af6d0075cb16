"""Elementwise kernels over rows: each program computes some columns of some rows of a tensor (B, l, F)."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from seqpar.kernels._triton import jit, tl, triton


class Tile(NamedTuple):
    """The rows and columns of the output that one program computes, powers of two, and its number of warps."""

    rows: int
    columns: int
    warps: int


def tile(width: int, rows: int = 1) -> Tile:
    """Return the tile for a width: a thread has one 16-byte vector of each row."""
    columns = min(1024, triton.next_power_of_2(width))
    return Tile(rows, columns, max(1, columns // 256))


def launch(kernel: Any, tiled: Tile, width: int, x: Tensor, *others: Tensor | None, **constants: bool) -> None:
    """Run a kernel on x (B, l, ...), strided with a contiguous last dim, and other tensors; without elements nothing.

    width: F, of the output.
    """
    batch, tokens = x.shape[:2]
    if not batch * tokens * width:
        return
    rows, columns, warps = tiled
    grid = (triton.cdiv(batch * tokens, rows) * triton.cdiv(width, columns),)
    kernel[grid](
        x,
        *others,
        batch * tokens,
        tokens,
        x.stride(0),
        x.stride(1),
        WIDTH=width,
        ROWS=rows,
        COLUMNS=columns,
        **constants,
        num_warps=warps,
        enable_fp_fusion=True,
    )


@jit
def places(
    x, count, tokens, batch_stride, token_stride, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Return a program's rows and columns, its rows of x, and whether each element exists.

    Neighbouring programs share rows, so reads are in order.
    """
    blocks = tl.cdiv(WIDTH, COLUMNS)
    row = (tl.program_id(0) // blocks * ROWS + tl.arange(0, ROWS))[:, None]
    column = (tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    x += (row // tokens).to(tl.int64) * batch_stride + (row % tokens).to(tl.int64) * token_stride
    return row, column, x, (row < count) & (column < WIDTH)
