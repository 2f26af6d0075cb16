"""Rows in 8 bits (e4m3) with a scale each, and their product with a matrix in 8 bits.

    x ~ scale * values + centre,    x W^T ~ scale * weight_scale * (values weight^T) + centre W^T

Tensor cores of Hopper do not accumulate products of e4m3 in full fp32: sums of one sign are truncated, and inputs with
a mean lose 1 to 4 % of it. So a fixed vector, the mean of each input channel, is taken out before rounding, and its
product, in full precision, is added with the bias. The pass that rounds also applies the activation before it: it reads
a row once, keeps it in registers, and writes a byte a number. A row's bits do not depend on other rows.
Source: FP8 formats (arXiv 2209.05433).
"""

# pyright: reportPossiblyUnboundVariable=false
# (kernels branch only on values that are known at compile time)

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from seqpar.kernels._triton import contiguous_rows, fused, in_units, jit, tl, warps_for
from seqpar.kernels.activations import reference_gelu, reference_swiglu, tanh_gelu
from seqpar.types.protocols import state_dtype

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0  # in e4m3
INVERSE = 1 / LARGEST  # torch divides by a number so on a GPU, but not on a CPU
FEWEST = 64  # rows of a product with fast sums on GPUs; a row's bits do not depend on their number
Activation = Literal["gelu", "swiglu", "swiglu, gate last"]

CASES: tuple[dict[str, int], ...] = (
    {"batch": 1, "tokens": 1, "width": 384, "pad": 0},
    {"batch": 2, "tokens": 5, "width": 1152, "pad": 0},
    {"batch": 3, "tokens": 7, "width": 40, "pad": 8},
    {"batch": 2, "tokens": 4, "width": 1544, "pad": 0},  # only 8 divides it
    {"batch": 1, "tokens": 21, "width": 384, "pad": 384},
    {"batch": 1, "tokens": 3, "width": 12288, "pad": 0},
)
"""Shapes that tests use; width: E, of the result."""


class Rounding(NamedTuple):
    """How the input of a product is rounded: a centre (E,) in fp32, or None where none is known."""

    centre_E: Tensor | None

    def equals(self, other: Rounding) -> bool:
        """Compare centres by value; it waits for the GPU."""
        if self.centre_E is None or other.centre_E is None:
            return self.centre_E is other.centre_E
        return torch.equal(self.centre_E, other.centre_E)


class Rows8(NamedTuple):
    """Rows x ~ scales * values + a centre that the product's bias contains; values (B, l, E) e4m3, scales (B, l, 1).

    The scales are in fp32. rounding: how they were rounded. dtype: of x, and of what a product returns.
    """

    values: Tensor
    scales: Tensor
    rounding: Rounding
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def wide(self) -> Tensor:
        """Return x less its centre in fp64, (B, l, E)."""
        return self.values.double() * self.scales.double()


def round_rows(x_BlE: Tensor, rounding: Rounding, activation: Activation | None = None, *, times: float = 1.0) -> Rows8:
    """Return x, or GELU (tanh formula) or SwiGLU of x, in 8 bits; x is (B, l, E), for SwiGLU (B, l, 2 E).

    times: a factor of the rows less the centre, which their scales take.
    """
    chosen = launch if fused(x_BlE) else reference
    return chosen(x_BlE, rounding, activation, times)


def reference(x_BlE: Tensor, rounding: Rounding, activation: Activation | None = None, times: float = 1.0) -> Rows8:
    x = x_BlE.to(state_dtype(x_BlE.dtype))
    if activation is not None:
        last = activation == "swiglu, gate last"
        x = reference_gelu(x, None) if activation == "gelu" else reference_swiglu(x, gate_last=last)
    rows = rounded_rows(x, rounding, x_BlE.dtype)
    return rows._replace(scales=times * rows.scales)


def rounded_rows(x_BlE: Tensor, rounding: Rounding, dtype: torch.dtype) -> Rows8:
    """Return rows less the centre in 8 bits, with torch's functions; dtype: of what a product of them returns."""
    x = x_BlE if rounding.centre_E is None else x_BlE - rounding.centre_E.to(x_BlE.dtype)
    return Rows8(*rounded(x), rounding, dtype)


