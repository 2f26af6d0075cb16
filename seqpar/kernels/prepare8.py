"""QK-norm and rotary embedding of q and k, a rotation, and rounding of q, k and v to e4m3, into the readers' outboxes.

What `seqpar.kernels.prepare` does in bf16, for attention in 8 bits (`seqpar.types.protocols.Qkv8`): the pass that norm
and rotary need anyway also rounds, so that an exchange sends half of the bytes, and no rank rounds a key that another
has rounded. A program computes one part of a token; the rotation is a Hadamard matrix, sums and differences of two
numbers. A token's bits do not depend on other tokens. Numbers over 448 become 448, and NaN stays.
Source: rotation by Hadamard matrices (QuaRot, arXiv 2404.00456).
"""

# pyright: reportPossiblyUnboundVariable=false
# (kernels branch only on values that are known at compile time)

from __future__ import annotations

from dataclasses import replace
from math import gcd
from typing import Any

import torch
from torch import Tensor

from seqpar.kernels._triton import fused, jit, tl, triton
from seqpar.kernels.flags import Flags, last_meets, meeting
from seqpar.kernels.prepare import alignment, copy_into, mean_of, operands, prepare_one, read_heads, rotary_row, turned
from seqpar.kernels.rows8 import E4M3, LARGEST
from seqpar.types.outboxes import Outboxes, Places
from seqpar.types.protocols import Prepare, Qkv8, state_dtype

CASES = (
    {"batch": 2, "tokens": 5, "heads": 6, "kv_heads": 3, "dim": 96},
    {"batch": 1, "tokens": 9, "heads": 3, "kv_heads": 3, "dim": 64},
    {"batch": 2, "tokens": 3, "heads": 24, "kv_heads": 24, "dim": 128},
    {"batch": 1, "tokens": 1, "heads": 5, "kv_heads": 5, "dim": 16},
    *({"batch": 1, "tokens": n, "heads": 24, "kv_heads": 24, "dim": 128} for n in (2304, 4608)),  # FLUX.1
    {"batch": 1, "tokens": 4096, "heads": 40, "kv_heads": 40, "dim": 128},  # Wan 14B
)
NOBODY = meeting(None)


def block_of(dim: int) -> int:
    """Return the size of the Hadamard matrices that rotate a head: a power of two that divides it, or its half."""
    return dim if dim & (dim - 1) == 0 else dim // 2 & -(dim // 2)


def rotated(x: Tensor) -> Tensor:
    """Return x times that matrix over the root of its size, (..., D), by additions whose order is fixed."""
    block, step = block_of(x.shape[-1]), 1
    while step < block:
        a, b = x.unflatten(-1, (-1, 2, step)).unbind(-2)
        x = torch.stack((a + b, a - b), dim=-2).flatten(-3)
        step *= 2
    return x * block**-0.5


def prepare8(q_BlHD: Tensor, k_BlGD: Tensor, v_BlGD: Tensor, how: Prepare) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v in e4m3, with the same shapes, in new contiguous tensors."""
    if takes(q_BlHD, how):
        return launch(q_BlHD, k_BlGD, v_BlGD, how)
    q, k, v = reference(q_BlHD, k_BlGD, v_BlGD, how)
    assert q is not None
    assert k is not None
    assert v is not None
    return q, k, v


def reference(
    q_BlHD: Tensor | None, k_BlGD: Tensor | None, v_BlGD: Tensor | None, how: Prepare
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Compute `prepare8` in plain torch; what is None stays None."""
    eight = how.eight
    assert eight is not None
    wide, of_k = replace(how, eight=None), replace(how, eight=None, q_weight=how.k_weight, q_bias=how.k_bias)
    q = k = v = None
    if q_BlHD is not None:
        share = q_BlHD.shape[2] // len(eight.k_scale_G)
        scale_H = eight.k_scale_G.repeat_interleave(share)
        q = _rounded(rotated(_wide(prepare_one(q_BlHD, wide))) / scale_H[:, None])
    if k_BlGD is not None:
        k = rotated(_wide(prepare_one(k_BlGD, of_k))) - eight.k_centre_GD
        k = _rounded(k * eight.k_scale_G[:, None])
    if v_BlGD is not None:
        v = _rounded((_wide(v_BlGD) - eight.v_centre_GD) * eight.v_scale)
    return q, k, v


