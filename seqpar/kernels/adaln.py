"""adaLN between the matrix products: add a gated branch to the residual stream, normalise and modulate, in one pass.

The kernel is bound by memory: it reads and writes each stream once (4 bytes for each
element of a bf16 stream to normalise, 8 with a gated branch), where plain torch makes about ten passes, half of them in
fp32. It computes in fp32 (fp64 for fp64) and rounds each result once. A row's bits do not depend on the number of rows.
An RMSNorm of the branch itself, as blocks with norms on both sides of a layer have it, takes no further pass.
Source: adaLN-Zero, DiT (arXiv 2212.09748).
"""

# pyright: reportPossiblyUnboundVariable=false
# (kernels branch only on values that are known at compile time)

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from seqpar.kernels._triton import contiguous_rows, fused, in_units, jit, tl, warps_for
from seqpar.kernels.rows8 import Rounding, Rows8, room_for, rounded_rows, write_rounded
from seqpar.types.protocols import state_dtype


@dataclass(frozen=True)
class Norm:
    """A norm over the width: LayerNorm or RMSNorm, with or without a weight (E,)."""

    kind: Literal["layer", "rms"] = "layer"
    eps: float = 1e-6
    weight: Tensor | None = None


class Summed(NamedTuple):
    """Vectors (R, E) plus one vector (E,) that all of them share, added in fp32 while they are read.

    Wan's text-and-image-to-video model has a vector per token, which every block adds to its own table: the sums of one
    block would be 2 GB in fp32.
    """

    each_RE: Tensor
    shared_E: Tensor


Vectors = Tensor | Summed
"""Shift, scale or gate: one for each batch row (B, E), or one for all (1, E); with an index, rows of a table (R, E)."""


class BranchNorm(NamedTuple):
    """RMSNorm with a weight (E,) that a branch passes before its gate, as in blocks with norms on both sides."""

    weight_E: Tensor
    eps: float


Branch = Tensor | tuple[Tensor, Tensor]
"""A branch (B, l, E), or two whose sum it is, which is made in fp32 while they are read."""


class Gated(NamedTuple):
    """A branch and its gate (B, E), whose product is added to the stream before the norm.

    norm: of the branch alone, before the product.
    """

    gate_BE: Vectors
    branch_BlE: Branch
    norm: BranchNorm | None = None


# shapes that tests check and a bench measures: batch rows, tokens, width, padding of a token's stride
CASES: tuple[dict[str, int], ...] = (
    {"batch": 1, "tokens": 1, "width": 384, "pad": 0},
    {"batch": 2, "tokens": 5, "width": 1152, "pad": 0},
    {"batch": 3, "tokens": 5, "width": 1160, "pad": 8},  # a multiple of 8, not of 16
    {"batch": 1, "tokens": 85, "width": 384, "pad": 384},
    {"batch": 2, "tokens": 4, "width": 1536, "pad": 0},
    {"batch": 2, "tokens": 256, "width": 4096, "pad": 0},
    {"batch": 2, "tokens": 4096, "width": 1152, "pad": 0},
    {"batch": 2, "tokens": 4096, "width": 1536, "pad": 0},
    {"batch": 2, "tokens": 4096, "width": 3072, "pad": 0},
    {"batch": 2, "tokens": 4096, "width": 4096, "pad": 0},
    {"batch": 1, "tokens": 8192, "width": 8192, "pad": 8192},
)


def norm_modulate(
    x_BlE: Tensor,
    shift_BE: Vectors,
    scale_BE: Vectors,
    norm: Norm,
    *,
    index_Bl: Tensor | None = None,
    rounding: Rounding | None = None,
) -> Tensor | Rows8:
    """Return norm(x) * (1 + scale) + shift in x's dtype; x is (B, l, E), shift and scale are (B, E).

    index: int32, for tokens that differ in their modulation; token (b, l) has row index[b, l] of shift and scale.
    rounding: that of the product that reads the result (`Matrix.rounding`), which is then in 8 bits.
    """
    chosen = launch if fused(x_BlE) else reference
    return chosen(x_BlE, None, shift_BE, scale_BE, norm, index_Bl=index_Bl, rounding=rounding)[1]


def gate_norm_modulate(
    x_BlE: Tensor,
    gate_BE: Vectors,
    branch_BlE: Branch,
    shift_BE: Vectors,
    scale_BE: Vectors,
    norm: Norm,
    *,
    index_Bl: Tensor | None = None,
    keep: bool = True,
    branch_norm: BranchNorm | None = None,
    rounding: Rounding | None = None,
) -> tuple[Tensor, Tensor | Rows8]:
    """Return x + gate * branch and its `norm_modulate`, both in x's dtype; the norm sees the sum before it is rounded.

    index, rounding: as for `norm_modulate`; the index is for the gate, too. branch_norm: of the branch, before its
    gate; it is not rounded.
    keep=False is for the last layer, after which nothing reads the stream: the sum is not written, and x itself is
    returned instead.
    """
    gated = Gated(gate_BE, branch_BlE, branch_norm)
    chosen = launch if fused(x_BlE) else reference
    return chosen(x_BlE, gated, shift_BE, scale_BE, norm, index_Bl=index_Bl, keep=keep, rounding=rounding)


