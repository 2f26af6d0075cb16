"""Weights of several layers of a diffusers module as one matrix, and copies of it with merged adapters.

The module stays the owner of its weights. Those of several layers (q, k and v) become views of the rows of a matrix
that is made once, so that the module's state dict, `save_pretrained` and LoRA's `fuse_lora` go on working, and what is
written there is what the matrix holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from seqpar.families._block import Matrix
from seqpar.transformer import lora as adapters


def with_adapters(layers: Sequence[nn.Module], own: Matrix, scale: float, room: Matrix | None) -> Matrix:
    """Return a copy of a matrix with the active adapters of its layers, computed in fp32 and rounded once.

    scale: see `adapters.merged`. room: a copy whose memory is written again.
    """
    weight_FE = copied_into(own.weight, None if room is None else room.weight)
    bias_F = None if own.bias is None else copied_into(own.bias, None if room is None else room.bias)
    start = 0
    for layer in layers:
        base: Any = adapters.base_of(layer)
        mine = slice(start, start + len(base.weight))
        weight, bias = adapters.merged(layer, scale) if adapters.active(layer) else (None, None)
        if weight is not None:
            weight_FE[mine].copy_(weight)
        if bias is not None and bias_F is not None:
            bias_F[mine].copy_(bias)
        start = mine.stop
    return Matrix(weight_FE, bias_F)


def copied_into(like: Tensor, room: Tensor | None) -> Tensor:
    """Return a copy of a tensor, in the memory that is there already if it fits."""
    fits = room is not None and (room.shape, room.dtype, room.device) == (like.shape, like.dtype, like.device)
    copied = room if fits and room is not None else torch.empty_like(like)
    return copied.copy_(like)


def rows(parts: Sequence[Tensor]) -> Tensor:
    """Return the tensor that is some parameters one below the other; several become views of it."""
    if len(parts) == 1:
        return parts[0].detach()
    whole = joined(parts)
    if whole is None:
        whole = torch.cat([part.detach() for part in parts])
        for part, mine in zip(parts, whole.split([len(part) for part in parts]), strict=True):
            part.data = mine
    return whole


def joined(parts: Sequence[Tensor]) -> Tensor | None:
    """Return the tensor whose rows the parts are, without a copy, or None if they do not lie one after the other."""
    first, end = parts[0].detach(), parts[0].data_ptr()
    for part in parts:
        same = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not (same and part.is_contiguous() and part.data_ptr() == end and part.dtype == first.dtype):
            return None
        end += part.numel() * part.element_size()
    return first.as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride(), first.storage_offset())