def reference_into(
    q_BlHD: Tensor | None, k_BlGD: Tensor | None, v_BlGD: Tensor | None, how: Prepare, outboxes: Outboxes
) -> None:
    copy_into(*reference(q_BlHD, k_BlGD, v_BlGD, how), outboxes)


def restored(out_BlHD: Tensor, eight: Qkv8, dtype: torch.dtype) -> Tensor:
    """Return attention's output from that of v8, with the values' centre, rounded once to a model's dtype."""
    centre_GD = eight.v_centre_GD.to(dtype)
    grouped = out_BlHD.to(dtype).unflatten(2, (len(centre_GD), -1))
    return torch.add(centre_GD[:, None], grouped, alpha=1 / eight.v_scale).flatten(2, 3)


def launch(q_BlHD: Tensor, k_BlGD: Tensor, v_BlGD: Tensor, how: Prepare) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.empty(x.shape, dtype=E4M3, device=x.device) for x in (q_BlHD, k_BlGD, v_BlGD))
    if q.shape[1] == k.shape[1]:
        _run(q_BlHD, k_BlGD, v_BlGD, how, (q, k, v))
    else:  # programs count tokens
        _run(q_BlHD, None, None, how, (q, k, v))
        _run(None, k_BlGD, v_BlGD, how, (q, k, v))
    return q, k, v


def launch_into(
    q_BlHD: Tensor | None,
    k_BlGD: Tensor | None,
    v_BlGD: Tensor | None,
    how: Prepare,
    outboxes: Outboxes,
    flags: Flags | None = None,
) -> None:
    _run(q_BlHD, k_BlGD, v_BlGD, how, outboxes.places, meeting(flags))


