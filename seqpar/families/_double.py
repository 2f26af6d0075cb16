"""Blocks of two streams, text and image, and parallel blocks.

A double block has own layers of the same form for each stream, whose attention reads both: adaLN before attention and
before its MLP, and a gate after each. Families name their matrices "text ..." and "image ..." with the words below, and
pass the two streams in the order in which their attention joins them. A parallel block has attention and an MLP side by
side, from the same input into the same gated branch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from seqpar.families._block import EIGHT, BlockCall, DeclinedError, Input, Matrix, reads_next
from seqpar.kernels.adaln import Branch, Norm, added, gate_norm_modulate, norm_modulate
from seqpar.kernels.rows8 import Rounding
from seqpar.types.facts import Blocks
from seqpar.types.protocols import Given, Prepare, Projected, state_dtype

NAMES = ("text", "image")
DOUBLE_EIGHT = tuple(f"{stream} {name}" for stream in NAMES for name in EIGHT)
PARALLEL_EIGHT = ("qkv", "up", "out")
# the layers of each matrix by the names that most of diffusers' blocks have
DOUBLE_LAYERS = {
    "text modulation": ("norm1_context.linear",),
    "text qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
    "text out": ("attn.to_add_out",),
    "text up": ("ff_context.net.0.proj",),
    "text down": ("ff_context.net.2",),
    "image modulation": ("norm1.linear",),
    "image qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "image out": ("attn.to_out.0",),
    "image up": ("ff.net.0.proj",),
    "image down": ("ff.net.2",),
}
PARALLEL_LAYERS = {
    "modulation": ("norm.linear",),
    "qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "up": ("proj_mlp",),
    "out": ("proj_out",),  # the columns of attention, then the columns of the MLP
}
LARGEST = 65504.0  # in fp16, to which diffusers clips what a block returns

Rows = tuple[Tensor, ...]
"""The modulation of one stream in one block: shift, scale and gate of attention, then those of the MLP, (B, E) each.

