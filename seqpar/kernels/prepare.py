"""QK-norm and rotary embedding of q and k, written with v straight into the readers' outboxes.

When it wins: always better than permute -> collective -> permute, because the one pass that norm and rotary need
anyway also does the layout of the exchange. Plain torch here: the reference that a fused kernel has to equal.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from seqpar.protocols import Outbox, Prepare, state_dtype


def prepare(q_BlHD: Tensor, k_BlGD: Tensor, how: Prepare) -> tuple[Tensor, Tensor]:
    """q and k after norm and rotary, same shapes and dtype; computed in fp32 (fp64 for fp64)."""
    if how.is_identity:
        return q_BlHD, k_BlGD
    q = _rotate(_normalise(q_BlHD, how, how.q_weight, how.q_bias), how).to(q_BlHD.dtype)
    k = _rotate(_normalise(k_BlGD, how, how.k_weight, how.k_bias), how).to(k_BlGD.dtype)
    return q, k


def prepare_into(q_BlHD: Tensor, k_BlGD: Tensor, v_BlGD: Tensor, how: Prepare, outboxes: Sequence[Outbox]) -> None:
    """The same, written with v into every outbox: each reader gets its heads of my tokens, token-major."""
    q, k = prepare(q_BlHD, k_BlGD, how)
    for box in outboxes:
        if box.q is not None:
            box.q.copy_(q[:, :, box.heads].transpose(0, 1))
        if box.k is not None:
            box.k.copy_(k[:, :, box.kv_heads].transpose(0, 1))
        if box.v is not None:
            box.v.copy_(v_BlGD[:, :, box.kv_heads].transpose(0, 1))


def _normalise(x_BlHD: Tensor, how: Prepare, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x_BlHD.to(state_dtype(x_BlHD.dtype))
    if how.norm == "none":
        return x
    x = x if how.per_head else x.flatten(2)
    weight = None if weight is None else weight.to(x.dtype)
    bias = None if bias is None else bias.to(x.dtype)
    if how.norm == "layer":
        x = F.layer_norm(x, x.shape[-1:], weight, bias, how.eps)
    else:
        x = F.rms_norm(x, x.shape[-1:], weight, how.eps)
    return x.view(x_BlHD.shape)


def _rotate(x_BlHD: Tensor, how: Prepare) -> Tensor:
    if how.cos_lD2 is None or how.sin_lD2 is None:
        return x_BlHD
    cos, sin = (rows[:, None].to(x_BlHD.dtype) for rows in (how.cos_lD2, how.sin_lD2))
    if how.interleaved:
        a, b = x_BlHD.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    a, b = x_BlHD.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
