"""Writes the output of attention to the ranks of its tokens, into their memory or a send buffer, in one launch.

It also copies what another rank sent to its place among the heads. Separate copies need
a launch for each destination, and torch's copies of strided views are not vectorized. The kernel writes all
destinations at once, so links do not wait while local data is copied, and every rank begins with the tokens of the rank
after it. It reads and writes the bytes once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import gcd

import torch
from torch import Tensor

from seqpar.kernels._triton import contiguous_rows, fused, jit, tl, triton
from seqpar.kernels.flags import Flags, last_meets, meeting
from seqpar.mesh.shard import starts

CASES = (
    *({"batch": 2, "tokens": n, "heads": 8, "dim": 128} for n in (256, 4096)),  # Large-DiT 7B on 4 ranks
    {"batch": 2, "tokens": 1024, "heads": 4, "dim": 72},  # DiT-XL
    {"batch": 1, "tokens": 4097, "heads": 2, "dim": 96},
    {"batch": 3, "tokens": 7, "heads": 3, "dim": 6},
)
ELEMENTS = 4096  # the most elements that one program moves, from one row or from several short ones
PROGRAMS = 512  # about four for each multiprocessor; with fewer programs than this, each moves a single row


class Destinations(tuple[Tensor, ...]):
    """Views (l_r, B, h, D), one for each rank's tokens, in the order of the ranks; writing begins with view `first`.

    An exchange makes them once, with its buffers, so that no call computes or copies addresses.
    """

    first: int

    def __new__(cls, views: Sequence[Tensor], first: int = 0) -> Destinations:
        target = super().__new__(cls, views)
        target.first = first
        return target

    @cached_property
    def starts(self) -> tuple[int, ...]:
        return starts([view.shape[0] for view in self])

    @cached_property
    def table(self) -> Tensor:
        """The kernel's table, (n, 4) int64 on the device: first token, address, token and batch strides in elements.

        Its first use copies to the device, so it must come before a CUDA graph is captured.
        """
        rows = [
            (start, view.data_ptr(), view.stride(0), view.stride(1))
            for start, view in zip(self.starts, self, strict=True)
            if view.shape[0]
        ]
        return torch.tensor(rows, dtype=torch.int64).to(self[0].device)

    @cached_property
    def alignment(self) -> int:
        """The number of bytes that divides the place of every row, at most 16."""
        size = self[0].element_size()
        places = [n for x in self for n in (x.data_ptr(), x.stride(0) * size, x.stride(1) * size)]
        return gcd(16, *places)


def push(out_BLhD: Tensor, into: Destinations, flags: Flags | None = None) -> bool:
    """Write the tokens of each rank to its view. The heads of a view must be adjacent; those of `out` need not be.

    Returns whether the kernel has also raised these flags and waited for those of the other ranks.
    """
    if not fused(out_BLhD) or not out_BLhD.numel():
        reference(out_BLhD, into)
        return False
    launch(out_BLhD, into, flags)
    return flags is not None


def reference(out_BLhD: Tensor, into: Destinations) -> None:
    """Compute `push` in plain torch, with one copy for each view; any strides are allowed."""
    out_LBhD = out_BLhD.transpose(0, 1)
    for start, view in zip(into.starts, into, strict=True):
        view.copy_(out_LBhD[start : start + view.shape[0]])


def launch(out_BLhD: Tensor, into: Destinations, flags: Flags | None = None) -> None:
    batch, tokens, heads, dim = out_BLhD.shape
    width, size, (batch_stride, token_stride, head_stride, _) = heads * dim, out_BLhD.element_size(), out_BLhD.stride()
    contiguous_rows(out_BLhD)
    # adjacent heads are one wide head, so the kernel need not compute the place of each head
    apart = heads > 1 and head_stride != dim
    if any(view.dtype != out_BLhD.dtype or (view.stride(2), view.stride(3)) != (dim, 1) for view in into):
        raise ValueError("got views of another dtype or with strided heads, expected the output's dtype, dense heads")
    out_BLhD = out_BLhD.view(torch.uint8) if size == 1 else out_BLhD  # bytes are moved as they are
    steps = (batch_stride, token_stride, *((head_stride, dim) if apart else ()))
    align = gcd(into.alignment, out_BLhD.data_ptr(), *(step * size for step in steps))
    block = min(ELEMENTS, triton.next_power_of_2(width))
    rows = max(1, min(ELEMENTS // block, 1 << (batch * tokens // PROGRAMS).bit_length() >> 1))
    ranks = len(into.table)
    if out_BLhD.numel():
        push_kernel[(batch * ranks * triton.cdiv(tokens, rows * ranks), triton.cdiv(width, block))](
            out_BLhD,
            into.table,
            batch_stride,
            token_stride,
            head_stride,
            tokens,
            into.starts[into.first],
            *meeting(flags),
            ranks,
            width,
            dim if apart else width,
            rows,
            block,
            align,
            num_warps=max(1, min(8, block // 256)),
        )


@jit(do_not_specialize=["tokens", "first"])  # one program for all numbers of tokens
def push_kernel(
    out,
    table,
    batch_stride,
    token_stride,
    head_stride,
    tokens,
    first,
    flags,
    LANES: tl.constexpr,
    TIMER: tl.constexpr,
    RANKS: tl.constexpr,
    WIDTH: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Move ROWS rows in each program.

    The tokens, in cyclic order from `first` on, are cut into RANKS equal parts, about one for each rank; neighbouring
    programs take rows of different parts. WIDTH: elements of a row; DIM: elements of its contiguous pieces, which are
    `head_stride` apart. With flags every program waits until its stores have reached the other ranks, so that several
    rows share one wait.
    """
    steps = tl.cdiv(tokens, ROWS * RANKS)
    batch = (tl.program_id(0) // (steps * RANKS)).to(tl.int64)
    index = tl.program_id(0) % (steps * RANKS)
    row = (index % RANKS * steps + index // RANKS) * ROWS + tl.arange(0, ROWS)
    token = ((row + first) % tokens).to(tl.int64)
    start = tl.zeros((ROWS,), tl.int64)
    place = tl.zeros((ROWS,), tl.int64)
    token_step = tl.zeros((ROWS,), tl.int64)
    batch_step = tl.zeros((ROWS,), tl.int64)
    for rank in tl.static_range(RANKS):  # pyright: ignore[reportGeneralTypeIssues]
        begin = tl.load(table + rank * 4)
        owns = token >= begin  # the last rank for which this is true is the owner
        start = tl.where(owns, begin, start)
        place = tl.where(owns, tl.load(table + rank * 4 + 1), place)
        token_step = tl.where(owns, tl.load(table + rank * 4 + 2), token_step)
        batch_step = tl.where(owns, tl.load(table + rank * 4 + 3), batch_step)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < tokens)[:, None] & (column < WIDTH)[None, :]
    part = column if DIM == WIDTH else (column // DIM).to(tl.int64) * head_stride + column % DIM
    source = (out + batch * batch_stride + token * token_stride)[:, None] + part[None, :]
    there = place.to(tl.pointer_type(out.dtype.element_ty)) + (token - start) * token_step + batch * batch_step
    moved = tl.load(tl.multiple_of(source, [ALIGN, ALIGN]), inside, 0.0)
    tl.store(tl.multiple_of(there[:, None] + column[None, :], [ALIGN, ALIGN]), moved, inside)
    if flags is not None:
        last_meets(flags, tl.num_programs(0) * tl.num_programs(1), LANES, TIMER)
