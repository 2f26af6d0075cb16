"""adaLN between the matrix products: add a gated branch to the residual stream, normalise and modulate, in one pass.

When it wins: always on a GPU. The kernel is bound by memory: it reads and writes each stream once (4 bytes for each
element of a bf16 stream to normalise, 8 with a gated branch), where plain torch makes about ten passes, half of them in
fp32. It computes in fp32 (fp64 for fp64) and rounds each result once. A row's bits do not depend on the number of rows.
Source: adaLN-Zero, DiT (arXiv 2212.09748).
"""

# pyright: reportPossiblyUnboundVariable=false
# (kernels branch only on values that are known at compile time)

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from seqpar.kernels._triton import fused, jit, tl
from seqpar.types.protocols import state_dtype


@dataclass(frozen=True)
class Norm:
    """A norm over the width: LayerNorm or RMSNorm, with or without a weight (E,)."""

    kind: Literal["layer", "rms"] = "layer"
    eps: float = 1e-6
    weight: Tensor | None = None


class Gated(NamedTuple):
    """A branch (B, l, E) and its gate (B, E), whose product is added to the stream before the norm."""

    gate_BE: Tensor
    branch_BlE: Tensor


class Tile(NamedTuple):
    """How rows are distributed over programs. rows: rows of a program, one after the other; warps: warps of a program.

    late: shift, scale and weight are read after the sums, from L1, instead of being kept in registers. This leaves room
    for more rows at a time (ptxas counts 64 registers a thread, not 127, at width 4096 with 4 warps).
    A row's bits depend on the number of warps only.
    """

    rows: int
    warps: int
    late: bool = False


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


def norm_modulate(x_BlE: Tensor, shift_BE: Tensor, scale_BE: Tensor, norm: Norm) -> Tensor:
    """Return norm(x) * (1 + scale) + shift in x's dtype; x is (B, l, E), shift and scale are (B, E)."""
    chosen = launch if fused(x_BlE, shift_BE, scale_BE, norm.weight) else reference
    return chosen(x_BlE, None, shift_BE, scale_BE, norm)[1]


