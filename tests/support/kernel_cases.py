"""The elementwise kernels of a block, with inputs of the shapes, dtypes and strides that models give them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from seqpar.kernels import adaln, gelu, merge, prepare, swiglu
from seqpar.kernels.adaln import Gated, Norm
from seqpar.types.protocols import Prepare

HIDDEN = {1152: 4608, 4096: 11008}  # feed-forward widths of DiT-XL and Large-DiT-7B


@dataclass(frozen=True)
class Case:
    """One kernel on inputs of one size: the module with `launch`, and what makes its inputs."""

    name: str
    module: ModuleType
    data: Callable[[], tuple[Any, ...]]


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return an input whose values are never read."""
    return torch.empty(shape, dtype=dtype)


def cases(rows: int, width: int) -> Sequence[Case]:
    """Return all elementwise kernels of a block at this number of rows, on the CPU."""
    batch, tokens, hidden = 2, rows // 2, HIDDEN.get(width, 4 * width)
    heads = 16 if width < 2048 else 32
    stream, wide, fp32 = (batch, tokens, width), (batch, tokens, 2 * hidden), torch.float32

    def modulated(branched: bool) -> tuple[Any, ...]:
        gate, shift, scale = empty(batch, 6, width, dtype=fp32)[:, :3].unbind(1)
        gated = Gated(gate, empty(*stream)) if branched else None
        return empty(*stream), gated, shift, scale, Norm("rms", 1e-5, empty(width))

    def projected() -> tuple[Any, ...]:
        q, k = empty(batch, tokens, 3, heads, width // heads).unbind(2)[:2]
        cos, sin = (empty(tokens, width // heads // 2, dtype=fp32) for _ in range(2))
        weight, bias, k_weight, k_bias = (empty(width) for _ in range(4))
        return q, k, Prepare("layer", False, 1e-5, weight, bias, k_weight, k_bias, cos, sin)

    return [
        Case("norm + modulate", adaln, lambda: modulated(False)),
        Case("gate + residual + norm + modulate", adaln, lambda: modulated(True)),
        Case("QK-norm + rotary", prepare, projected),
        Case("SwiGLU", swiglu, lambda: (empty(*wide),)),
        Case("bias + GELU", gelu, lambda: (empty(*wide), empty(2 * hidden))),
        Case("merge", merge, lambda: tuple(_parts(batch, tokens, heads, width // heads))),
    ]


def _parts(batch: int, tokens: int, heads: int, dim: int) -> Iterator[Tensor]:
    """Yield two partial attentions: the state in fp32, what is merged into it in bf16, each with its log-sum-exp."""
    for dtype in (torch.float32, torch.bfloat16):
        yield empty(batch, tokens, heads, dim, dtype=dtype)
        yield empty(batch, heads, tokens, dtype=torch.float32)
