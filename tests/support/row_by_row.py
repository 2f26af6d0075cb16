"""Arithmetic on a CPU whose rows do not depend on each other, as that of a GPU in exact mode: slow, for tests of bits.

A CPU's matrix products, like a GPU's outside of exact mode, round a row otherwise if there are other rows beside it.
Here every number of a result is a sum of its own. A CPU also computes the last numbers of a tensor by other functions
than those before, which fill its vectors; here all numbers fill them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from seqpar.local import sdpa
from seqpar.mesh import exact

aten = torch.ops.aten
VECTORS = 64  # numbers; the vectors of every CPU divide it
MOST = 1 << 20  # products in memory at a time
CURVES = {getattr(aten, name).default for name in ("silu", "gelu", "exp", "sin", "cos", "tanh", "sigmoid")}


def _sums(x_XE: Tensor, y_YE: Tensor) -> Tensor:
    """Return the sums (..., X, Y) of products of each row of x with each row of y; each is a sum by itself."""
    made = x_XE.new_empty(*x_XE.shape[:-1], y_YE.shape[-2])
    count = max(1, MOST // max(1, made[..., :1, :].numel() * x_XE.shape[-1]))  # rows at a time
    for first in range(0, x_XE.shape[-2], count):
        rows = slice(first, first + count)
        made[..., rows, :] = (x_XE[..., rows, None, :] * y_YE[..., None, :, :]).sum(-1)
    return made


def _filled(curve: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return curve(F.pad(x.flatten(), (0, -x.numel() % VECTORS)))[: x.numel()].view(x.shape)


def attend(q_BLHD: Tensor, k_BLGD: Tensor, v_BLGD: Tensor, mask_BL: Tensor | None = None, /) -> tuple[Tensor, Tensor]:
    """Compute attention as `seqpar.types.protocols.Core` says, each query of each head by itself."""
    group = q_BLHD.shape[2] // k_BLGD.shape[2]
    q_BHLD = q_BLHD.transpose(1, 2)
    k_BHLD, v_BHLD = (x.transpose(1, 2).repeat_interleave(group, dim=1) for x in (k_BLGD, v_BLGD))
    scores = _sums(q_BHLD, k_BHLD) * q_BLHD.shape[3] ** -0.5
    if mask_BL is not None:
        mask_BHLL = mask_BL[:, None, None]
        is_bool = mask_BL.dtype == torch.bool
        scores = scores.masked_fill(~mask_BHLL, -torch.inf) if is_bool else scores + mask_BHLL
    most = scores.amax(-1, keepdim=True)
    weights = _filled(torch.exp, scores - most)  # also where no `RowByRow` is around
    total = weights.sum(-1, keepdim=True)
    out_BHLD = _sums(weights / total, v_BHLD.mT.contiguous())
    return out_BHLD.transpose(1, 2).contiguous(), (most + _filled(torch.log, total)).squeeze(-1)


class RowByRow(TorchDispatchMode):
    """Computes matrix products row by row, and curves in whole vectors, also where a module calls for them."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in CURVES and args[0].numel():
            return _filled(lambda x: func(x, *args[1:], **(kwargs or {})), args[0])
        return PRODUCTS.get(func, func)(*args, **(kwargs or {}))


def _mm(x_RE: Tensor, y_EF: Tensor) -> Tensor:
    return _sums(x_RE, y_EF.mT.contiguous())


def _addmm(bias: Tensor, x_RE: Tensor, y_EF: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """Compute a product with a bias in its sums: it has other bits than a product to which a bias is added later."""
    assert beta == alpha == 1
    if bias.dim() > 1:
        return _mm(x_RE, y_EF) + bias
    return _mm(torch.cat([x_RE.new_ones(len(x_RE), 1), x_RE], dim=1), torch.cat([bias[None], y_EF]))


PRODUCTS: dict[Any, Any] = {
    aten.mm.default: _mm,
    aten.addmm.default: _addmm,
    aten.addmm_.default: lambda x, *args, **kwargs: x.copy_(_addmm(x, *args, **kwargs)),
    aten.mm.out: lambda x, y, *, out: out.copy_(_mm(x, y)),
    aten.addmm.out: lambda *args, out, **kwargs: out.copy_(_addmm(*args, **kwargs)),
    aten.bmm.default: _mm,
}


@contextmanager
def by_rows() -> Iterator[None]:
    """Compute all products and attention of this process row by row."""
    with pytest.MonkeyPatch.context() as patch, RowByRow():
        patch.setattr(sdpa, "attend", attend)
        yield


@contextmanager
def exact_mode() -> Iterator[None]:
    """Let this process be in exact mode, which a CPU's own products and attentions are refused for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact, "is_on", lambda: True)
        patch.setattr(sdpa, "invariant", lambda *_: None)
        yield
