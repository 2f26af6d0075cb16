"""Arithmetic on a CPU whose rows do not depend on each other, as that of a GPU in exact mode: slow, for tests of bits.

A CPU's matrix products, like a GPU's outside of exact mode, round a row otherwise if there are other rows beside it.
Here every row is a product of its own, of inputs that begin at aligned addresses. A CPU also computes the last numbers
of a tensor by other functions than those before, which fill its vectors; here all numbers fill them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from seqpar.local import sdpa
from seqpar.ranks import exact
from seqpar.types.masks import is_kept

aten = torch.ops.aten
VECTORS = 64  # numbers; the vectors of every CPU divide it
CURVES = {getattr(aten, name).default for name in ("silu", "gelu", "exp", "sin", "cos", "tanh", "sigmoid")}


def attend(q_BLHD: Tensor, k_BLGD: Tensor, v_BLGD: Tensor, mask_BL: Tensor | None = None, /) -> tuple[Tensor, Tensor]:
    """Compute attention as `seqpar.types.protocols.Core` says, each query of each head by itself."""
    group, out = q_BLHD.shape[2] // k_BLGD.shape[2], torch.empty_like(q_BLHD, memory_format=torch.contiguous_format)
    lse = q_BLHD.new_empty(len(q_BLHD), q_BLHD.shape[2], q_BLHD.shape[1])
    for row, head in torch.cartesian_prod(torch.arange(len(q_BLHD)), torch.arange(q_BLHD.shape[2])).tolist():
        k, v = (x[row, :, head // group].clone() for x in (k_BLGD, v_BLGD))
        for query in range(q_BLHD.shape[1]):
            scores = k.mv(q_BLHD[row, query, head].clone()) * k.shape[1] ** -0.5
            if mask_BL is not None:
                scores = scores.masked_fill(~is_kept(mask_BL[row]), -torch.inf)
            out[row, query, head] = v.t().mv(scores.softmax(0))
            lse[row, head, query] = scores.logsumexp(0)
    return out, lse


class RowByRow(TorchDispatchMode):
    """Computes matrix products row by row, and curves in whole vectors, also where a module calls for them."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """See `TorchDispatchMode`."""
        if func in CURVES and args[0].numel():
            filled = F.pad(args[0].flatten(), (0, -args[0].numel() % VECTORS))
            return func(filled, *args[1:], **(kwargs or {}))[: args[0].numel()].view(args[0].shape)
        return PRODUCTS.get(func, func)(*args, **(kwargs or {}))


def _mm(x_RE: Tensor, y_EF: Tensor) -> Tensor:
    columns_FE = y_EF.t().contiguous()
    rows = [columns_FE.mv(row.clone()) for row in x_RE]
    return torch.stack(rows) if rows else x_RE.new_zeros(0, y_EF.shape[1])


def _addmm(bias: Tensor, x_RE: Tensor, y_EF: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """Compute a product with a bias in its sums: it has other bits than a product to which a bias is added later."""
    assert beta == alpha == 1
    if bias.dim() > 1:
        return _mm(x_RE, y_EF) + bias
    return _mm(torch.cat([x_RE.new_ones(len(x_RE), 1), x_RE], dim=1), torch.cat([bias[None], y_EF]))


def _bmm(x_BRE: Tensor, y_BEF: Tensor) -> Tensor:
    return torch.stack([_mm(x, y) for x, y in zip(x_BRE, y_BEF, strict=True)])


PRODUCTS: dict[Any, Any] = {
    aten.mm.default: _mm,
    aten.addmm.default: _addmm,
    aten.addmm_.default: lambda x, *args, **kwargs: x.copy_(_addmm(x, *args, **kwargs)),
    aten.mm.out: lambda x, y, *, out: out.copy_(_mm(x, y)),
    aten.addmm.out: lambda *args, out, **kwargs: out.copy_(_addmm(*args, **kwargs)),
    aten.bmm.default: _bmm,
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
