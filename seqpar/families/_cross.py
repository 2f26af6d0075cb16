"""A block of one stream that attends to itself, then to tokens that every rank holds whole, and then passes an MLP.

Its modulation is its own table, (n, E), to which vectors of the timestep are added that all blocks share. So there
is no product to spread over the ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seqpar.families._block import EIGHT, BlockCall, Matrix, reads_next
from seqpar.kernels.adaln import Norm, Summed, Vectors, added, gate_norm_modulate
from seqpar.types.facts import Blocks, Cross, Gemms, Work
from seqpar.types.protocols import state_dtype

CROSS_EIGHT = (*EIGHT, "text q", "text out")  # the text's keys and values are of few tokens


class Modulation(NamedTuple):
    """The vectors of all blocks, and the row of a token among them, (B, l), or None.

    They are shift, scale and gate of attention, then of the MLP, and further parts of a family.
    """

    every: Sequence[Sequence[Vectors]]
    of_token: Tensor | None


def tabled(tables: Sequence[Tensor], temb: Tensor) -> Modulation:
    """Return the vectors of all blocks, whose tables are added to temb, in fp32 (or fp64).

    tables: (n, E) of each block, or (1, n, E). temb: (B, n, E), or (B, l, n, E) where each token has its own timestep:
    sums of all tokens would be as large as a few streams for each block, so that kernels add them.
    """
    wide = state_dtype(temb.dtype)
    whole = [table.to(wide).view(1, *temb.shape[-2:]) for table in tables]
    if temb.dim() == 3:
        return Modulation([rows.unbind(1) for rows in (torch.stack(whole) + temb.to(wide)).unbind(0)], None)
    batch, tokens = temb.shape[:2]
    each = temb.flatten(0, 1).unbind(1)
    every = [[Summed(x, shared) for x, shared in zip(each, table[0], strict=True)] for table in whole]
    return Modulation(every, torch.arange(batch * tokens, dtype=torch.int32, device=temb.device).view(batch, tokens))


def constant(call: BlockCall, value: float, x_BlE: Tensor) -> Tensor:
    """Return a vector (1, E) of one value, made once per forward."""
    dtype, width = state_dtype(x_BlE.dtype), x_BlE.shape[-1]
    return call.once(f"{value} {width}", None, lambda: x_BlE.new_full((1, width), value, dtype=dtype), shared=True)


def to_whole(
    call: BlockCall, q_BlHD: Tensor, tokens_BLE: Tensor, kv: Matrix, k_norm: Any, mask_BL: Tensor | None = None
) -> Tensor:
    """Return attention (B, l, H, D) to tokens that every rank holds whole, with a norm of keys over the whole width."""
    k, v = kv(tokens_BLE).chunk(2, dim=-1)
    heads = (q_BlHD.shape[2], -1)
    return call.local(q_BlHD, k_norm(k).unflatten(2, heads), v.unflatten(2, heads), mask_BL)


def finished(
    call: BlockCall,
    x_BlE: Tensor,
    branch_BlE: Tensor,
    modulation: Modulation,
    norm: Norm,
    before: Vectors | None = None,
    mlp: tuple[str, str] = ("up", "down"),
    readers: Sequence[str] = ("qkv",),
) -> Tensor:
    """Return the stream after attention to whole tokens, the branch, and after the MLP.

    before: the gate of the branch, where it has one. mlp: the names of the MLP's matrices. readers: the names
    of the matrices that read the next block's input.
    """
    every, index = modulation
    shift, scale, gate = every[call.index][3:6]
    one = constant(call, 1.0, x_BlE) if before is None else before
    up, down = (call.matrices[name] for name in mlp)
    x, h = gate_norm_modulate(x_BlE, one, branch_BlE, shift, scale, norm, index_Bl=index, rounding=up.rounding)
    branch = down(up.gelu(h, down))
    if call.index + 1 == len(every):
        return added(x, gate, branch, index_Bl=index)
    shift, scale, *_ = every[call.index + 1]
    rounding = reads_next(call, *readers)
    x, h = gate_norm_modulate(x, gate, branch, shift, scale, norm, index_Bl=index, rounding=rounding)
    call.hand_over(x, h)
    return x


def crossed_work(config: Mapping[str, Any], hidden: int, area: int, text: int, sizes: Gemms) -> Work:
    """Return the operations of blocks that attend to the video, then to a text that is whole on every rank.

    hidden: the width of the MLP. area: values of a channel in a token. text: tokens of the text. sizes: those of the
    layers that embed the text, then the timestep.
    """
    heads, dim, layers = config["num_attention_heads"], config["attention_head_dim"], config["num_layers"]
    width, outputs = heads * dim, config.get("out_channels") or config["in_channels"]
    gemms = ((width, 3 * width), (width, width), (width, width), (width, width), (width, hidden), (hidden, width))
    passes, cross = (4 * width,) * 3, Cross(text, ((width, 2 * width),))
    of_text, of_time = sizes
    return Work(
        width=width,
        heads=heads,
        kv_heads=heads,
        head_dim=dim,
        blocks=(Blocks(layers, gemms, passes, cross=cross),),
        prepares=True,
        once=((config["in_channels"] * area, width), (width, outputs * area)),
        table=6 * width * layers + 2 * width,
        live=4 * width + 2 * hidden,
        text=(of_text, (width, width)),
        conditioning=(of_time, (width, width), (width, 6 * width)),
    )