Shift and scale alone: attention reads the stream, and the block changes nothing of it."""

Indices = tuple[Tensor | None, Tensor | None]
"""For each stream: which row of its modulation each token has, (B, l) int32; None: that of its batch row."""

Inputs = tuple[Input | None, Input | None]
"""For each stream: the input of attention (B, l, E), if the family has made it already."""


MLP = Callable[[Matrix, Matrix, Input], Tensor]
"""Computes an MLP of its two layers and its input (B, l, E)."""


def gelu_mlp(up: Matrix, down: Matrix, h_BlE: Input) -> Tensor:
    """Return an MLP with GELU, (B, l, E)."""
    return down(up.gelu(h_BlE, down))


def modulations(
    call: BlockCall, temb_BE: Tensor, names: Sequence[str], width: int | None = None, activate: bool = True
) -> list[list[Rows]]:
    """Return the rows of every block of this class and of its matrices of these names, in fp32 (or fp64).

    A matrix makes some vectors (B, E). width: E, if it is not that of temb. activate: whether the layers read SiLU of
    temb. Each rank reads some of the weights, with the same bits as one that reads all.
    """
    layers = [matrices[name] for matrices in call.all_matrices for name in names]
    c_BE, use = F.silu(temb_BE) if activate else temb_BE, f"modulation of {len(layers)} layers"
    made = call.spread(use, [layer.outputs for layer in layers], lambda index: layers[index].wide(c_BE))
    biases = [layer.bias_or_zeros() for layer in layers]
    rows = torch.cat([*made], dim=1) + torch.cat(biases)  # one addition: one per layer is 0.4 ms of FLUX.1's call
    chunks = [one.split(width or temb_BE.shape[1], dim=-1) for one in rows.split([x.shape[1] for x in made], dim=1)]
    return [chunks[index : index + len(names)] for index in range(0, len(chunks), len(names))]


def two_streams(
    call: BlockCall,
    streams: tuple[Tensor, Tensor],
    every: Sequence[Sequence[Rows]],
    prepares: Mapping[str, Prepare],
    heads: int,
    norm: Norm,
    mlp: MLP = gelu_mlp,
    indices: Indices = (None, None),
    inputs: Inputs = (None, None),
) -> tuple[Tensor, Tensor]:
    """Return both streams (B, l, E) after a block.

    every: the rows of all blocks, for each stream. prepares: name of a stream -> the preparation of its q and k.
    """
    mine, joined = every[call.index], list[Projected]()
    for (name, how), x, rows, index, made in zip(prepares.items(), streams, mine, indices, inputs, strict=True):
        qkv = call.matrices[f"{name} qkv"]
        h = entered(call, x, rows, norm, index, qkv.rounding) if made is None else made
        joined.append(qkv.projected(h, heads, how))
    outs = call.attend(joined)
    after = every[call.index + 1] if call.index + 1 < len(every) else (None, None)
    first, second = (
        _finished(call, name, x, out, rows, following, norm, mlp, index) if len(rows) > 2 else x
        for name, x, out, rows, following, index in zip(prepares, streams, outs, mine, after, indices, strict=True)
    )
    return first, second


def entered(
    call: BlockCall,
    x_BlE: Tensor,
    rows: Rows,
    norm: Norm,
    index: Tensor | None = None,
    rounding: Rounding | None = None,
) -> Input:
    """Return the input of attention (B, l, E): what the last block has left for this very x, or its modulated norm.

    rounding: of the matrix that reads it.
    """
    handed = call.handed(x_BlE)
    if handed is not None:
        return handed
    return norm_modulate(x_BlE, rows[0], rows[1], norm, index_Bl=index, rounding=rounding)


def _finished(
    call: BlockCall,
    name: str,
    x_BlE: Tensor,
    out_BlE: Input,
    rows: Rows,
    following: Rows | None,
    norm: Norm,
    mlp: MLP,
    index: Tensor | None,
) -> Tensor:
    """Return a stream after attention and MLP. following: the rows of the next block, whose input is left for it."""
    _, _, gate, shift_mlp, scale_mlp, gate_mlp = rows
    up, down = call.matrices[f"{name} up"], call.matrices[f"{name} down"]
    branch = call.matrices[f"{name} out"](out_BlE)
    x, h = gate_norm_modulate(x_BlE, gate, branch, shift_mlp, scale_mlp, norm, index_Bl=index, rounding=up.rounding)
    branch = mlp(up, down, h)
    if following is None:
        return bounded(added(x, gate_mlp, branch, index_Bl=index))
    rounding = reads_next(call, f"{name} qkv")
    x, h = gate_norm_modulate(x, gate_mlp, branch, following[0], following[1], norm, index_Bl=index, rounding=rounding)
    x = bounded(x)
    call.hand_over(x, h)
    return x


def bounded(x_BlE: Tensor) -> Tensor:
    """Return x, in fp16 without infinities."""
    return x_BlE.clip(-LARGEST, LARGEST) if x_BlE.dtype == torch.float16 else x_BlE


def by_head(q_norm: Any, k_norm: Any, cos_lD2: Tensor | None = None, sin_lD2: Tensor | None = None) -> Prepare:
    """Return the preparation of q and k: RMSNorm of each head, then rotary on neighbouring pairs, if there are rows."""
    return Prepare("rms", True, q_norm.eps, q_norm.weight, None, k_norm.weight, None, cos_lD2, sin_lD2)


def of_both(attn: Any, text_rows: Sequence[Tensor], image_rows: Sequence[Tensor]) -> dict[str, Prepare]:
    """Return the preparation of text and image, with the cosines and sines (l, D/2) of each."""
    text, image = (attn.norm_added_q, attn.norm_added_k), (attn.norm_q, attn.norm_k)
    return {"text": by_head(*text, *text_rows), "image": by_head(*image, *image_rows)}


def pairs(call: BlockCall, rows: tuple[Tensor, Tensor], x_BlE: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines (l, D/2) of rotary rows (l, D) that hold each number twice, made once per forward."""
    dtype = state_dtype(x_BlE.dtype)
    cos, sin = call.once("rotary", rows, lambda: [part[:, 0::2].to(dtype).contiguous() for part in rows], shared=True)
    return cos, sin


def checked(options: dict[str, Any] | None) -> None:
    """Decline arguments that diffusers would pass on to a processor."""
    if options:
        raise DeclinedError(f"attention has the arguments {', '.join(options)}")


# Parallel blocks: attention and MLP side by side, from the same input into the same gated branch ------------------


