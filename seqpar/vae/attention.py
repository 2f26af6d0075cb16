"""The rule of attention: queries stay with their strip, keys and values of all strips are gathered.

The middle of a VAE has one head of 384 to 1024 dims, so heads cannot be split. Keys are in the order of the ranks, not
of the picture: the sum over keys does not depend on it. On Hopper `seqpar.local.wide` takes these head dims.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from seqpar.local import sdpa, wide
from seqpar.vae.cut import Strip


def attention(
    strip: Strip,
    function: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **more: Any,
) -> Tensor:
    """Apply the rule of `torch.nn.functional.scaled_dot_product_attention` to the tokens of a strip (B, H, l, D)."""
    if strip.cut.axis.size > 1:
        if dropout_p or is_causal or query.ndim != 4:
            strip.refuse(f"got attention of {tuple(query.shape)} with dropout {dropout_p} or is_causal={is_causal}")
        sizes = strip.cut.shares(key.shape[2])
        attn_mask = None if attn_mask is None else _all_columns(strip, attn_mask, sizes)
        key, value = _gathered(strip, key, value, sizes)
    plain = attn_mask is None and not dropout_p and not is_causal and all(not each for each in more.values())
    if plain and query.ndim == 4 and _wide(query):
        out_BlHD, _ = wide.attend(*(x.transpose(1, 2) for x in (query, key, value)))
        return out_BlHD.transpose(1, 2)
    return function(query, key, value, attn_mask, dropout_p, is_causal, **more)


def _wide(query: Tensor) -> bool:
    """Return whether the kernel for wide heads works and is the first choice."""
    if query.device.type != "cuda" or wide.why_not(query.device, query.dtype, query.shape[-1]) is not None:
        return False
    major = torch.cuda.get_device_capability(query.device)[0]
    return wide.preference(major, query.shape[-1]) > sdpa.preference(major, query.shape[-1])


def _gathered(strip: Strip, k_BHlD: Tensor, v_BHlD: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return the keys and values of all ranks."""
    (b, heads, _, d), e = k_BHlD.shape, v_BHlD.shape[3]
    gather = strip.exchanges.tokens(sizes, (b, heads, d + e), k_BHlD)
    mine_lBHd = gather.outbox()
    mine_lBHd[..., :d].copy_(k_BHlD.permute(2, 0, 1, 3))
    mine_lBHd[..., d:].copy_(v_BHlD.permute(2, 0, 1, 3))
    k_BHLD, v_BHLD = gather.deliver().permute(1, 2, 0, 3).split((d, e), dim=3)
    return k_BHLD, v_BHLD


def _all_columns(strip: Strip, mask_BHll: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Return a mask's columns for the keys of all ranks; a key's column depends only on its frame."""
    pixels = strip.cut.mine * strip.cut.other
    local = mask_BHll.shape[-1]
    if local % pixels:
        strip.refuse(f"got a mask of {local} keys, expected frames of {pixels} pixels")
    frames = local // pixels
    column_BHlT1 = mask_BHll.unflatten(-1, (frames, pixels))[..., :1]
    shapes = ((*column_BHlT1.shape[:-1], size // frames) for size in sizes)
    return torch.cat([column_BHlT1.expand(shape).flatten(-2) for shape in shapes], dim=-1)
