"""Merges two partial attentions by their log-sum-exp, as a ring does after each key-value block, in one pass.

Plain torch reads and writes the state four times, in fp32. The kernel reads and writes
the state once, and reads the part once in its own dtype. The first part becomes the state without a copy, and the last
merge can write the model's dtype: merging two bf16 parts moves 6 bytes an element, where fp32 in between moves 22.
Source: Ring Attention (arXiv 2310.01889); the weights are a softmax over two log-sum-exps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seqpar.kernels._triton import contiguous_rows, fused, in_units, jit, tl
from seqpar.types.protocols import state_dtype

ROWS = 16

# batch rows, tokens, heads, head dim
CASES: tuple[dict[str, int], ...] = (
    {"batch": 1, "tokens": 1, "heads": 1, "dim": 8},
    {"batch": 2, "tokens": 5, "heads": 3, "dim": 64},
    {"batch": 1, "tokens": 85, "heads": 2, "dim": 72},
    {"batch": 2, "tokens": 17, "heads": 2, "dim": 128},
    {"batch": 2, "tokens": 4096, "heads": 16, "dim": 72},
    {"batch": 2, "tokens": 4096, "heads": 32, "dim": 128},
    {"batch": 1, "tokens": 16384, "heads": 32, "dim": 128},
)


def merge(
    out_BLHD: Tensor | None,
    lse_BHL: Tensor | None,
    part_BLHD: Tensor,
    part_lse_BHL: Tensor,
    *,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Return attention over two sets of keys from attention over each: the output and its log-sum-exp.

    The output is in fp32 (fp64 for fp64), or in `dtype`, which is given with the last part. out and lse are the state;
    pass None for both if there is none yet, and the part becomes the state. Do not use the passed state again, because
    it may be overwritten. A part over no keys has a log-sum-exp of -inf; its values do not matter.
    """
    if fused(part_BLHD):
        return launch(out_BLHD, lse_BHL, part_BLHD, part_lse_BHL, dtype=dtype)
    return reference(out_BLHD, lse_BHL, part_BLHD, part_lse_BHL, dtype=dtype)