def warps(numbers: int) -> int:
    """Return the number of warps of a program, for the numbers of a token's part; a token's bits depend on it."""
    return min(16, max(4, numbers // 1024))


def _wide(x: Tensor) -> Tensor:
    return x.to(state_dtype(x.dtype))


def _rounded(x: Tensor) -> Tensor:
    return x.clamp(-LARGEST, LARGEST).to(E4M3)


def takes(x: Tensor, how: Prepare) -> bool:
    whole = turned(how, x.shape[-1]) == x.shape[-1] // 2  # of each head has a rotary embedding
    return whole and fused(x)


def _run(
    q: Tensor | None,
    k: Tensor | None,
    v: Tensor | None,
    how: Prepare,
    into: Places | tuple[Tensor, Tensor, Tensor],
    met: tuple[Any, ...] = NOBODY,
) -> None:
    eight = how.eight
    assert eight is not None
    if len({x.shape[1] for x in (q, k, v) if x is not None}) > 1:
        raise ValueError("got q, k and v of different numbers of tokens, expected one")
    inputs = [x for x in (q, k, v) if x is not None]
    batch, tokens, _, dim = inputs[0].shape
    groups = len(eight.k_scale_G)
    heads = groups if q is None else q.shape[2]
    if isinstance(into, Places):
        table, outs, write, shape = into.table, (None,) * 3, into.alignment, into.table.shape
        dtypes = {into.dtype}
    else:
        table, outs, write, shape = None, into, gcd(16, dim), (3, 1, 0, 3)
        dtypes = {x.dtype for x in into}
    if dtypes != {E4M3} or len({x.dtype for x in inputs}) > 1:
        raise ValueError(
            f"got outboxes of {dtypes}, q, k, v of {[x.dtype for x in inputs]}, expected e4m3 and one dtype"
        )
    strides, norms, kinds = operands(q, k, v, how)
    # the tile is the same for every part, because another one would round its sums differently
    padded, most, block = triton.next_power_of_2(dim), triton.next_power_of_2(max(heads, groups)), block_of(dim)
    shapes = (*kinds, dim, padded, (padded // 2).bit_length() - 1, block, shape[1])
    if batch * tokens:
        prepare8_kernel[(batch * tokens * len(inputs),)](
            *(q, k, v, *outs, table),
            *(eight.k_scale_G, eight.k_centre_GD, eight.v_scale, eight.v_centre_GD),
            *(norms or (None,) * 4),
            *(how.cos_lD2, how.sin_lD2, tokens, shape[2]),
            *strides,
            how.eps,
            block**-0.5,
            *(heads, groups, most, len(inputs)),
            (*shapes, alignment(inputs, norms, how, dim), write),
            *met,
            num_warps=warps(most * padded),
            enable_fp_fusion=True,
        )


@jit(do_not_specialize=["tokens"])  # one program for all numbers of tokens
def prepare8_kernel(
    q,
    k,
    v,
    q_out,
    k_out,
    v_out,
    table,
    k_scale,
    k_centre,
    v_scale,
    v_centre,
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
    norm,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    MOST: tl.constexpr,
    PARTS: tl.constexpr,
    HOW: tl.constexpr,
    flags,
    LANES: tl.constexpr,
    TIMER: tl.constexpr,
):
    """Write q, k or v of a token in each program. PARTS: the inputs that are not None. HOW: as for `_round`."""
    part = tl.program_id(0) % PARTS
    if q is None:
        part += 1
    if k is None:  # v follows q
        part = tl.where(part > 0, part + 1, part)
    row = (tl.program_id(0) // PARTS).to(tl.int64)
    place = table, table_heads, row, tokens
    rotary = cos, sin, cos_batch, cos_row, sin_batch, sin_row
    if q is not None:  # noqa: SIM102 (this condition, unlike the inner one, is decided at compile time)
        if part == 0:
            source = q, q_batch, q_token, q_head
            how = k_scale, None, q_weight, q_bias, eps, norm
            _round(source, q_out, place, how, rotary, 0, HEADS, HEADS // GROUPS, MOST, HOW)
    if k is not None:  # noqa: SIM102
        if part == 1:
            source = k, k_batch, k_token, k_head
            how = k_scale, k_centre, k_weight, k_bias, eps, norm
            _round(source, k_out, place, how, rotary, 1, GROUPS, 1, MOST, HOW)
    if v is not None:  # noqa: SIM102
        if part == 2:
            source = v, v_batch, v_token, v_head
            how = v_scale, v_centre, None, None, eps, norm
            _round(source, v_out, place, how, rotary, 2, GROUPS, 1, MOST, HOW)
    if flags is not None:
        last_meets(flags, tl.num_programs(0), LANES, TIMER)


@jit
def hadamard(x, ROWS: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Multiply blocks of columns by Hadamard matrices; each step adds neighbours and moves their bit to the top."""
    WIDTH: tl.constexpr = 2**BITS  # pyright: ignore[reportAssignmentType]
    for step in tl.static_range(BITS):  # pyright: ignore[reportGeneralTypeIssues]
        even, odd = tl.split(tl.reshape(x, (ROWS, WIDTH // 2, 2)))
        both = tl.join(even + odd, even - odd) if 2**step < BLOCK else tl.join(even, odd)
        x = tl.reshape(tl.permute(both, (0, 2, 1)), (ROWS, WIDTH))
    return x


@jit
def _round(
    source,
    out,
    place,
    how,
    rotary,
    PART: tl.constexpr,
    HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    MOST: tl.constexpr,
    HOW: tl.constexpr,
):
    """Normalise, rotate by position and by Hadamard matrices, scale and write the heads of a token; v is only scaled.

    HOW: the norm, whether it is per head, rotary ("none", "pairs", "halves"), whether each head has a rotary row, the
    head dim, the width of its tile, the bits of a column of half a tile, the size of a Hadamard matrix, the copies of
    each head, the bytes that divide each place that is read and that is written. SHARE: the number of heads with one
    scale, by which q is divided; v has one scale.
    """
    NORM: tl.constexpr = HOW[0]
    PER_HEAD: tl.constexpr = HOW[1]
    ROTARY: tl.constexpr = "none" if PART == 2 else HOW[2]  # pyright: ignore[reportAssignmentType]
    EACH: tl.constexpr = HOW[3]
    DIM: tl.constexpr = HOW[4]
    DIM2: tl.constexpr = HOW[5]
    BITS: tl.constexpr = HOW[6]
    COPIES: tl.constexpr = HOW[8]
    READ: tl.constexpr = HOW[9]
    STEP: tl.constexpr = 0 if PER_HEAD else DIM  # pyright: ignore[reportAssignmentType]
    # halves begin at half of the head dim
    WRITE: tl.constexpr = min(HOW[10], (DIM // 2) & -(DIM // 2)) if ROTARY == "halves" else HOW[10]  # pyright: ignore[reportAssignmentType]
    # pairs of a number of each half are in one matrix, unless a matrix is within a half
    CROSSES: tl.constexpr = (HOW[7] == DIM) | (ROTARY != "halves")  # pyright: ignore[reportAssignmentType]
    INNER: tl.constexpr = HOW[7] // 2 if CROSSES else HOW[7]  # pyright: ignore[reportAssignmentType]
    x, x_batch, x_token, x_head = source
    table, table_heads, row, tokens = place
    scales, centres, weight, bias, eps, norm = how
    cos, sin, cos_batch, cos_row, sin_batch, sin_row = rotary
    head = tl.arange(0, MOST)
    column = tl.arange(0, DIM2)
    pair = tl.arange(0, DIM2 // 2)
    known = head < HEADS
    if ROTARY == "halves":
        inside = known[:, None] & (column % (DIM2 // 2) < DIM // 2)[None, :]
        column = column // (DIM2 // 2) * (DIM // 2) + column % (DIM2 // 2)
    else:
        inside = known[:, None] & (column < DIM)[None, :]
    scale = scales if PART == 2 else tl.load(scales + head // SHARE, known, 1.0)[:, None]
    batch = row // tokens
    token = row % tokens
    at = x + batch * x_batch + token * x_token
    if PART == 2:
        start = tl.multiple_of(at + (head[:, None] * x_head + column[None, :]), [READ, READ])
        y = tl.load(start, inside, 0.0).to(tl.float32)
    else:
        a, b = read_heads(at, x_head, ROTARY, HEADS, MOST, DIM, DIM2, DIM // 2, READ)
        if NORM != "none":
            if NORM == "layer":
                mean = mean_of(a + b, PER_HEAD, HEADS, DIM)
                real = known[:, None] & (pair < DIM // 2)[None, :]
                a = tl.where(real, a - mean, 0.0)
                b = tl.where(real, b - mean, 0.0)
            factor = tl.rsqrt(mean_of(a * a + b * b, PER_HEAD, HEADS, DIM) + eps)
            a = a * factor
            b = b * factor
            if weight is not None:
                weight_a, weight_b = read_heads(weight, STEP, ROTARY, HEADS, MOST, DIM, DIM2, DIM // 2, READ)
                a = a * weight_a
                b = b * weight_b
            if bias is not None:
                bias_a, bias_b = read_heads(bias, STEP, ROTARY, HEADS, MOST, DIM, DIM2, DIM // 2, READ)
                a = a + bias_a
                b = b + bias_b
        if ROTARY != "none":
            at_cos, at_sin = cos + batch * cos_batch + token * cos_row, sin + batch * sin_batch + token * sin_row
            cosine = rotary_row(at_cos, 1.0, EACH, HEADS, MOST, DIM2, DIM // 2, READ)
            sine = rotary_row(at_sin, 0.0, EACH, HEADS, MOST, DIM2, DIM // 2, READ)
            first = a * cosine - b * sine
            b = b * cosine + a * sine
            a = first
        a = hadamard(a, MOST, BITS, INNER)
        b = hadamard(b, MOST, BITS, INNER)
        y = tl.join(a + b, a - b) if CROSSES else tl.join(a, b)
        y = tl.reshape(tl.permute(y, (0, 2, 1)) if ROTARY == "halves" else y, (MOST, DIM2)) * norm
    if centres is not None:
        y = y - tl.load(centres + head[:, None] * DIM + column[None, :], inside, 0.0).to(tl.float32)
    y = y / scale if PART == 0 else y * scale
    y = tl.clamp(y, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    for copy in tl.static_range(COPIES):  # pyright: ignore[reportGeneralTypeIssues]
        if table is None:
            there = out + (row * HEADS + head) * DIM
            wanted = inside
        else:
            entry = table + ((PART * COPIES + copy) * table_heads + head) * 3
            listed = known & (head < table_heads)
            address = tl.load(entry, mask=listed, other=0)
            step_of = tl.load(entry + 1, mask=listed, other=0)
            offset = token * step_of + batch * tl.load(entry + 2, mask=listed, other=0)
            there = address.to(tl.pointer_type(tl.float8e4nv)) + offset
            wanted = inside & (address != 0)[:, None]
        target = tl.multiple_of(there[:, None] + column[None, :], [WRITE, WRITE])
        tl.store(target, y.to(tl.float8e4nv), mask=wanted)
