"""A parallel block: attention and MLP side by side, from the same input into the same gated branch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from seqpar.families._block import BlockCall, Matrix
from seqpar.families._double import Rows, bounded
from seqpar.kernels.adaln import Norm, added, gate_norm_modulate, norm_modulate
from seqpar.types.protocols import Given, Prepare


def branch(
    call: BlockCall,
    h_BlE: Tensor,
    how: Prepare,
    heads: int,
    qkv: Matrix,
    activated: Callable[[Tensor], Tensor],
    outs: tuple[Matrix, Matrix],
    mask: Tensor | None = None,
) -> Tensor:
    """Return the branch (B, l, E). activated: the MLP's hidden layer. outs: of attention, without a bias, and the MLP.

    mask: for the keys of attention, as the block was given it.

    The MLP does not read attention's output, so it runs while keys and values travel. Its product and that of
    attention's output add up in one buffer, so the two inputs are never concatenated.
    """
    of_attention, of_mlp = outs
    q, k, v = qkv(h_BlE).unflatten(-1, (3, heads, -1)).unbind(2)
    made: list[Tensor] = []
    (attended,) = call.attend([Given(q, k, v, how)], lambda: made.append(of_mlp(activated(h_BlE))), mask)
    (branch_BlE,) = made
    of_attention.add_to(branch_BlE, attended)
    return branch_BlE


def joined(
    call: BlockCall, first_BlE: Tensor, second_BlE: Tensor, every: Sequence[Rows], norm: Norm
) -> tuple[Tensor, Tensor]:
    """Return two streams as one (B, l, E), and the block's input: what `apart` has left for them, or made of them.

    every: the rows of all blocks, for both streams alike.
    """
    handed = call.handed(second_BlE)
    if handed is not None and handed[0] is first_BlE:
        return handed[1:]
    x, (shift, scale, _) = torch.cat([first_BlE, second_BlE], dim=1), every[call.index]
    return x, norm_modulate(x, shift, scale, norm)


def apart(
    call: BlockCall, x_BlE: Tensor, branch_BlE: Tensor, every: Sequence[Rows], norm: Norm, first: int
) -> tuple[Tensor, Tensor]:
    """Return two streams after a block as views of one, which is left for the next block.

    first: tokens of the first one. See `joined`.
    """
    x, h = following(x_BlE, every[call.index][2], branch_BlE, every[call.index + 1 :], norm)
    first_BlE, second_BlE = x[:, :first], x[:, first:]
    if h is not None:
        call.hand_over(second_BlE, (first_BlE, x, h))
    return first_BlE, second_BlE


def following(
    x_BlE: Tensor,
    gate_BE: Tensor,
    branch_BlE: Tensor,
    after: Sequence[Rows],
    norm: Norm,
    index_Bl: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return x + gate * branch, and the next block's input that is made of it. after: the rows of the next blocks.

    index: int32, which row each token has; None: that of its batch row.
    """
    if not after:
        return bounded(added(x_BlE, gate_BE, branch_BlE, index_Bl=index_Bl)), None
    x, h = gate_norm_modulate(x_BlE, gate_BE, branch_BlE, after[0][0], after[0][1], norm, index_Bl=index_Bl)
    return bounded(x), h