def reference(
    out_BLHD: Tensor | None,
    lse_BHL: Tensor | None,
    part_BLHD: Tensor,
    part_lse_BHL: Tensor,
    *,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `merge` in plain torch.

    With a = exp(lse), b = exp(part_lse): out = (a out + b part) / (a + b), lse = log(a + b). Nothing overflows, because
    b / (a + b) is computed as sigmoid(part_lse - lse).
    """
    wide = state_dtype(part_BLHD.dtype)
    part, part_lse = part_BLHD.to(wide), part_lse_BHL.to(wide)
    if out_BLHD is None or lse_BHL is None:
        return part.to(dtype or wide), part_lse
    lse = lse_BHL.to(wide)
    # if both are empty, -inf - -inf is NaN, and any share gives the same result
    share_BLH1 = _by_token(torch.sigmoid(part_lse - lse).nan_to_num(0.0))
    part = part.masked_fill(_by_token(part_lse == -torch.inf), 0.0)
    out = out_BLHD.to(wide).masked_fill(_by_token(lse == -torch.inf), 0.0)
    return torch.lerp(out, part, share_BLH1).to(dtype or wide), torch.logaddexp(lse, part_lse)


def _by_token(x_BHL: Tensor) -> Tensor:
    return x_BHL.transpose(1, 2)[..., None]


def launch(
    out_BLHD: Tensor | None,
    lse_BHL: Tensor | None,
    part_BLHD: Tensor,
    part_lse_BHL: Tensor,
    *,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the kernel of `merge`; a state that already has the result's dtype is updated in place."""
    if out_BLHD is None or lse_BHL is None:
        return _first(part_BLHD, part_lse_BHL, dtype)
    batch, tokens, heads, dim = part_BLHD.shape
    wide = state_dtype(part_BLHD.dtype)
    # a first part belongs to the local attention and must not be written to, unless _first has copied it
    owned = out_BLHD.dtype == wide
    into = out_BLHD if owned and dtype in (None, wide) else part_BLHD.new_empty(part_BLHD.shape, dtype=dtype or wide)
    lse = lse_BHL if owned else torch.empty((batch, heads, tokens), dtype=wide, device=part_BLHD.device)
    contiguous_rows(out_BLHD, part_BLHD, into)
    unit, strides = in_units([n for x in (out_BLHD, part_BLHD, into) for n in x.stride()[:3]], dim)
    strides += [stride for x in (lse_BHL, part_lse_BHL, lse) for stride in x.stride()]
    if part_BLHD.numel():
        merge_kernel[(heads, -(-tokens // ROWS), batch)](
            out_BLHD,
            part_BLHD,
            into,
            lse_BHL,
            part_lse_BHL,
            lse,
            tokens,
            *strides,
            D=dim,
            BLOCK=1 << (dim - 1).bit_length(),
            ROWS=ROWS,
            UNIT=unit,
            num_warps=4,
            enable_fp_fusion=True,
        )
    return into, lse


def _first(part_BLHD: Tensor, part_lse_BHL: Tensor, dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """Return the first part as the state; it is copied only if the next merge would write to it."""
    wide = state_dtype(part_BLHD.dtype)
    if dtype is not None:
        return part_BLHD.to(dtype), part_lse_BHL.to(wide)
    if part_BLHD.dtype == wide:
        return part_BLHD.clone(), part_lse_BHL.to(wide, copy=True)
    return part_BLHD, part_lse_BHL.to(wide)


LSE_STRIDES = [f"{lse}_{dim}" for lse in ("lse", "part_lse", "into_lse") for dim in ("batch", "head")]


@jit(do_not_specialize=["tokens", *LSE_STRIDES])  # one program for all numbers of tokens
def merge_kernel(
    out,
    part,
    into,
    lse,
    part_lse,
    into_lse,
    tokens,
    out_batch,
    out_token,
    out_head,
    part_batch,
    part_token,
    part_head,
    into_batch,
    into_token,
    into_head,
    lse_batch,
    lse_head,
    lse_token,
    part_lse_batch,
    part_lse_head,
    part_lse_token,
    into_lse_batch,
    into_lse_head,
    into_lse_token,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    UNIT: tl.constexpr,
):
    # the program index of heads runs fastest, so that programs which run together cover whole rows of some tokens
    head = tl.program_id(0).to(tl.int64)
    token = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    column = tl.arange(0, BLOCK)
    row_mask = token < tokens
    mask = row_mask[:, None] & (column < D)[None, :]
    nothing = float("-inf")
    ours = tl.load(lse + batch * lse_batch + head * lse_head + token * lse_token, row_mask, nothing).to(tl.float32)
    theirs = tl.load(
        part_lse + batch * part_lse_batch + head * part_lse_head + token * part_lse_token, row_mask, nothing
    ).to(tl.float32)
    # both exp(lse) are relative to the larger one; if both are empty they are relative to 0, which avoids NaN
    top = tl.maximum(ours, theirs)
    top = tl.where(top == nothing, 0.0, top)
    a, b = tl.exp(ours - top), tl.exp(theirs - top)
    total = a + b
    whole = tl.where(total == 0, 1.0, total)  # a total of NaN stays, so that NaN reaches the output
    a, b = (a / whole)[:, None], (b / whole)[:, None]
    at = (batch * out_batch + head * out_head + token * out_token) * UNIT
    state_RD = tl.load(out + at[:, None] + column[None, :], mask, 0.0).to(tl.float32)
    at = (batch * part_batch + head * part_head + token * part_token) * UNIT
    part_RD = tl.load(part + at[:, None] + column[None, :], mask, 0.0).to(tl.float32)
    # values without weight are ignored, even if they are NaN
    merged = tl.where(a == 0, 0.0, state_RD) * a + tl.where(b == 0, 0.0, part_RD) * b
    at = (batch * into_batch + head * into_head + token * into_token) * UNIT
    tl.store(into + at[:, None] + column[None, :], merged.to(into.dtype.element_ty), mask)
    at = batch * into_lse_batch + head * into_lse_head + token * into_lse_token
    tl.store(into_lse + at, tl.where(total == 0, nothing, top + tl.log(whole)), row_mask)
