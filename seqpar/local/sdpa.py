"""torch's own attention kernels, called directly because they return the log-sum-exp that a ring needs.

When it wins: always there, without another package, and the first choice where the table in `seqpar.planner.plan`
names no other. cuDNN on Hopper and later, torch's FlashAttention-2 before and for head dims over 128, the
memory-efficient kernel for fp32 and for key masks where FlashAttention-2 would be taken, a flash kernel on the CPU.
Takes strided views as they are.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from seqpar.masks import aligned_bias, key_bias

aten = torch.ops.aten
HALF = (torch.float16, torch.bfloat16)
FLASH_MOST = 256  # head dim that torch's FlashAttention-2 takes


def why_not(device: torch.device, dtype: torch.dtype, head_dim: int, mask: bool = False) -> str | None:
    """None where a kernel takes this, else the reason why not. There is a kernel with a key mask for all of these."""
    if device.type == "cpu":
        return None
    if device.type != "cuda":
        return f"no kernel for {device.type}"
    if dtype not in (*HALF, torch.float32):
        return f"no kernel for {dtype} on a GPU"
    step = 8 if dtype in HALF else 4
    if head_dim % step:
        return f"head dim {head_dim} is not a multiple of {step}"
    return f"head dim {head_dim} is over {FLASH_MOST} in {dtype}" if dtype in HALF and head_dim > FLASH_MOST else None


def preference(major: int, head_dim: int) -> int:
    """First where `flash` is not.

    major: of the GPU's compute capability, 0 on a CPU.
    """
    return 1


def invariant(device: torch.device, dtype: torch.dtype, head_dim: int, mask: bool = False) -> str | None:
    """None where a query's bits depend on that query alone (measured: cuDNN's do), else the reason why not."""
    chosen = kernel(device, dtype, head_dim, mask)
    return None if chosen is cudnn else f"the kernel for this ({chosen.__name__}) may split its work by row counts"


def attend(q_BLHD: Tensor, k_BLGD: Tensor, v_BLGD: Tensor, mask_BL: Tensor | None = None, /) -> tuple[Tensor, Tensor]:
    """See `seqpar.protocols.Core`. The kernel depends on device, dtype, head dim and mask or none, never on row counts.

    A `seqpar.masks.key_bias` of q's dtype is used as it is; a bool mask is made one in every call.
    """
    q, k, v = (x.transpose(1, 2) for x in (q_BLHD, k_BLGD, v_BLGD))
    bias = None if mask_BL is None else _bias(mask_BL, q)
    out, lse = kernel(q.device, q.dtype, q.shape[-1], bias is not None)(q, k, v, bias)
    return out.transpose(1, 2), lse


def kernel(
    device: torch.device, dtype: torch.dtype, head_dim: int, mask: bool = False
) -> Callable[..., tuple[Tensor, Tensor]]:
    """The kernel for these: cuDNN from Hopper on, flash before, memory-efficient for fp32, flash on the CPU."""
    if device.type == "cpu":
        return cpu_flash
    if dtype not in HALF:
        return efficient
    hopper = torch.cuda.get_device_capability(device) >= (9, 0)
    if hopper and head_dim <= 128:
        return cudnn
    return efficient if mask else flash


def cudnn(q_BHLD: Tensor, k_BGLD: Tensor, v_BGLD: Tensor, bias_BHLL: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """cuDNN's fused attention: fp16/bf16, grouped-query as it is; lse comes as (B, H, L, 1)."""
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(q_BHLD, k_BGLD, v_BGLD, bias_BHLL, True)
    return out, lse.squeeze(-1) if lse.dim() == 4 else lse


def flash(q_BHLD: Tensor, k_BGLD: Tensor, v_BGLD: Tensor, bias: None = None) -> tuple[Tensor, Tensor]:
    """FlashAttention-2 as torch ships it: fp16/bf16; a head dim that is no multiple of 8 was refused before."""
    k, v = (_repeat(x, q_BHLD.shape[1]) for x in (k_BGLD, v_BGLD))
    out, lse, *_ = aten._scaled_dot_product_flash_attention(q_BHLD, k, v)
    return out, lse


def efficient(q_BHLD: Tensor, k_BGLD: Tensor, v_BGLD: Tensor, bias_BHLL: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The memory-efficient kernel: also fp32; its lse is padded along the tokens."""
    k, v = (_repeat(x, q_BHLD.shape[1]) for x in (k_BGLD, v_BGLD))
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(q_BHLD, k, v, bias_BHLL, True)
    return out, lse[..., : q_BHLD.shape[2]]


def cpu_flash(q_BHLD: Tensor, k_BGLD: Tensor, v_BGLD: Tensor, bias_BHLL: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """torch's flash attention for the CPU: fp16 to fp64; dies on empty inputs, which strategies never pass."""
    k, v = (_repeat(x, q_BHLD.shape[1]) for x in (k_BGLD, v_BGLD))
    return aten._scaled_dot_product_flash_attention_for_cpu(q_BHLD, k, v, attn_mask=bias_BHLL)


def _bias(mask_BL: Tensor, q_BHLD: Tensor) -> Tensor:
    """(B, H, L, L') numbers that are added to the scores; a view of one row for each batch row."""
    bias = key_bias(mask_BL, q_BHLD.dtype) if mask_BL.dtype == torch.bool else aligned_bias(mask_BL)
    if bias.dtype != q_BHLD.dtype:
        raise ValueError(f"got a key bias of {bias.dtype}, expected {q_BHLD.dtype} as q, or a mask of torch.bool")
    return bias[:, None, None].expand(*q_BHLD.shape[:3], -1)


def _repeat(x_BGLD: Tensor, heads: int) -> Tensor:
    """Key-value heads repeated for kernels that know no grouped-query attention."""
    group = heads // x_BGLD.shape[1]
    return x_BGLD.repeat_interleave(group, dim=1) if group > 1 else x_BGLD