def reference(
    x_BlE: Tensor,
    gated: Gated | None,
    shift_BE: Vectors,
    scale_BE: Vectors,
    norm: Norm,
    *,
    index_Bl: Tensor | None = None,
    keep: bool = True,
    rounding: Rounding | None = None,
) -> tuple[Tensor, Any]:
    wide = x_BlE.to(state_dtype(x_BlE.dtype))
    if gated is not None:
        wide = wide + by_token(gated.gate_BE, index_Bl) * _branch(gated, wide.dtype)
    weight = None if norm.weight is None else norm.weight.to(wide.dtype)
    if norm.kind == "layer":
        normed = F.layer_norm(wide, wide.shape[-1:], weight, eps=norm.eps)
    else:
        normed = F.rms_norm(wide, wide.shape[-1:], weight, norm.eps)
    h = normed * (1 + by_token(scale_BE, index_Bl)) + by_token(shift_BE, index_Bl)
    h = h.to(x_BlE.dtype) if rounding is None else rounded_rows(h, rounding, x_BlE.dtype)
    return (wide.to(x_BlE.dtype) if gated is not None and keep else x_BlE), h


def added(
    x_BlE: Tensor,
    gate_BE: Vectors,
    branch_BlE: Branch,
    *,
    index_Bl: Tensor | None = None,
    branch_norm: BranchNorm | None = None,
) -> Tensor:
    """Return x + gate * branch in x's dtype without a norm of the sum, as after the last block.

    index: as for `norm_modulate`; branch_norm: as for `gate_norm_modulate`.
    """
    gated = Gated(gate_BE, branch_BlE, branch_norm)
    if fused(x_BlE):
        return launch(x_BlE, gated, index_Bl=index_Bl)[0]
    gate = by_token(gate_BE, index_Bl)
    branch = _branch(gated, gate.dtype).to(gate.dtype)
    return torch.addcmul(x_BlE.to(gate.dtype), gate, branch).to(x_BlE.dtype)


def _branch(gated: Gated, dtype: torch.dtype) -> Tensor:
    (branch, *more), norm = _terms(gated.branch_BlE), gated.norm
    for each in more:
        branch = branch.to(dtype) + each
    if norm is None:
        return branch
    return F.rms_norm(branch.to(dtype), branch.shape[-1:], norm.weight_E.to(dtype), norm.eps)


def by_token(vectors: Vectors, index_Bl: Tensor | None) -> Tensor:
    """Return the vectors of all tokens, (B, l, E), or (B, 1, E) where the tokens of a batch row share one."""
    each_RE, shared_E = vectors if isinstance(vectors, Summed) else (vectors, None)
    rows = each_RE[:, None] if index_Bl is None or len(each_RE) == 1 else each_RE[index_Bl]
    return rows if shared_E is None else rows.to(state_dtype(rows.dtype)) + shared_E


def launch(
    x_BlE: Tensor,
    gated: Gated | None,
    shift_BE: Vectors | None = None,
    scale_BE: Vectors | None = None,
    norm: Norm | None = None,
    *,
    index_Bl: Tensor | None = None,
    keep: bool = True,
    rounding: Rounding | None = None,
) -> tuple[Tensor, Any]:
    """Run the kernel: what `reference` returns, in new contiguous tensors. Inputs need only a contiguous last dim.

    Without shift, scale and norm only the stream after the gated branch is computed; both results are this stream.
    """
    batch, tokens, width = x_BlE.shape
    gate, given, branch_norm = gated or (None, (), None)
    branch, second = [*(each.expand(batch, tokens, width) for each in _terms(given)), None, None][:2]
    index = None if index_Bl is None else index_Bl.expand(batch, tokens).contiguous()
    vectors = [_rows(x, batch if index is None else None, width) for x in (gate, shift_BE, scale_BE)]
    contiguous_rows(x_BlE, branch, second, *(each for each, _ in vectors))
    steps = [step for x in (x_BlE, branch, second) for step in ((0, 0) if x is None else x.stride()[:2])]
    unit, strides = in_units([*steps, *(0 if each is None else each.stride(0) for each, _ in vectors)], width)
    x_new, h = (
        torch.empty((batch, tokens, width), dtype=x_BlE.dtype, device=x_BlE.device) if is_made else None
        for is_made in (branch is not None and keep, norm is not None and rounding is None)
    )
    row_scales = None
    if norm is not None and rounding is not None:
        h, row_scales = room_for(batch, tokens, width, x_BlE.device)
    of = norm or Norm()
    if batch * tokens:
        adaln_kernel[tokens, batch](
            x_BlE,
            branch,
            second,
            *(each for each, _ in vectors),
            *(shared for _, shared in vectors),
            index,
            of.weight,
            _weight(branch_norm),
            x_new,
            h,
            None if rounding is None else rounding.centre_E,
            row_scales,
            tokens,
            of.eps,
            0.0 if branch_norm is None else branch_norm.eps,
            *strides,
            E=width,
            BLOCK=1 << (width - 1).bit_length(),
            UNIT=unit,
            CENTRE=of.kind == "layer",
            num_warps=warps_for(width, 32 if branch is None else 24),  # as measured
            enable_fp_fusion=True,
        )
    stream: Tensor = x_BlE if x_new is None else x_new
    if h is None:
        return stream, stream
    if rounding is None or row_scales is None:
        return stream, h
    return stream, Rows8(h, row_scales, rounding, x_BlE.dtype)


