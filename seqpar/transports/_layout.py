"""`HeadLayout` says which heads and tokens each rank has before and after an exchange of heads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from seqpar.mesh.shard import Shard


@dataclass(frozen=True)
class HeadLayout:
    """One attention layer over one axis: rank r holds tokens[r] tokens before and counts(r) heads after the exchange.

    Heads are sharded in whole groups (a key-value head with its query heads), so a rank may get none.
    """

    batch: int
    tokens: tuple[int, ...]
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    def __post_init__(self) -> None:
        if self.kv_heads < 1 or self.heads % self.kv_heads:
            raise ValueError(f"got {self.heads} query and {self.kv_heads} key-value heads, expected a multiple")

    @staticmethod
    def of(tokens: tuple[int, ...], q_BlHD: Tensor, k_BlGD: Tensor) -> HeadLayout:
        """Return the layout for these queries and keys, tokens[r] tokens on rank r."""
        batch, _, heads, dim = q_BlHD.shape
        return HeadLayout(batch, tokens, heads, k_BlGD.shape[2], dim, q_BlHD.dtype, q_BlHD.device)

    def kv_slice(self, rank: int) -> slice:
        """Return the range of key-value heads of `rank`."""
        return Shard(self.kv_heads, len(self.tokens)).slice(rank)

    def q_slice(self, rank: int) -> slice:
        """Return the range of query heads of `rank`."""
        group, kv = self.heads // self.kv_heads, self.kv_slice(rank)
        return slice(kv.start * group, kv.stop * group)

    def counts(self, rank: int) -> tuple[int, int]:
        """Return the numbers of query heads and of key-value heads of `rank`."""
        q, kv = self.q_slice(rank), self.kv_slice(rank)
        return q.stop - q.start, kv.stop - kv.start
