"""The softmax's weights of wide heads as a separate matrix: exp(q k^T - shift), ready for a product with v.

For head dims over 256 on Hopper, where the output of enough queries does not fit into the registers of
one multiprocessor, so that a flash kernel reads k and v too often. The product q k^T runs in tiles as large as those of
the fastest matrix products, and its epilogue writes the weights in 2 bytes; the scores themselves never leave the chip.
Source: online softmax (arXiv 1805.02867); the shift is taken from the first keys and kept, see `weights_kernel`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from seqpar.kernels._triton import TensorDescriptor, compiled, fused, jit, tl

# how far, as a power of two, a weight may exceed 1: within fp16's 65504, and far from where fp32 sums overflow
ROOM = {torch.float16: 15, torch.bfloat16: 64}


@dataclass(frozen=True)
class Tile:
    """What a program of `weights_kernel` computes at once: rows x keys scores, over dims of the head at a time.

    halves: the parts in which the epilogue writes the keys. With two, the smaller buffer leaves room for a fourth stage
    of loads, which was the fastest of eleven tiles on an H200: 541 TFLOP/s of attention at 262,144 tokens of 512 dims,
    against 521 with one part and three stages, and 570 against 554 at 65,536.
    """

    rows: int = 128
    keys: int = 256
    dims: int = 64
    warps: int = 8
    stages: int = 4
    halves: int = 2


@dataclass(frozen=True)
class SoftmaxWeights:
    """Unnormalised weights 2^(score - shift) of R queries, over P parts of the keys with S keys each.

    weights_PRS: in q's dtype; a row's parts lie one after another. For each row in each part, in fp32: shift_PR,
    sum_PR, the sum of the weights, and rounded_PR, that of the weights in q's dtype, by which the output is divided.
    """

    weights_PRS: Tensor
    shift_PR: Tensor
    sum_PR: Tensor
    rounded_PR: Tensor


def write(q_RD: Tensor, k_KD: Tensor, into: SoftmaxWeights, tile: Tile) -> None:
    """Write the weights of R queries over K keys into all parts of `into`.

    Rows of q and k start at multiples of 16 bytes (see `aligned`). The parts' span is a multiple of the tile's keys,
    and every part has at least one key. The weights of a part after its last key are undefined.
    """
    (launch if fused(q_RD) else reference)(q_RD, k_KD, into, tile)


def reference(q_RD: Tensor, k_KD: Tensor, into: SoftmaxWeights, tile: Tile) -> None:
    """Compute `write` in plain torch, with the largest score of each row and part as its shift."""
    span = into.weights_PRS.shape[2]
    for part, k_SD in enumerate(k_KD.split(span)):
        scores_RS = q_RD.float() @ k_SD.float().T * (math.log2(math.e) * q_RD.shape[1] ** -0.5)
        into.shift_PR[part] = scores_RS.amax(1)
        weights_RS = torch.exp2(scores_RS - into.shift_PR[part][:, None])
        into.sum_PR[part] = weights_RS.sum(1)
        into.weights_PRS[part, :, : len(k_SD)] = weights_RS
        into.rounded_PR[part] = into.weights_PRS[part, :, : len(k_SD)].sum(1, dtype=torch.float32)


def launch(q_RD: Tensor, k_KD: Tensor, into: SoftmaxWeights, tile: Tile) -> None:
    (rows, dim), keys = q_RD.shape, k_KD.shape[0]
    parts, _, span = into.weights_PRS.shape
    joined = into.weights_PRS.transpose(0, 1).flatten(1)  # (R, P * S), a view
    weights_kernel[(-(-rows // tile.rows), parts)](
        described(q_RD, [tile.rows, tile.dims]),
        described(k_KD, [tile.keys, tile.dims]),
        described(joined, [tile.rows, tile.keys // tile.halves]),
        into.shift_PR,
        into.sum_PR,
        into.rounded_PR,
        rows,
        keys,
        span,
        math.log2(math.e) * dim**-0.5,
        D=dim,
        ROOM=ROOM[q_RD.dtype],
        ROWS=tile.rows,
        KEYS=tile.keys,
        DIMS=tile.dims,
        EVEN=keys % tile.keys == 0,
        HALVES=tile.halves,
        WAIT=compiled(weights_kernel),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def aligned(x_LD: Tensor) -> Tensor:
    """Return rows as the copy engine takes them: starting at multiples of 16 bytes; a copy where they do not."""
    size = x_LD.element_size()
    fits = x_LD.stride(1) == 1 and x_LD.stride(0) * size % 16 == 0 and x_LD.data_ptr() % 16 == 0
    return x_LD if fits and x_LD.stride(0) > 0 else x_LD.clone(memory_format=torch.contiguous_format)


def described(x_LD: Tensor, block: list[int]) -> Any:
    """Return the descriptor by which the copy engine loads blocks; what lies outside of x is 0."""
    return TensorDescriptor(x_LD, list(x_LD.shape), list(x_LD.stride()), block)


def combine(product_PRD: Tensor, sums_3PR: Tensor, out_RD: Tensor, lse_R: Tensor) -> None:
    """Write attention's output and log-sum-exp from the products of the weights with v, which are in fp32.

    sums_3PR: shift_PR, sum_PR and rounded_PR of `SoftmaxWeights`. out_RD may have any stride between rows.
    """
    (launch_combine if fused(product_PRD) else reference_combine)(product_PRD, sums_3PR, out_RD, lse_R)


def reference_combine(product_PRD: Tensor, sums_3PR: Tensor, out_RD: Tensor, lse_R: Tensor) -> None:
    shift_PR, sum_PR, rounded_PR = sums_3PR
    top_R = shift_PR.amax(0)
    scale_PR = torch.exp2(shift_PR - top_R)
    out_RD.copy_((product_PRD * scale_PR[..., None]).sum(0) / (rounded_PR * scale_PR).sum(0)[:, None])
    lse_R.copy_((top_R + (sum_PR * scale_PR).sum(0).log2()) * math.log(2))


def launch_combine(product_PRD: Tensor, sums_3PR: Tensor, out_RD: Tensor, lse_R: Tensor) -> None:
    parts, rows, dim = product_PRD.shape
    parts_kernel[(rows,)](
        product_PRD,
        *sums_3PR,
        out_RD,
        lse_R,
        rows,
        parts,
        out_RD.stride(0),
        D=dim,
        BLOCK=1 << (dim - 1).bit_length(),
        TOGETHER=8,
        num_warps=4,
    )


@jit(do_not_specialize=["rows", "keys"])
def weights_kernel(
    q,
    k,
    weights_out,
    shift_out,
    sum_out,
    rounded_out,
    rows,
    keys,
    span,
    factor,
    D: tl.constexpr,
    ROOM: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    DIMS: tl.constexpr,
    EVEN: tl.constexpr,
    HALVES: tl.constexpr,
    WAIT: tl.constexpr,
):
    # A program computes the weights of some rows over one part of the keys. The shift is the largest score of the
    # part's first keys. A later score may be larger: weights up to 2^ROOM are as precise, because they are floating
    # point. Where one exceeds even that, all is computed again with the largest score as the shift.
    block = tl.program_id(0)
    part = tl.program_id(1)
    first = part * span
    row = block * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, KEYS)
    tiles = tl.cdiv(tl.minimum(span, keys - first), KEYS)
    high = tl.full([ROWS], -1e30, tl.float32)
    shift = high
    total = tl.zeros([ROWS], tl.float32)
    again = True
    while again:
        shift = high
        total = tl.zeros([ROWS], tl.float32)
        # flattened with the loop over the head dim: the next tile's loads run during the epilogue
        for tile in tl.range(0, tiles, flatten=True):  # pyright: ignore[reportGeneralTypeIssues]
            key = first + tile * KEYS
            scores = tl.zeros([ROWS, KEYS], tl.float32)
            for dim in tl.range(0, D, DIMS):  # pyright: ignore[reportGeneralTypeIssues]
                scores = tl.dot(q.load([block * ROWS, dim]), k.load([key, dim]).T, scores)
            if not EVEN:
                scores = tl.where((key + column < keys)[None, :], scores, float("-inf"))
            high = tl.maximum(high, tl.max(scores, 1) * factor)
            shift = tl.where(shift < -1e29, high, shift)
            weights = tl.exp2(scores * factor - shift[:, None])
            total += tl.sum(weights, 1)
            weights = weights.to(weights_out.dtype)
            if HALVES == 1:
                weights_out.store([block * ROWS, key], weights)
            else:
                left, right = tl.split(tl.permute(tl.reshape(weights, (ROWS, 2, KEYS // 2)), (0, 2, 1)))
                weights_out.store([block * ROWS, key], left)
                weights_out.store([block * ROWS, key + KEYS // 2], right)
        again = tl.max((high > shift + ROOM).to(tl.int32), 0) > 0  # pyright: ignore[reportOperatorIssue]
        if WAIT:  # until the copy engine has stored all weights, because it may store them again
            tl.inline_asm_elementwise(
                "cp.async.bulk.wait_group 0; mov.b32 $0, $1;", "=r,r", [tiles], tl.int32, is_pure=False, pack=1
            )
    tl.store(shift_out + part * rows + row, shift, row < rows)
    # Rounding matters where few keys have almost all the weight, so the largest weight's is added to the sum.
    top = tl.exp2(high - shift)
    rounded = total + (top.to(weights_out.dtype).to(tl.float32) - top)
    tl.store(sum_out + part * rows + row, total, row < rows)
    tl.store(rounded_out + part * rows + row, rounded, row < rows)


@jit(do_not_specialize=["rows", "parts"])
def parts_kernel(
    product,
    shift,
    total,
    rounded,
    out,
    lse,
    rows,
    parts,
    stride,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    some = tl.arange(0, TOGETHER)
    top = -float("inf")
    for first in range(0, parts, TOGETHER):
        top = tl.maximum(
            top, tl.max(tl.load(shift + (first + some) * rows + row, first + some < parts, -float("inf")), 0)
        )
    sum_D = tl.zeros([BLOCK], tl.float32)
    whole = 0.0
    divisor = 0.0
    for first in range(0, parts, TOGETHER):
        at = (first + some) * rows + row
        here = first + some < parts
        scale = tl.exp2(tl.load(shift + at, here, -float("inf")) - top)
        whole += tl.sum(tl.load(total + at, here, 0.0) * scale, 0)  # pyright: ignore[reportOperatorIssue]
        divisor += tl.sum(tl.load(rounded + at, here, 0.0) * scale, 0)  # pyright: ignore[reportOperatorIssue]
        mask = here[:, None] & (column < D)[None, :]
        sum_D += tl.sum(
            tl.load(product + at.to(tl.int64)[:, None] * D + column[None, :], mask, 0.0) * scale[:, None], 0
        )
    tl.store(out + row.to(tl.int64) * stride + column, (sum_D / divisor).to(out.dtype.element_ty), column < D)
    tl.store(lse + row, (top + tl.log2(whole)) * 0.6931471805599453)
