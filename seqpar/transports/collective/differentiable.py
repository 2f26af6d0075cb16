"""The exchanges of ulysses as autograd functions: the gradient of an exchange is the reverse exchange.

They serve gradients through a sharded model (guidance by gradients, fine-tuning, tests of the layout). They allocate
and copy freely; inference uses `exchange.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from seqpar.mesh import Axis
from seqpar.shard import Shard
from seqpar.transports.collective.exchange import AllToAll


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BlHD: Tensor, axis: Axis, tokens: tuple[int, ...]) -> Tensor:
        ctx.axis, ctx.tokens, ctx.heads = axis, tokens, x_BlHD.shape[2]
        return _scatter_heads(x_BlHD, axis, tokens)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _gather_heads(grads[0], ctx.axis, ctx.tokens, ctx.heads), None, None


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BLhD: Tensor, axis: Axis, tokens: tuple[int, ...], heads: int) -> Tensor:
        ctx.axis, ctx.tokens = axis, tokens
        return _gather_heads(x_BLhD, axis, tokens, heads)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _scatter_heads(grads[0], ctx.axis, ctx.tokens), None, None, None


def to_heads(x_BlHD: Tensor, axis: Axis, tokens: tuple[int, ...]) -> Tensor:
    """Exchange all heads of this rank's tokens for its heads of all tokens, (B, L, h, D); differentiable."""
    return _ToHeads.apply(x_BlHD, axis, tokens)  # pyright: ignore[reportReturnType]


def to_tokens(x_BLhD: Tensor, axis: Axis, tokens: tuple[int, ...], heads: int) -> Tensor:
    """Exchange this rank's heads of all tokens for all `heads` of its tokens, (B, l, H, D); differentiable."""
    return _ToTokens.apply(x_BLhD, axis, tokens, heads)  # pyright: ignore[reportReturnType]


def _scatter_heads(x_BlHD: Tensor, axis: Axis, tokens: tuple[int, ...]) -> Tensor:
    (batch, mine, heads, dim) = x_BlHD.shape
    shard = Shard(heads, axis.size)
    own = shard.sizes[axis.rank]
    move = AllToAll(
        axis,
        [(mine, batch, h, dim) for h in shard.sizes],
        [(n, batch, own, dim) for n in tokens],
        x_BlHD.dtype,
        x_BlHD.device,
    )
    for box, part in zip(move.outgoing, x_BlHD.transpose(0, 1).split(shard.sizes, dim=2), strict=True):
        box.copy_(part)
    return move.deliver().view(sum(tokens), batch, own, dim).transpose(0, 1).contiguous()


def _gather_heads(x_BLhD: Tensor, axis: Axis, tokens: tuple[int, ...], heads: int) -> Tensor:
    (batch, _, own, dim), shard = x_BLhD.shape, Shard(heads, axis.size)
    mine = tokens[axis.rank]
    move = AllToAll(
        axis,
        [(n, batch, own, dim) for n in tokens],
        [(mine, batch, h, dim) for h in shard.sizes],
        x_BLhD.dtype,
        x_BLhD.device,
    )
    for box, part in zip(move.outgoing, x_BLhD.transpose(0, 1).split(tokens), strict=True):
        box.copy_(part)
    move.deliver()
    return torch.cat(move.incoming, dim=2).transpose(0, 1).contiguous()
