"""DeepSpeed's Ulysses in plain torch: permute, all-to-all and permute for each of q, k and v, then for the output.

`launch/bench.py steps` compares our layouts with it.
Tokens and heads must divide by the ranks. Source: DeepSpeed-Ulysses (arXiv 2309.14509).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from seqpar.mesh import Axis


def to_heads(x_BlHD: Tensor, axis: Axis) -> Tensor:
    """Return all tokens with this rank's heads (B, L, h, D) from this rank's tokens with all heads; contiguous."""
    sent = x_BlHD.unflatten(2, (axis.size, -1)).permute(2, 1, 0, 3, 4).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=axis.group)
    return received.flatten(0, 1).transpose(0, 1).contiguous()


def to_tokens(x_BLhD: Tensor, axis: Axis) -> Tensor:
    """Return this rank's tokens with all heads (B, l, H, D) from all tokens with this rank's heads; contiguous."""
    sent = x_BLhD.unflatten(1, (axis.size, -1)).permute(1, 2, 0, 3, 4).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=axis.group)
    return received.permute(2, 1, 0, 3, 4).flatten(2, 3)


def ulysses(attend: Callable[[Tensor, Tensor, Tensor], Tensor], axis: Axis) -> Callable[..., Tensor]:
    """Return attention of this rank's tokens to all tokens, by four all-to-alls and the permutes around them."""

    def core(q_BlHD: Tensor, k_BlHD: Tensor, v_BlHD: Tensor) -> Tensor:
        q, k, v = (to_heads(x, axis) for x in (q_BlHD, k_BlHD, v_BlHD))
        return to_tokens(attend(q, k, v), axis)

    return core
