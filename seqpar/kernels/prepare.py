"""QK-norm and rotary embedding of q and k, written with v directly into the readers' outboxes, in one launch.

Better than permute -> collective -> permute, because the one pass that norm and rotary need
anyway also makes the layout of the exchange. The kernel reads q, k and v once, where the projection wrote them,
computes in fp32, and writes them once, where the reader reads them. Source: QK-norm (arXiv 2010.04245), rotary
embedding (arXiv 2104.09864).
"""

# pyright: reportPossiblyUnboundVariable=false
# (kernels branch only on values that are known at compile time)

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from seqpar.kernels._triton import contiguous_rows, fused, jit, tl, triton
from seqpar.kernels.flags import Flags, last_meets, meeting
from seqpar.types.outboxes import Outboxes, Places
from seqpar.types.protocols import Prepare, state_dtype

CASES = (
    *({"batch": 2, "tokens": n, "heads": 32, "kv_heads": 32, "dim": 128} for n in (256, 4096)),  # Large-DiT 7B
    {"batch": 1, "tokens": 4096, "heads": 32, "kv_heads": 32, "dim": 96},  # 3B
    {"batch": 2, "tokens": 1023, "heads": 32, "kv_heads": 32, "dim": 48},  # 600M
    {"batch": 2, "tokens": 4096, "heads": 16, "kv_heads": 16, "dim": 72},  # DiT-XL
    {"batch": 2, "tokens": 1024, "heads": 24, "kv_heads": 8, "dim": 96},  # Lumina2
    *({"batch": 2, "tokens": 5, "heads": 6, "kv_heads": 3, "dim": dim} for dim in (48, 72, 96, 128, 6)),
    {"batch": 1, "tokens": 1, "heads": 5, "kv_heads": 5, "dim": 72},
)
NOBODY = meeting(None)


class Tile(NamedTuple):
    """The number of warps that hold one token's q, k or v. early: whether its rotary row is read before the norm."""

    warps: int
    early: bool = False


def prepare(q_BlHD: Tensor, k_BlGD: Tensor, how: Prepare) -> tuple[Tensor, Tensor]:
    """Return q and k after norm and rotary, with the same shapes and dtype; computed in fp32 (fp64 for fp64)."""
    if how.is_identity:
        return q_BlHD, k_BlGD
    return (launch if fused(q_BlHD) else reference)(q_BlHD, k_BlGD, how)


def prepare_one(x_BlHD: Tensor, how: Prepare) -> Tensor:
    """Return x as `prepare` returns q, where q and k are different tokens, as in attention of one stream to another."""
    if how.is_identity:
        return x_BlHD
    return launch_one(x_BlHD, how) if fused(x_BlHD) else _prepared(x_BlHD, how, how.q_weight, how.q_bias)


def reference(q_BlHD: Tensor, k_BlGD: Tensor, how: Prepare) -> tuple[Tensor, Tensor]:
    return _prepared(q_BlHD, how, how.q_weight, how.q_bias), _prepared(k_BlGD, how, how.k_weight, how.k_bias)


def reference_into(
    q_BlHD: Tensor | None, k_BlGD: Tensor | None, v_BlGD: Tensor | None, how: Prepare, outboxes: Outboxes
) -> None:
    """Write q and k after norm and rotary, and v, into the outboxes; see `launch_into`."""
    q = None if q_BlHD is None else _prepared(q_BlHD, how, how.q_weight, how.q_bias)
    k = None if k_BlGD is None else _prepared(k_BlGD, how, how.k_weight, how.k_bias)
    copy_into(q, k, v_BlGD, outboxes)


def copy_into(q: Tensor | None, k: Tensor | None, v: Tensor | None, outboxes: Outboxes) -> None:
    for box in outboxes:
        for x, view, heads in ((q, box.q, box.heads), (k, box.k, box.kv_heads), (v, box.v, box.kv_heads)):
            if x is not None and view is not None:
                view.copy_(x[:, :, heads].transpose(0, 1))


