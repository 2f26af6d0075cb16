"""Attention at head dims over 256, as in the mid blocks of VAEs: weights by a kernel, then a product with v by cuBLAS.

Used on Hopper in fp16 and bf16 at every head dim that flash kernels do not take. The memory-efficient kernel,
which is what torch has for them, keeps a small tile of the output in registers and reads k and v many times. Here both
matrix products run in large tiles; the weights between them are written and read once, 4 bytes against 4 x D FLOP.
Blocks of queries and parts of the keys bound the memory: the weights take about 0.5 GiB at most.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from seqpar.kernels import softmax_weights
from seqpar.kernels.softmax_weights import SoftmaxWeights, Tile

OVER = 256  # up to this head dim there are flash kernels
MOST = 9 << 25  # elements of the weights that are computed at once, unless one wave of programs needs more
PARTS, SHORTEST, LONGEST = 8, 1024, 16384  # parts of the keys, and the least and most keys of a part
WAVES = 4  # a wave of programs is this many parts of a block of queries


@dataclass(frozen=True)
class Tiling:
    """How the work is cut: queries of a block, keys of a part, and the parts whose weights are computed at once."""

    queries: int
    span: int
    together: int


def why_not(device: torch.device, dtype: torch.dtype, head_dim: int, mask: bool = False) -> str | None:
    if device.type != "cuda":
        return "needs a GPU"
    if mask:
        return "takes no key masks"
    if dtype not in softmax_weights.ROOM:
        return f"takes fp16 and bf16, not {dtype}"
    if head_dim <= OVER or head_dim % 8:
        return f"head dim {head_dim} is not a multiple of 8 over {OVER}"
    return None if torch.cuda.get_device_capability(device) >= (9, 0) else "needs a Hopper GPU or later"


def preference(major: int, head_dim: int) -> int:
    # before `sdpa` on Hopper, else after it
    return 2 if major == 9 and head_dim > OVER else 0


def invariant(device: torch.device, dtype: torch.dtype, head_dim: int, mask: bool = False) -> str | None:
    return "the product with the values chooses its tiles by row counts"


def attend(q_BLHD: Tensor, k_BLGD: Tensor, v_BLGD: Tensor, mask_BL: Tensor | None = None, /) -> tuple[Tensor, Tensor]:
    """Compute attention as `protocols.Core` says, a head at a time, without copies for grouped-query heads.

    Raises `ValueError` if a mask is given.
    """
    if mask_BL is not None:
        raise ValueError("local attention wide does not support key masks; use local attention sdpa")
    units = torch.cuda.get_device_properties(q_BLHD.device).multi_processor_count
    tile = Tile()
    return attend_in(q_BLHD, k_BLGD, v_BLGD, tile, blocks(k_BLGD.shape[1], tile, units))


def blocks(keys: int, tile: Tile, units: int) -> Tiling:
    """Cut the work for a GPU of so many multiprocessors, so that each runs one program at a time."""
    tiles = -(-keys // tile.keys)
    least = max(1, units // WAVES) * tile.rows
    queries = least * min(max(1, MOST // (least * tiles * tile.keys)), WAVES)
    parts = _parts(tiles, tile)
    span = -(-tiles // parts) * tile.keys
    calls = -(-parts // max(WAVES, MOST // (queries * span)))
    return Tiling(queries, span, -(-parts // calls))


def _parts(tiles: int, tile: Tile) -> int:
    """Choose the number of parts, about PARTS, so that the last one is not much shorter than the others."""
    most = max(min(PARTS, tiles * tile.keys // SHORTEST), 1)
    wished = range(max(most // 2, 1), most + 1)
    best = min(wished, key=lambda parts: (-(-tiles // parts) * parts - tiles, -parts))
    span = min(-(-tiles // best), LONGEST // tile.keys)
    return -(-tiles // span)


def attend_in(q_BLHD: Tensor, k_BLGD: Tensor, v_BLGD: Tensor, tile: Tile, cut: Tiling) -> tuple[Tensor, Tensor]:
    batch, tokens, heads, dim = q_BLHD.shape
    out_BLHD = q_BLHD.new_empty(batch, tokens, heads, dim)
    lse_BHL = torch.empty(batch, heads, tokens, dtype=torch.float32, device=q_BLHD.device)
    group = heads // k_BLGD.shape[2]
    for row in range(batch):
        for head in range(heads):
            q, k, v = q_BLHD[row, :, head], k_BLGD[row, :, head // group], v_BLGD[row, :, head // group]
            inputs = softmax_weights.aligned(q), softmax_weights.aligned(k), softmax_weights.aligned(v)
            for first in range(0, tokens, cut.queries):
                some = slice(first, first + cut.queries)
                into = out_BLHD[row, some, head], lse_BHL[row, head, some]
                _attend_block((inputs[0][some], *inputs[1:]), into, tile, cut)
    return out_BLHD, lse_BHL


def _attend_block(qkv: tuple[Tensor, Tensor, Tensor], into: tuple[Tensor, Tensor], tile: Tile, cut: Tiling) -> None:
    q_RD, k_KD, v_KD = qkv
    rows, keys = q_RD.shape[0], k_KD.shape[0]
    parts = -(-keys // cut.span)
    buffer_PRS = q_RD.new_empty(rows, min(parts, cut.together), cut.span).transpose(0, 1)
    sums_3PR = torch.empty(3, parts, rows, dtype=torch.float32, device=q_RD.device)
    product_PRD = torch.empty(parts, *q_RD.shape, dtype=torch.float32, device=q_RD.device)
    for first in range(0, parts, cut.together):
        some = slice(first, first + cut.together)
        at = slice(first * cut.span, (first + cut.together) * cut.span)
        here = SoftmaxWeights(buffer_PRS[: parts - first], *sums_3PR[:, some])
        softmax_weights.write(q_RD, k_KD[at], here, tile)
        _multiply(here.weights_PRS, v_KD[at], product_PRD[some])
    softmax_weights.combine(product_PRD, sums_3PR, *into)


def _multiply(weights_PRS: Tensor, v_KD: Tensor, into_PRD: Tensor) -> None:
    """Multiply each part's weights by its values, in fp32; the last part may have fewer keys than the others."""
    parts, _, span = weights_PRS.shape
    whole = v_KD.shape[0] // span
    if whole:
        _product(weights_PRS[:whole], v_KD[: whole * span].unflatten(0, (whole, span)), into_PRD[:whole])
    if whole < parts:
        rest = v_KD[whole * span :]
        _product(weights_PRS[whole:, :, : rest.shape[0]], rest[None], into_PRD[whole:])


def _product(a_PRS: Tensor, b_PSD: Tensor, into_PRD: Tensor) -> None:
    """Write a b in fp32; torch has the product of 2-byte inputs into fp32 on GPUs only."""
    if a_PRS.is_cuda:
        torch.bmm(a_PRS, b_PSD, out_dtype=torch.float32, out=into_PRD)
    else:
        torch.bmm(a_PRS.float(), b_PSD.float(), out=into_PRD)
