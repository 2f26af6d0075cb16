"""What a small kernel does before its inputs are there: it asks for the first bytes of each row of the next product's
weights, and may itself start before the kernel before it has ended.

When it wins: at few rows on a rank (64 to 256), where a step is bound by streaming weights and the memory idles while
small kernels run and between kernels. A product's programs begin at the start of all rows, so the first bytes of each
are what it waits for; cuBLAS then finds them in the L2 cache. Fire and forget: nothing waits and no bit changes;
references ask for nothing. `BYTES` holds what a committed table shows, and it is empty: nothing has been measured yet
(`launch/bench.py kernels` does). Too much ahead pushes out of the cache what has not been read yet.

`early` is programmatic dependent launch: the kernel is set up and asks for weights while the one before it drains, then
waits until that has ended and all it wrote can be seen. Any number of rows gains the time between two kernels.

The machine asks for one row at a time in each warp, so rows are spread over all warps of all programs.
Source: `cp.async.bulk.prefetch.L2`, `griddepcontrol` in NVIDIA's PTX ISA (from sm_90 on; addresses and sizes are
multiples of 16).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from seqpar.kernels._triton import compiled, fused, jit, tl

LINE = 128
"""Bytes of a line of the cache: what is asked for is a multiple."""
ALIGNED = 16


class Ahead(NamedTuple):
    """What a kernel asks for: the first `size` bytes of each row of a weight (F, E), if of any. early: and whether it
    starts before the kernel before it has ended."""

    weight_FE: Tensor | None
    size: int
    early: bool = False


class Budget(NamedTuple):
    """Where asking ahead was measured to win: up to how many token rows on a rank, how many bytes in all, and whether
    starting early does, too."""

    rows: int
    size: int
    early: bool = False


BYTES: Mapping[tuple[int, int], Budget] = {}
"""Compute capability -> the budget that beat asking for nothing, in a table of docs/benchmarks; none so far."""


def ahead(weight_FE: Tensor | None, rows: int) -> Ahead | None:
    """What a kernel over so many token rows asks for, when a product with this weight is next; None: nothing.

    Nothing where `BYTES` does not know this chip or ends at fewer rows, and for weights that `spread` cannot take.
    """
    if not BYTES or weight_FE is None or not fused(weight_FE):
        return None
    budget = BYTES.get(torch.cuda.get_device_capability(weight_FE.device))
    if budget is None or rows > budget.rows:
        return None
    what = spread(weight_FE, budget.size)
    return what._replace(early=budget.early) if what is not None else None


def spread(weight_FE: Tensor, size: int) -> Ahead | None:
    """`size` bytes, or the whole weight, in equal parts of its rows: whole lines, at least one.

    None where rows are shorter than a line, not contiguous, or do not all start on 16 bytes.
    """
    whole = weight_FE.shape[1] * weight_FE.element_size()
    if whole < LINE or whole % ALIGNED or not weight_FE.is_contiguous() or weight_FE.data_ptr() % ALIGNED:
        return None
    lines = min(size // len(weight_FE), whole) // LINE
    return Ahead(weight_FE, max(1, lines) * LINE)


def options(what: Ahead | None) -> dict[str, bool]:
    """What a launch is told besides: of starting early. Nothing in Triton's interpreter."""
    return {"launch_pdl": True} if what is not None and what.early and compiled(fetch) else {}


def asked(what: Ahead | None) -> tuple[Tensor | None, tuple[int, int, int, bool]]:
    """The last two arguments of a kernel: the weight; its rows, their stride in elements, the bytes of each, and
    whether the kernel starts early.

    `ValueError` for bytes that the instruction cannot take. No bytes in Triton's interpreter: it has no assembly.
    """
    early = what is not None and what.early and compiled(fetch)
    if what is None or what.weight_FE is None:
        return None, (0, 0, 0, early)
    weight, size = what.weight_FE, what.size
    whole = weight.shape[1] * weight.element_size()
    starts = weight.data_ptr() % ALIGNED == weight.stride(0) * weight.element_size() % ALIGNED == 0
    if not 0 < size <= whole or size % ALIGNED or not starts or weight.stride(1) != 1:
        raise ValueError(
            f"got {size} bytes ahead of rows of {whole} bytes with strides {weight.stride()}, expected a multiple of "
            f"{ALIGNED} inside of contiguous rows that start on {ALIGNED} bytes; make it with `spread`"
        )
    return weight, (len(weight), weight.stride(0), size if compiled(fetch) else 0, early)


@jit
def rows_of(first, programs, LANES: tl.constexpr):
    """The row of each lane of a program, from its first on: programs have neighbouring rows, and so have warps."""
    lane = tl.arange(0, LANES)
    return first + (lane % 32 * (LANES // 32) + lane // 32) * programs


@jit
def fetch(weight, AHEAD: tl.constexpr, program, programs):
    """Ask for the first bytes of my share of the rows, then wait for the kernel before where this one started early;
    nothing is emitted for neither. Returns 0, to be added to the pointers of all inputs: a compiler that knows nothing
    of the wait may read them before it otherwise (Triton 3.6 does).

    weight, AHEAD: from `asked`. program: the number of mine among all `programs` of the launch, which share the rows.
    """
    if weight is not None and AHEAD[2] > 0:
        ROWS: tl.constexpr = AHEAD[0]
        LANES: tl.constexpr = tl.extra.cuda.num_threads()  # pyright: ignore[reportAttributeAccessIssue]
        for first in range(program, ROWS, programs * LANES):
            row = rows_of(first, programs, LANES)
            place = weight + row.to(tl.int64) * AHEAD[1]
            # the result is not used: an instruction has to have one
            tl.inline_asm_elementwise(
                "{ .reg .pred mine; setp.ne.s32 mine, $2, 0; "
                "@mine cp.async.bulk.prefetch.L2.global [$1], $3; mov.b32 $0, 0; }",
                "=r,l,r,r", [place, (row < ROWS).to(tl.int32), AHEAD[2]], tl.int32, is_pure=False, pack=1,
            )  # fmt: skip
    if AHEAD[3]:
        waited = tl.inline_asm_elementwise(
            "griddepcontrol.wait; mov.b32 $0, 0;", "=r", [], tl.int32, is_pure=False, pack=1
        )
        return tl.multiple_of(waited, 16)  # it is 0: rows start where they did
    else:  # noqa: RET505 (decided at compile time)
        return 0