def rounded(x_RE: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows in e4m3 and the scale of each in fp32, (..., 1), with torch's functions: also weights' rows."""
    scales = (x_RE.abs().amax(-1, keepdim=True) * INVERSE).float()
    scales = torch.where(scales == 0, 1.0, scales)
    return (x_RE / scales).to(E4M3), scales


def room_for(batch: int, tokens: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return room for rows in e4m3, (batch, tokens, width), and for their scales, (batch, tokens, 1).

    The memory behind has room for `FEWEST` rows: a product reads that many in place, whatever the further ones are.
    """
    rows = batch * tokens
    sizes = ((width, E4M3), (1, torch.float32))
    rooms = (torch.empty((max(rows, FEWEST), size), dtype=dtype, device=device) for size, dtype in sizes)
    values, scales = (room[:rows].view(batch, tokens, room.shape[1]) for room in rooms)  # -1 fails without tokens
    return values, scales


def at_least(rows: int, x_RE: Tensor) -> Tensor:
    """Return x and more rows of any numbers: those behind it in memory, or a copy with zeros if these are too few."""
    held = x_RE.untyped_storage().nbytes() // x_RE.element_size() - x_RE.storage_offset()
    if held >= rows * x_RE.shape[1]:
        return x_RE.as_strided((rows, x_RE.shape[1]), (x_RE.shape[1], 1))
    return F.pad(x_RE.view(torch.uint8), (0, 0, 0, rows - len(x_RE))).view(x_RE.dtype)


def launch(x_BlE: Tensor, rounding: Rounding, activation: Activation | None = None, times: float = 1.0) -> Rows8:
    """Run the kernel: what `reference` returns, in new contiguous tensors. x needs only a contiguous last dim."""
    (batch, tokens, width), centre = x_BlE.shape, rounding.centre_E
    width = width if activation in (None, "gelu") else width // 2
    contiguous_rows(x_BlE, centre)
    unit, strides = in_units([*x_BlE.stride()[:2]], width)
    values, scales = room_for(batch, tokens, width, x_BlE.device)
    if values.numel():
        rows8_kernel[tokens, batch](
            x_BlE,
            centre,
            values,
            scales,
            times,
            tokens,
            *strides,
            E=width,
            BLOCK=1 << (width - 1).bit_length(),
            UNIT=unit,
            ACTIVATION=activation or "",
            num_warps=warps_for(width, 32),
            enable_fp_fusion=True,
        )
    return Rows8(values, scales, rounding, x_BlE.dtype)


@jit
def write_rounded(row, centre, values, scales, here, number, col, inside, times=1.0):
    """Write one row, less the centre, in e4m3, and its scale; used by every kernel that ends in a product of 8 bits."""
    if centre is not None:
        row -= tl.load(centre + col, inside, 0.0, eviction_policy="evict_last")
    row = tl.where(inside, row, 0.0)
    scale = tl.max(tl.abs(row / 448.0), 0)
    scale = tl.where(scale == 0.0, 1.0, scale)
    tl.store(scales + number, scale * times)
    tl.store(values + here, (row / scale).to(values.dtype.element_ty), inside)


@jit(do_not_specialize=["tokens"])  # one program for all numbers of tokens
def rows8_kernel(
    x,
    centre,
    values,
    scales,
    times,
    tokens,
    x_batch,
    x_token,
    E: tl.constexpr,
    BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    token, batch = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    col = tl.arange(0, BLOCK)
    inside, number = col < E, batch * tokens + token
    x += (batch * x_batch + token * x_token) * UNIT
    row = tl.load(x + col, inside, 0.0, eviction_policy="evict_first").to(tl.float32)
    if ACTIVATION == "gelu":
        row = tanh_gelu(row)
    if ACTIVATION == "swiglu" or ACTIVATION == "swiglu, gate last":
        up = tl.load(x + E + col, inside, 0.0, eviction_policy="evict_first").to(tl.float32)
        if ACTIVATION == "swiglu, gate last":
            row, up = up, row
        row = row / (1.0 + tl.exp(-row)) * up
    write_rounded(row, centre, values, scales, number * E + col, number, col, inside, times)


def product8(
    x: Rows8, weight_FE: Tensor, scales_F: Tensor, bias_F: Tensor | None = None, *, fast: bool = False
) -> Tensor:
    """Return x W^T + bias, (B, l, F), in x's dtype; weight: e4m3, scales: fp32, one for each of its rows.

    fast: let tensor cores keep the whole sum, which is faster; otherwise it is added to fp32 registers every 128
    numbers. On a CPU the sum is exact: its terms are multiples of 2^-18 below 2^18, so that fp64 holds it.
    """
    batch, tokens, inner = x.shape
    if weight_FE.is_cuda:
        values_RE, scales_R1 = x.values.view(-1, inner), x.scales.view(-1, 1)
        # cuBLAS has no such product of fewer rows than 48 where they are 12,288 wide, and none of no rows
        if batch * tokens < (FEWEST if fast else 1):
            values_RE, scales_R1 = at_least(FEWEST, values_RE), at_least(FEWEST, scales_R1)
        out = torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
            values_RE,
            weight_FE.t(),
            scales_R1,
            scales_F.view(1, -1),
            bias=bias_F,
            out_dtype=x.dtype,
            use_fast_accum=fast,
        )
        return out[: batch * tokens].view(batch, tokens, len(weight_FE))
    sums = x.values.double() @ weight_FE.double().t()
    out = sums * x.scales.double() * scales_F.double()
    return (out if bias_F is None else out + bias_F.double()).to(x.dtype)
