"""Device functions of `prepare.py` that load and store the heads of one token, in halves a and b."""

from __future__ import annotations

from seqpar.kernels._triton import jit, tl


@jit
def rotary_row(
    start,
    EACH: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS2: tl.constexpr,
    DIM: tl.constexpr,
    DIM2: tl.constexpr,
    READ: tl.constexpr,
):
    """Load a token's cosines or sines: a row per head, adjacent, or one row for all heads."""
    pair = tl.arange(0, DIM2 // 2)
    if EACH:
        head = tl.arange(0, HEADS2)[:, None]
        at = tl.multiple_of(start + (head * (DIM // 2) + pair[None, :]), [READ, READ])
        row = tl.load(at, mask=(head < HEADS) & (pair < DIM // 2)[None, :], other=0.0).to(tl.float32)
    else:
        at = tl.multiple_of(start + pair, [READ])
        row = tl.load(at, mask=pair < DIM // 2, other=0.0).to(tl.float32)[None, :]
    return row


@jit
def mean_of(x, PER_HEAD: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr):
    """Return the mean over each head, or over all heads; x holds sums of two elements, and zeros outside."""
    return (tl.sum(x, axis=1) / DIM)[:, None] if PER_HEAD else tl.sum(x) / (HEADS * DIM)


@jit
def read_heads(
    start,
    step,
    ROTARY: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS2: tl.constexpr,
    DIM: tl.constexpr,
    DIM2: tl.constexpr,
    READ: tl.constexpr,
):
    """Load all heads, `step` elements apart, as two halves: first and second for "halves", else even and odd."""
    head = tl.arange(0, HEADS2)[:, None]
    if ROTARY == "halves":
        column = tl.arange(0, DIM2 // 2)[None, :]
        at = tl.multiple_of(start + (head * step + column), [READ, READ])
        inside = (head < HEADS) & (column < DIM // 2)
        a = tl.load(at, mask=inside, other=0.0)
        b = tl.load(at + DIM // 2, mask=inside, other=0.0)
    else:
        column = tl.arange(0, DIM2)[None, :]
        at = tl.multiple_of(start + (head * step + column), [READ, READ])
        x = tl.load(at, mask=(head < HEADS) & (column < DIM), other=0.0)
        a, b = tl.split(tl.reshape(x, (HEADS2, DIM2 // 2, 2)))
    return a.to(tl.float32), b.to(tl.float32)


@jit
def write_heads(
    place,
    wanted,
    a,
    b,
    ROTARY: tl.constexpr,
    DIM: tl.constexpr,
    HEADS2: tl.constexpr,
    DIM2: tl.constexpr,
    WRITE: tl.constexpr,
):
    """Store every wanted head at its place."""
    element: tl.constexpr = place.dtype.element_ty
    if ROTARY == "halves":
        column = tl.arange(0, DIM2 // 2)[None, :]
        at = tl.multiple_of(place[:, None] + column, [WRITE, WRITE])
        inside = wanted[:, None] & (column < DIM // 2)
        tl.store(at, a.to(element), mask=inside)
        tl.store(at + DIM // 2, b.to(element), mask=inside)
    else:
        column = tl.arange(0, DIM2)[None, :]
        at = tl.multiple_of(place[:, None] + column, [WRITE, WRITE])
        x = tl.reshape(tl.join(a, b), (HEADS2, DIM2))
        tl.store(at, x.to(element), mask=wanted[:, None] & (column < DIM))
