"""What a transformer's own modules compute otherwise in exact mode, so that their rows do not depend on each other.

Attention that joins the ranks is none of it: `seats.py` replaces it inside of this mode.
When it wins: in exact mode only; see `seqpar.mesh.exact`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from seqpar.mesh.exact import linear
from seqpar.mesh.shard import JointShard, Shard
from seqpar.transformer import masks
from seqpar.transformer.attention import fitting
from seqpar.transformer.forward import Ranks
from seqpar.transformer.seats import arguments_of


class Exactly(TorchFunctionMode):
    """Replaces torch's attention and linear layers while a transformer runs.

    Attention of split queries to keys that are whole on every rank is the planned local one, because torch's own may
    choose its tiles by the number of queries. Linear layers read contiguous rows, because torch adds the bias of others
    after it has rounded the product, and only the tokens of several ranks lie apart; very few rows become more.
    """

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self._ranks = ranks

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """See `TorchFunctionMode`."""
        options = kwargs or {}
        if func is F.linear:
            return linear(*args, **options)
        if func is F.scaled_dot_product_attention and not options.get("is_causal"):
            out = self._attention(*arguments_of(*args, **options))
            return func(*args, **options) if out is None else out.transpose(1, 2)
        return func(*args, **options)

    def _attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor | None:
        """Return attention (B, l, H, D), or None for a mask that differs between queries, which then are whole, too."""
        if mask is None or (mask.dim() > 2 and masks.is_by_key(mask, len(q))):
            return self._attended(q, k, v, mask, scale)
        if mask.dim() != 4 or mask.shape[2] > 1:
            return None
        # a mask for each head, as diffusers repeats them: each head becomes a row of the batch
        batch, _, heads, _ = q.shape
        q, k, v = (x.repeat_interleave(heads // x.shape[2], 2).transpose(1, 2).flatten(0, 1) for x in (q, k, v))
        rows = mask.expand(batch, heads, 1, -1).flatten(0, 1)
        out = self._attended(q[:, :, None], k[:, :, None], v[:, :, None], rows, scale)
        return out[:, :, 0].unflatten(0, (batch, heads)).transpose(1, 2)

    def _attended(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
        whole = JointShard((Shard(k.shape[1], 1),))
        bias = None if mask is None else masks.from_whole(mask, len(q), whole, q.dtype)
        return self._ranks.local(q, bias is not None)(*fitting(q, k, v, scale), bias)[0]