def branch(
    call: BlockCall,
    h_BlE: Input,
    how: Prepare,
    heads: int,
    qkv: Matrix,
    activated: Callable[[Input, Matrix], Input],
    outs: tuple[Matrix, Matrix],
    mask: Tensor | None = None,
) -> Branch:
    """Return the branch (B, l, E). activated: the MLP's hidden layer, of h and the matrix that reads the layer.

    outs: of attention, without a bias, and the MLP.

    mask: for the keys of attention, as the block was given it.

    The MLP does not read attention's output, so it runs while keys and values travel. Its product and that of
    attention's output are added, in one buffer or by the gate's kernel, so the two inputs are never concatenated.
    """
    of_attention, of_mlp = outs
    q, k, v = qkv(h_BlE).unflatten(-1, (3, heads, -1)).unbind(2)
    made: list[Tensor] = []
    (attended,) = call.attend([Given(q, k, v, how)], lambda: made.append(of_mlp(activated(h_BlE, of_mlp))), mask)
    (branch_BlE,) = made
    return of_attention.added_to(branch_BlE, attended)


def joined(
    call: BlockCall,
    first_BlE: Tensor,
    second_BlE: Tensor,
    every: Sequence[Rows],
    norm: Norm,
    rounding: Rounding | None = None,
) -> tuple[Tensor, Input]:
    """Return two streams as one (B, l, E), and the block's input: what `apart` has left for them, or made of them.

    every: the rows of all blocks, for both streams alike. rounding: of the matrices that read the input.
    """
    handed = call.handed(second_BlE)
    if handed is not None and handed[0] is first_BlE:
        return handed[1:]
    x, (shift, scale, _) = torch.cat([first_BlE, second_BlE], dim=1), every[call.index]
    return x, norm_modulate(x, shift, scale, norm, rounding=rounding)


def apart(
    call: BlockCall,
    x_BlE: Tensor,
    branch_BlE: Branch,
    every: Sequence[Rows],
    norm: Norm,
    first: int,
    rounding: Rounding | None = None,
) -> tuple[Tensor, Tensor]:
    """Return two streams after a block as views of one, which is left for the next block.

    first: tokens of the first one. rounding: of the matrices that read the next block's input. See `joined`.
    """
    x, h = following(x_BlE, every[call.index][2], branch_BlE, every[call.index + 1 :], norm, rounding=rounding)
    first_BlE, second_BlE = x[:, :first], x[:, first:]
    if h is not None:
        call.hand_over(second_BlE, (first_BlE, x, h))
    return first_BlE, second_BlE


def following(
    x_BlE: Tensor,
    gate_BE: Tensor,
    branch_BlE: Branch,
    after: Sequence[Rows],
    norm: Norm,
    index_Bl: Tensor | None = None,
    rounding: Rounding | None = None,
) -> tuple[Tensor, Input | None]:
    """Return x + gate * branch, and the next block's input that is made of it. after: the rows of the next blocks.

    index: int32, which row each token has; None: that of its batch row.
    """
    if not after:
        return bounded(added(x_BlE, gate_BE, branch_BlE, index_Bl=index_Bl)), None
    (shift, scale, *_), *_ = after
    x, h = gate_norm_modulate(x_BlE, gate_BE, branch_BlE, shift, scale, norm, index_Bl=index_Bl, rounding=rounding)
    return bounded(x), h


# For the planner: an activation is in the product before it, so that it takes no separate pass -------------------


def double_work(count: int, width: int, hidden: int, up: int = 1) -> Blocks:
    """Return blocks in which text and image have their own weights, attend together, and have an MLP each.

    up: products that enter the MLP, 2 for SwiGLU.
    """
    gemms = ((width, 3 * width), (width, width), (width, up * hidden), (hidden, width))
    modulation = ((width, 6 * width),) * 2
    return Blocks(count, gemms, passes=(4 * width, 4 * width), apart=(gemms,), modulation=modulation)


def parallel_work(count: int, width: int, hidden: int, up: int = 1) -> Blocks:
    """Return blocks of one stream in which attention and an MLP are side by side; see `double_work`.

    Their output takes 2 E more than a gated norm, because two products add up.
    """
    return Blocks(
        count=count,
        gemms=((width, 3 * width), (width, up * hidden), (width + hidden, width)),
        passes=(6 * width,),
        modulation=((width, 3 * width),),
        beside=((width, up * hidden), (hidden, width)),
    )