def gate_norm_modulate(
    x_BlE: Tensor,
    gate_BE: Tensor,
    branch_BlE: Tensor,
    shift_BE: Tensor,
    scale_BE: Tensor,
    norm: Norm,
    *,
    keep: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return x + gate * branch and its `norm_modulate`, both in x's dtype; the norm sees the sum before it is rounded.

    keep=False is for the last layer, after which nothing reads the stream: the sum is not written, and x itself is
    returned instead.
    """
    gated = Gated(gate_BE, branch_BlE)
    chosen = launch if fused(x_BlE, gate_BE, branch_BlE, shift_BE, scale_BE, norm.weight) else reference
    return chosen(x_BlE, gated, shift_BE, scale_BE, norm, keep=keep)


def reference(
    x_BlE: Tensor, gated: Gated | None, shift_BE: Tensor, scale_BE: Tensor, norm: Norm, *, keep: bool = True
) -> tuple[Tensor, Tensor]:
    """Return the stream after the gated branch and its normalised, modulated form, in plain torch."""
    wide = x_BlE.to(state_dtype(x_BlE.dtype))
    if gated is not None:
        wide = wide + gated.gate_BE[:, None] * gated.branch_BlE
    weight = None if norm.weight is None else norm.weight.to(wide.dtype)
    if norm.kind == "layer":
        normed = F.layer_norm(wide, wide.shape[-1:], weight, eps=norm.eps)
    else:
        normed = F.rms_norm(wide, wide.shape[-1:], weight, norm.eps)
    h = (normed * (1 + scale_BE[:, None]) + shift_BE[:, None]).to(x_BlE.dtype)
    return (wide.to(x_BlE.dtype) if gated is not None and keep else x_BlE), h


def tile(width: int, gated: bool) -> Tile:
    """Return the tile for a width, whatever the number of rows.

    As measured: the fewest warps with which a thread has at most 24 elements if two streams are read, 32 if one is.
    """
    warps = 1
    while warps < 16 and width > 32 * warps * (24 if gated else 32):
        warps *= 2
    return Tile(1, warps, late=True)


def launch(
    x_BlE: Tensor,
    gated: Gated | None,
    shift_BE: Tensor,
    scale_BE: Tensor,
    norm: Norm,
    *,
    keep: bool = True,
    tiled: Tile | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the kernel: what `reference` returns, in new contiguous tensors. Inputs need only a contiguous last dim."""
    batch, tokens, width = x_BlE.shape
    gate, branch = gated or (None, None)
    vectors = [x if x is None else x.expand(batch, width) for x in (gate, shift_BE, scale_BE)]
    branch = None if branch is None else branch.expand(batch, tokens, width)
    unit, strides = _strides(width, x_BlE, branch, *vectors)
    h = torch.empty((batch, tokens, width), dtype=x_BlE.dtype, device=x_BlE.device)
    x_new = torch.empty_like(h) if branch is not None and keep else None
    rows, warps, late = tiled or tile(width, branch is not None)
    constants = {"E": width, "BLOCK": block(width), "ROWS": rows, "UNIT": unit, "CENTRE": norm.kind == "layer"}
    if h.numel():
        grid = (-(-tokens // rows), batch)
        adaln_kernel[grid](
            x_BlE,
            branch,
            *vectors,
            norm.weight,
            x_new,
            h,
            tokens,
            norm.eps,
            *strides,
            **constants,
            LATE=late,
            num_warps=warps,
            enable_fp_fusion=True,
        )
    return (x_BlE if x_new is None else x_new), h


def block(width: int) -> int:
    return 1 << (width - 1).bit_length()


def _strides(width: int, x_BlE: Tensor, branch_BlE: Tensor | None, *vectors: Tensor | None) -> tuple[int, list[int]]:
    """Return a unit, and in this unit the batch and token strides of the streams and the batch strides of the vectors.

    The unit is 8 elements if 8 divides the width and all strides, otherwise 1. With a unit of 8 the compiler knows that
    rows are aligned to 16 bytes.
    """
    strides: list[int] = []
    for tensor in (x_BlE, branch_BlE, *vectors):
        if tensor is not None and tensor.stride(-1) != 1 and width > 1:
            raise ValueError(f"got strides {tensor.stride()}, expected a contiguous last dim: adaLN copies nothing")
    for stream in (x_BlE, branch_BlE):
        strides += [0, 0] if stream is None else stream.stride()[:2]
    strides += [0 if vector is None else vector.stride(0) for vector in vectors]
    unit = 1 if width % 8 or any(stride % 8 for stride in strides) else 8
    return unit, [stride // unit for stride in strides]


@jit
def _vector(pointer, col, inside):
    # every program of a batch row reads the vectors, so they should stay in L1
    return tl.load(pointer + col, inside, 0.0, eviction_policy="evict_last").to(tl.float32)


@jit
def _stream(pointer, col, inside):
    # a stream is read only once, so it should not evict the vectors from L1
    return tl.load(pointer + col, inside, 0.0, eviction_policy="evict_first").to(tl.float32)


@jit
def _modulation(shift, scale, col, inside):
    return _vector(shift, col, inside), _vector(scale, col, inside) + 1.0


@jit
def adaln_kernel(
    x,
    branch,
    gate,
    shift,
    scale,
    weight,
    x_new,
    h,
    tokens,
    eps,
    x_batch,
    x_token,
    branch_batch,
    branch_token,
    gate_batch,
    shift_batch,
    scale_batch,
    E: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    UNIT: tl.constexpr,
    CENTRE: tl.constexpr,
    LATE: tl.constexpr,
):
    # a program keeps a whole row in registers, in one layout for all tensors: threads exchange only the two sums
    batch = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * ROWS
    col = tl.arange(0, BLOCK)
    inside = col < E
    shift += batch * shift_batch * UNIT
    scale += batch * scale_batch * UNIT
    if not LATE:
        shift_E, scale_E = _modulation(shift, scale, col, inside)
        weight_E = None if weight is None else _vector(weight, col, inside)
    gate_E = None if branch is None else _vector(gate + batch * gate_batch * UNIT, col, inside)
    for index in range(ROWS):
        # past the end the last row is computed again, with the same bits; a mask that varies by row would cost more
        token = tl.minimum(first + index, tokens - 1).to(tl.int64)
        row = _stream(x + (batch * x_batch + token * x_token) * UNIT, col, inside)
        here = (batch * tokens + token) * E + col
        if branch is not None:
            row += gate_E * _stream(branch + (batch * branch_batch + token * branch_token) * UNIT, col, inside)
            if x_new is not None:
                tl.store(x_new + here, row.to(x_new.dtype.element_ty), inside)
        if CENTRE:
            row = tl.where(inside, row - tl.sum(row, 0) / E, 0.0)
        # the variance is a sum of squared differences from the mean: a difference of two large sums would cancel
        row *= tl.rsqrt(tl.sum(row * row, 0) / E + eps)
        if LATE:
            shift_E, scale_E = _modulation(shift, scale, col, inside)
            weight_E = None if weight is None else _vector(weight, col, inside)
        if weight is not None:
            row *= weight_E
        tl.store(h + here, (row * scale_E + shift_E).to(h.dtype.element_ty), inside)