def tile(heads: int, dim: int) -> Tile:
    """Return the tile for these heads, as measured.

    A thread has 32 elements if a token has 4096 or more, else 16. The rotary row is read early if the head dim is a
    power of two.
    """
    padded, whole = triton.next_power_of_2(dim), triton.next_power_of_2(heads) * triton.next_power_of_2(dim)
    return Tile(min(16, max(1, whole // (1024 if whole >= 4096 else 512))), early=dim == padded)


def launch(q_BlHD: Tensor, k_BlGD: Tensor, how: Prepare) -> tuple[Tensor, Tensor]:
    q = torch.empty(q_BlHD.shape, dtype=q_BlHD.dtype, device=q_BlHD.device)
    k = torch.empty(k_BlGD.shape, dtype=k_BlGD.dtype, device=k_BlGD.device)
    _run(q_BlHD, k_BlGD, None, how, (q, k))
    return q, k


def launch_one(x_BlHD: Tensor, how: Prepare) -> Tensor:
    out = torch.empty(x_BlHD.shape, dtype=x_BlHD.dtype, device=x_BlHD.device)
    _run(x_BlHD, None, None, how, (out, None))
    return out


def launch_into(
    q_BlHD: Tensor | None,
    k_BlGD: Tensor | None,
    v_BlGD: Tensor | None,
    how: Prepare,
    outboxes: Outboxes,
    flags: Flags | None = None,
) -> None:
    """Run the kernel: each reader gets its heads of this rank's tokens, for inputs that are not None.

    Outboxes are token-major. Pass the same ones, or the same part of their `split`, at every call: they keep the table
    that the kernel needs. flags: which the kernel raises, and waits for those of the other ranks.
    """
    _run(q_BlHD, k_BlGD, v_BlGD, how, outboxes.places, meeting(flags))


def _run(
    q: Tensor | None,
    k: Tensor | None,
    v: Tensor | None,
    how: Prepare,
    into: Places | tuple[Tensor, Tensor | None],
    met: tuple[Any, ...] = NOBODY,
) -> None:
    inputs = [x for x in (q, k, v) if x is not None]
    like, (batch, tokens, _, dim) = inputs[0], inputs[0].shape
    heads, groups = (1 if x is None else x.shape[2] for x in (q, v if k is None else k))
    size, steps = like.element_size(), jumps(how, dim)
    if isinstance(into, Places):
        table, (q_out, k_out), write, shape = into.table, (None, None), into.alignment, into.table.shape
        dtypes = {into.dtype, *(x.dtype for x in inputs)}
    else:
        table, (q_out, k_out), write, shape = None, into, gcd(16, dim * size), (3, 1, 0, 3)
        dtypes = {x.dtype for x in inputs}
    if len(dtypes) > 1:
        raise ValueError(f"got {', '.join(sorted(map(str, dtypes)))}, expected q, k, v and outboxes of one dtype")
    strides, norms, kinds = operands(q, k, v, how)
    # k has the same tile with or without q and v, because another number of warps would round its sums differently
    warps, early = tile(max(heads, groups, shape[2]), dim)
    padded, read = triton.next_power_of_2(max(dim, 2)), alignment(inputs, norms, how, dim)
    write = gcd(write, *(step * size for step in steps))
    if batch * tokens:
        prepare_kernel[(batch * tokens * len(inputs),)](
            *(q, k, v, q_out, k_out, table),
            *(norms or (None,) * 4),
            *(how.cos_lD2, how.sin_lD2, tokens, shape[2]),
            *strides,
            how.eps,
            *(heads, groups, triton.next_power_of_2(heads), triton.next_power_of_2(groups), len(inputs)),
            (*kinds, dim, padded, shape[1], read, write, early, turned(how, dim)),
            *met,
            num_warps=warps,
            enable_fp_fusion=True,
        )


def operands(
    q: Tensor | None, k: Tensor | None, v: Tensor | None, how: Prepare
) -> tuple[list[int], tuple[Tensor | None, ...], tuple[str, bool, str, bool]]:
    """Return the strides of inputs and rotary rows, the weights of norms, and the first four constants of `_move`."""
    contiguous_rows(q, k, v, how.q_weight, how.q_bias, how.k_weight, how.k_bias, how.cos_lD2, how.sin_lD2)
    strides = [step for x in (q, k, v) for step in ((0, 0, 0) if x is None else x.stride()[:3])]
    norms = () if how.norm == "none" else (how.q_weight, how.q_bias, how.k_weight, how.k_bias)
    if how.cos_lD2 is None or how.sin_lD2 is None:
        return [*strides, 0, 0, 0, 0], norms, (how.norm, how.per_head, "none", False)
    rows = (*row_strides(how.cos_lD2, q, k), *row_strides(how.sin_lD2, q, k))
    rotary = "pairs" if how.interleaved else "halves"
    return [*strides, *rows], norms, (how.norm, how.per_head, rotary, how.cos_lD2.dim() == 4)


def row_strides(rows_lD2: Tensor, *inputs: Tensor | None) -> tuple[int, int]:
    """Return the strides of batch rows and of tokens in the rotary rows."""
    by_head = rows_lD2.dim() == 4
    if by_head and (
        any(x is not None and x.shape[2] != rows_lD2.shape[2] for x in inputs)
        or rows_lD2.stride(2) != rows_lD2.shape[3]
    ):
        raise ValueError(
            f"got rotary rows of shape {tuple(rows_lD2.shape)}, strides {rows_lD2.stride()}, expected a row per head "
            f"of q and of k, adjacent for each token"
        )
    return 0 if rows_lD2.dim() == 2 or len(rows_lD2) == 1 else rows_lD2.stride(0), rows_lD2.stride(1 if by_head else -2)


def turned(how: Prepare, dim: int) -> int:
    """Return the number of pairs of a head that are rotated; all, if there is no rotary embedding."""
    return dim // 2 if how.cos_lD2 is None else how.cos_lD2.shape[-1]


def jumps(how: Prepare, dim: int) -> tuple[int, ...]:
    """Return the numbers of channels in a row that are read at once, where a part of each head is rotated by halves."""
    pairs = turned(how, dim)
    return () if how.interleaved or pairs == dim // 2 else (pairs, dim // 2 - pairs)


def alignment(inputs: Sequence[Tensor], norms: Sequence[Tensor | None], how: Prepare, dim: int) -> int:
    """Return the widest load, at most 16 bytes: it divides the address of every head and row that is read."""
    steps = jumps(how, dim)
    places = [(x, (*x.stride()[:3], *steps)) for x in inputs]
    places += [(x, (dim, *steps)) for x in norms if x is not None]
    places += [(x, x.stride()[:-1]) for x in (how.cos_lD2, how.sin_lD2) if x is not None]
    return gcd(16, *(n for x, steps in places for n in (x.data_ptr(), *(step * x.element_size() for step in steps))))


def _prepared(x_BlHD: Tensor, how: Prepare, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    return x_BlHD if how.is_identity else _rotate(_normalise(x_BlHD, how, weight, bias), how).to(x_BlHD.dtype)


def _normalise(x_BlHD: Tensor, how: Prepare, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x_BlHD.to(state_dtype(x_BlHD.dtype))
    if how.norm == "none":
        return x
    x = x if how.per_head else x.flatten(2)
    weight = None if weight is None else weight.to(x.dtype)
    bias = None if bias is None else bias.to(x.dtype)
    if how.norm == "layer":
        x = F.layer_norm(x, x.shape[-1:], weight, bias, how.eps)
    else:
        x = F.rms_norm(x, x.shape[-1:], weight, how.eps)
    return x.view(x_BlHD.shape)


def _rotate(x_BlHD: Tensor, how: Prepare) -> Tensor:
    if how.cos_lD2 is None or how.sin_lD2 is None:
        return x_BlHD
    cos, sin = (
        (rows if rows.dim() == 4 else rows.unsqueeze(-2)).to(x_BlHD.dtype) for rows in (how.cos_lD2, how.sin_lD2)
    )
    x, rest = x_BlHD.tensor_split((2 * cos.shape[-1],), dim=-1)
    if how.interleaved:
        a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.cat((torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2), rest), -1)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)


@jit(do_not_specialize=["tokens"])  # one program for all numbers of tokens
def prepare_kernel(
    q,
    k,
    v,
    q_out,
    k_out,
    table,
    q_weight,
    q_bias,
    k_weight,
    k_bias,
    cos,
    sin,
    tokens,
    table_heads,
    q_batch,
    q_token,
    q_head,
    k_batch,
    k_token,
    k_head,
    v_batch,
    v_token,
    v_head,
    cos_batch,
    cos_row,
    sin_batch,
    sin_row,
    eps,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    HEADS2: tl.constexpr,
    GROUPS2: tl.constexpr,
    PARTS: tl.constexpr,
    HOW: tl.constexpr,
    flags,
    LANES: tl.constexpr,
    TIMER: tl.constexpr,
):
    """Write one token's q, k or v in each program; neighbouring programs share a row of the projection.

    So memory is read in order. PARTS: the number of inputs that are not None. HEADS2, GROUPS2: the next powers of two.
    HOW: see `_move`.
    """
    part = tl.program_id(0) % PARTS
    if q is None:
        part += 1
    if k is None:  # v follows q
        part = tl.where(part > 0, part + 1, part)
    row = (tl.program_id(0) // PARTS).to(tl.int64)
    batch = row // tokens
    token = row % tokens
    if HOW[2] != "none":
        cos += batch * cos_batch
        sin += batch * sin_batch
    place = table, table_heads, row, batch, token
    rotary = cos, sin, cos_row, sin_row
    if q is not None:  # noqa: SIM102 (this condition, unlike the inner one, is decided at compile time)
        if part == 0:
            at = q + batch * q_batch + token * q_token
            _move(at, q_head, q_out, place, q_weight, q_bias, rotary, eps, 0, HEADS, HEADS2, HOW)
    if k is not None:  # noqa: SIM102
        if part == 1:
            at = k + batch * k_batch + token * k_token
            _move(at, k_head, k_out, place, k_weight, k_bias, rotary, eps, 1, GROUPS, GROUPS2, HOW)
    if v is not None:  # noqa: SIM102
        if part == 2:
            at = v + batch * v_batch + token * v_token
            _move(at, v_head, None, place, None, None, rotary, eps, 2, GROUPS, GROUPS2, HOW)
    if flags is not None:
        last_meets(flags, tl.num_programs(0), LANES, TIMER)


@jit
def _move(
    source,
    head_stride,
    out,
    place,
    weight,
    bias,
    rotary,
    eps,
    PART: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS2: tl.constexpr,
    HOW: tl.constexpr,
):
    """Read the heads of one token, normalise, rotate and write them, in halves a and b of rotary partners.

    HOW: the norm, whether it is per head, rotary ("none", "pairs", "halves"), whether each head has a rotary row, the
    head dim and the next power of two, the copies of each head, the bytes that divide each place that is read and that
    is written, whether rotary rows are read early, and the pairs of each head that are rotated.
    """
    # v (part 2) is only copied
    NORM: tl.constexpr = "none" if PART == 2 else HOW[0]  # pyright: ignore[reportAssignmentType]
    ROTARY: tl.constexpr = "none" if PART == 2 else HOW[2]  # pyright: ignore[reportAssignmentType]
    PER_HEAD: tl.constexpr = HOW[1]
    EACH: tl.constexpr = HOW[3]
    DIM: tl.constexpr = HOW[4]
    DIM2: tl.constexpr = HOW[5]
    COPIES: tl.constexpr = HOW[6]
    READ: tl.constexpr = HOW[7]
    WRITE: tl.constexpr = HOW[8]
    EARLY: tl.constexpr = HOW[9]
    TURNED: tl.constexpr = HOW[10]
    STEP: tl.constexpr = 0 if PER_HEAD else DIM  # pyright: ignore[reportAssignmentType]
    table, table_heads, row, batch, token = place
    cos, sin, cos_row, sin_row = rotary
    head = tl.arange(0, HEADS2)
    pair = tl.arange(0, DIM2 // 2)
    a, b = read_heads(source, head_stride, ROTARY, HEADS, HEADS2, DIM, DIM2, TURNED, READ)
    if ROTARY != "none" and EARLY:
        cosine = rotary_row(cos + token * cos_row, 1.0, EACH, HEADS, HEADS2, DIM2, TURNED, READ)
        sine = rotary_row(sin + token * sin_row, 0.0, EACH, HEADS, HEADS2, DIM2, TURNED, READ)
    if NORM != "none":
        if NORM == "layer":
            mean = mean_of(a + b, PER_HEAD, HEADS, DIM)
            last_a: tl.constexpr = DIM // 2 if ROTARY == "halves" else (DIM + 1) // 2
            known = (head < HEADS)[:, None]
            a = tl.where(known & (pair < last_a)[None, :], a - mean, 0.0)
            b = tl.where(known & (pair < DIM // 2)[None, :], b - mean, 0.0)
        # weights are read only here, from the cache, because fewer registers leave room for more rows at a time
        scale = tl.rsqrt(mean_of(a * a + b * b, PER_HEAD, HEADS, DIM) + eps)
        a = a * scale
        b = b * scale
        if weight is not None:
            weight_a, weight_b = read_heads(weight, STEP, ROTARY, HEADS, HEADS2, DIM, DIM2, TURNED, READ)
            a = a * weight_a
            b = b * weight_b
        if bias is not None:
            bias_a, bias_b = read_heads(bias, STEP, ROTARY, HEADS, HEADS2, DIM, DIM2, TURNED, READ)
            a = a + bias_a
            b = b + bias_b
    if ROTARY != "none":
        if not EARLY:
            cosine = rotary_row(cos + token * cos_row, 1.0, EACH, HEADS, HEADS2, DIM2, TURNED, READ)
            sine = rotary_row(sin + token * sin_row, 0.0, EACH, HEADS, HEADS2, DIM2, TURNED, READ)
        first = a * cosine - b * sine
        b = b * cosine + a * sine
        a = first
    for copy in tl.static_range(COPIES):  # pyright: ignore[reportGeneralTypeIssues]
        if table is None:
            write_heads(out + (row * HEADS + head) * DIM, head < HEADS, a, b, ROTARY, DIM, HEADS2, DIM2, TURNED, WRITE)
        else:
            entry = table + ((PART * COPIES + copy) * table_heads + head) * 3
            known = (head < HEADS) & (head < table_heads)
            address = tl.load(entry, mask=known, other=0)
            offset = token * tl.load(entry + 1, mask=known, other=0) + batch * tl.load(entry + 2, mask=known, other=0)
            there = address.to(tl.pointer_type(source.dtype.element_ty)) + offset
            write_heads(there, address != 0, a, b, ROTARY, DIM, HEADS2, DIM2, TURNED, WRITE)


@jit
def rotary_row(
    start,
    REST: tl.constexpr,
    EACH: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS2: tl.constexpr,
    DIM2: tl.constexpr,
    TURNED: tl.constexpr,
    READ: tl.constexpr,
):
    """Load a token's cosines or sines: a row per head, adjacent, or one row for all heads. REST: of further pairs."""
    pair = tl.arange(0, DIM2 // 2)
    if EACH:
        head = tl.arange(0, HEADS2)[:, None]
        at = tl.multiple_of(start + (head * TURNED + pair[None, :]), [READ, READ])
        row = tl.load(at, mask=(head < HEADS) & (pair < TURNED)[None, :], other=REST).to(tl.float32)
    else:
        at = tl.multiple_of(start + pair, [READ])
        row = tl.load(at, mask=pair < TURNED, other=REST).to(tl.float32)[None, :]
    return row


@jit
def halves(column, DIM: tl.constexpr, TURNED: tl.constexpr):
    """Return the channels of pairs, where the first TURNED pairs are rotated, and then come those that are not."""
    return column + tl.where(column < TURNED, 0, TURNED), column + tl.where(column < TURNED, TURNED, DIM // 2)


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
    TURNED: tl.constexpr,
    READ: tl.constexpr,
):
    """Load all heads, `step` elements apart, as two halves: first and second for "halves", else even and odd."""
    head = tl.arange(0, HEADS2)[:, None]
    if ROTARY == "halves":
        column = tl.arange(0, DIM2 // 2)[None, :]
        inside = (head < HEADS) & (column < DIM // 2)
        if TURNED < DIM // 2:
            first, second = halves(column, DIM, TURNED)
            a = tl.load(tl.multiple_of(start + (head * step + first), [READ, READ]), mask=inside, other=0.0)
            b = tl.load(tl.multiple_of(start + (head * step + second), [READ, READ]), mask=inside, other=0.0)
        else:
            at = tl.multiple_of(start + (head * step + column), [READ, READ])
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
    TURNED: tl.constexpr,
    WRITE: tl.constexpr,
):
    element: tl.constexpr = place.dtype.element_ty
    if ROTARY == "halves":
        column = tl.arange(0, DIM2 // 2)[None, :]
        inside = wanted[:, None] & (column < DIM // 2)
        if TURNED < DIM // 2:
            first, second = halves(column, DIM, TURNED)
            tl.store(tl.multiple_of(place[:, None] + first, [WRITE, WRITE]), a.to(element), mask=inside)
            tl.store(tl.multiple_of(place[:, None] + second, [WRITE, WRITE]), b.to(element), mask=inside)
        else:
            at = tl.multiple_of(place[:, None] + column, [WRITE, WRITE])
            tl.store(at, a.to(element), mask=inside)
            tl.store(at + DIM // 2, b.to(element), mask=inside)
    else:
        column = tl.arange(0, DIM2)[None, :]
        at = tl.multiple_of(place[:, None] + column, [WRITE, WRITE])
        x = tl.reshape(tl.join(a, b), (HEADS2, DIM2))
        tl.store(at, x.to(element), mask=wanted[:, None] & (column < DIM))