def _terms(branch: Branch | tuple[()]) -> tuple[Tensor, ...]:
    return (branch,) if isinstance(branch, Tensor) else branch


def _weight(norm: BranchNorm | None) -> Tensor | None:
    return None if norm is None else norm.weight_E


def _rows(vectors: Vectors | None, rows: int | None, width: int) -> tuple[Tensor | None, Tensor | None]:
    """Return the vectors (rows, E) and the vector that they share; either may be None.

    rows: the number of batch rows. None: an index picks the rows; where there is only one, each index picks it.
    """
    if vectors is None:
        return None, None
    each, shared = vectors if isinstance(vectors, Summed) else (vectors, None)
    if shared is not None and (shared.shape != (width,) or shared.stride(0) != 1):
        raise ValueError(f"got a shared vector of shape {tuple(shared.shape)}, expected a contiguous one of {width}")
    count = 2 if len(each) == 1 else len(each)  # expanded to more rows than one, the only row has a stride of 0
    return each.expand(count if rows is None else rows, width), shared


@jit
def _vector(pointer, shared, row, col, inside):
    # every program of a batch row reads the vectors, so they should stay in L1
    vector = tl.load(pointer + row + col, inside, 0.0, eviction_policy="evict_last").to(tl.float32)
    if shared is not None:
        vector += tl.load(shared + col, inside, 0.0, eviction_policy="evict_last").to(tl.float32)
    return vector


@jit
def _stream(pointer, col, inside):
    # a stream is read only once, so it should not evict the vectors from L1
    return tl.load(pointer + col, inside, 0.0, eviction_policy="evict_first").to(tl.float32)


@jit(do_not_specialize=["tokens"])  # one program for all numbers of tokens
def adaln_kernel(
    x,
    branch,
    second,
    gate,
    shift,
    scale,
    gate_shared,
    shift_shared,
    scale_shared,
    index,
    weight,
    branch_weight,
    x_new,
    h,
    centre,
    row_scales,
    tokens,
    eps,
    branch_eps,
    x_batch,
    x_token,
    branch_batch,
    branch_token,
    second_batch,
    second_token,
    gate_row,
    shift_row,
    scale_row,
    E: tl.constexpr,
    BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
    CENTRE: tl.constexpr,
):
    # a program keeps a whole row in registers, in one layout for all tensors: threads exchange only the two sums
    token, batch = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    col = tl.arange(0, BLOCK)
    inside = col < E
    here = (batch * tokens + token) * E + col
    number = batch if index is None else tl.load(index + batch * tokens + token).to(tl.int64)
    row = _stream(x + (batch * x_batch + token * x_token) * UNIT, col, inside)
    if branch is not None:
        gate_E = _vector(gate, gate_shared, number * gate_row * UNIT, col, inside)
        other = _stream(branch + (batch * branch_batch + token * branch_token) * UNIT, col, inside)
        if second is not None:
            other += _stream(second + (batch * second_batch + token * second_token) * UNIT, col, inside)
        if branch_weight is not None:
            other *= tl.rsqrt(tl.sum(other * other, 0) / E + branch_eps)
            other *= _vector(branch_weight, None, 0, col, inside)
        row += gate_E * other
        if x_new is not None:
            tl.store(x_new + here, row.to(x_new.dtype.element_ty), inside)
    if h is not None:
        if CENTRE:
            row = tl.where(inside, row - tl.sum(row, 0) / E, 0.0)
        # the variance is a sum of squared differences from the mean: a difference of two large sums would cancel
        row *= tl.rsqrt(tl.sum(row * row, 0) / E + eps)
        # shift, scale and weight are read only now: kept in registers during the sums, they leave room for fewer rows
        shift_E = _vector(shift, shift_shared, number * shift_row * UNIT, col, inside)
        scale_E = _vector(scale, scale_shared, number * scale_row * UNIT, col, inside) + 1.0
        if weight is not None:
            row *= _vector(weight, None, 0, col, inside)
        row = row * scale_E + shift_E
        if row_scales is not None:
            write_rounded(row, centre, h, row_scales, here, batch * tokens + token, col, inside)
        else:
            tl.store(h + here, row.to(h.dtype.element_ty), inside)
