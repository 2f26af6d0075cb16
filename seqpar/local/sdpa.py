"""Attention by torch's own kernels, called directly because they return the log-sum-exp that a ring needs.

Needs no other package, and is the first choice where no other has a higher `preference`. It uses cuDNN
on Hopper and later, torch's FlashAttention-2 on older GPUs and for head dims over 128, the memory-efficient kernel for
fp32, for head dims over 256 and for key masks where FlashAttention-2 would be used otherwise, and a flash kernel on the
CPU. Strided views need no copies.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from seqpar.types.masks import aligned_bias, key_bias

aten = torch.ops.aten
HALF = (torch.float16, torch.bfloat16)
FLASH_MOST = 256  # the largest head dim that torch's FlashAttention-2 takes


def why_not(device: torch.device, dtype: torch.dtype, head_dim: int, mask: bool = False) -> str | None:
    """Return None if a kernel takes these inputs, otherwise the reason why not. A key mask never changes the answer."""
    if device.type == "cpu":
        return None
    if device.type != "cuda":
        return f"no kernel for {device.type}"
    if dtype not in (*HALF, torch.float32):
        return f"no kernel for {dtype} on a GPU"
    step = 8 if dtype in HALF else 4
    return f"head dim {head_dim} is not a multiple of {step}" if head_dim % step else None


def preference(major: int, head_dim: int) -> int:
    # first, except where `flash` or `wide` is
    return 1


def invariant(device: torch.device, dtype: torch.dtype, head_dim: int, mask: bool = False) -> str | None:
    """Return None if a query's bits depend on that query alone (measured for cuDNN), otherwise the reason."""
    chosen = kernel(device, dtype, head_dim, mask)
    return None if chosen is cudnn else f"the kernel for this ({chosen.__name__}) may split its work by row counts"


def attend(q_BLHD: Tensor, k_BLGD: Tensor, v_BLGD: Tensor, mask_BL: Tensor | None = None, /) -> tuple[Tensor, Tensor]:
    """Compute attention as `seqpar.types.protocols.Core` says.

    The choice of the kernel depends on device, dtype, head dim and whether there is a mask, never on row counts. The
    mask may be a `masks.key_bias` of q's dtype, which is used as it is; a bool mask is converted to one in every
    call.
    """
    q, k, v = (x.transpose(1, 2) for x in (q_BLHD, k_BLGD, v_BLGD))
    bias = None if mask_BL is None else _bias(mask_BL, q)
    out, lse = kernel(q.device, q.dtype, q.shape[-1], bias is not None)(q, k, v, bias)
    return out.transpose(1, 2), lse


def kernel(
    device: torch.device, dtype: torch.dtype, head_dim: int, mask: bool = False
) -> Callable[..., tuple[Tensor, Tensor]]:
    if device.type == "cpu":
        return cpu_flash
    if dtype not in HALF:
        return efficient
    hopper = torch.cuda.get_device_capability(device) >= (9, 0)
    if hopper and head_dim <= 128:
        return cudnn
    return efficient if mask or head_dim > FLASH_MOST else flash


def cudnn(q_BHLD: Tensor, k_BGLD: Tensor, v_BGLD: Tensor, bias_BHLL: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Attend by cuDNN's fused kernel: fp16 and bf16, grouped-query heads without copies.

    The kernel may return the log-sum-exp as (B, H, L, 1).
    """
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(q_BHLD, k_BGLD, v_BGLD, bias_BHLL, True)
    return out, lse.squeeze(-1) if lse.dim() == 4 else lse


def flash(q_BHLD: Tensor, k_BGLD: Tensor, v_BGLD: Tensor, bias: None = None) -> tuple[Tensor, Tensor]:
    """Attend by torch's FlashAttention-2: fp16 and bf16. `why_not` has refused head dims that are no multiple of 8."""
    k, v = (_repeat(x, q_BHLD.shape[1]) for x in (k_BGLD, v_BGLD))
    out, lse, *_ = aten._scaled_dot_product_flash_attention(q_BHLD, k, v)
    return out, lse


def efficient(q_BHLD: Tensor, k_BGLD: Tensor, v_BGLD: Tensor, bias_BHLL: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Attend by the memory-efficient kernel, also in fp32 and at any head dim.

    The log-sum-exp that it returns is padded along tokens.
    """
    k, v = (_repeat(x, q_BHLD.shape[1]) for x in (k_BGLD, v_BGLD))
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(q_BHLD, k, v, bias_BHLL, True)
    return out, lse[..., : q_BHLD.shape[2]]


def cpu_flash(q_BHLD: Tensor, k_BGLD: Tensor, v_BGLD: Tensor, bias_BHLL: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Attend by torch's flash kernel for CPUs: fp16 to fp64.

    It kills the process on empty inputs; strategies never pass any.
    """
    k, v = (_repeat(x, q_BHLD.shape[1]) for x in (k_BGLD, v_BGLD))
    return aten._scaled_dot_product_flash_attention_for_cpu(q_BHLD, k, v, attn_mask=bias_BHLL)


def _bias(mask_BL: Tensor, q_BHLD: Tensor) -> Tensor:
    """Return what is added to the scores, (B, H, L, L'): a view that repeats one row for each batch row."""
    bias = key_bias(mask_BL, q_BHLD.dtype) if mask_BL.dtype == torch.bool else aligned_bias(mask_BL)
    if bias.dtype != q_BHLD.dtype:
        raise ValueError(f"got a key bias of {bias.dtype}, expected {q_BHLD.dtype} as q, or a mask of torch.bool")
    return bias[:, None, None].expand(*q_BHLD.shape[:3], -1)


def _repeat(x_BGLD: Tensor, heads: int) -> Tensor:
    """Repeat key-value heads, for kernels without grouped-query attention."""
    group = heads // x_BGLD.shape[1]
    return x_BGLD.repeat_interleave(group, dim=1) if group > 1 else x_BGLD
