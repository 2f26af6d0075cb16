"""Attention of tokens that every rank holds whole to tokens of which each rank holds a share.

So LTX-2's sound attends to its video.
Each rank attends to the keys of its own share, and the results are merged by their log-sum-exp: an all-gather brings
them to every rank, which adds them up in the same order, so that all ranks go on with the same bits.
When it wins: always where such queries are fewer than the keys of a share. For 126 tokens of sound and 6144 of video,
a block of LTX-2 gathers 1 MB of fp32 results from each rank, where the keys and values of the video are 50 MB. Merging
rounds, so that exact mode gathers these.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seqpar.mesh.shard import Shard
from seqpar.transformer.forward import Ranks


def attended(ranks: Ranks, q_BLHD: Tensor, k_BlGD: Tensor, v_BlGD: Tensor, total: int) -> Tensor:
    """Return attention (B, L, H, D) of whole queries to the keys of all ranks, the same on each.

    k, v: of this rank's tokens; every rank has one. total: the number of tokens of all ranks.
    """
    core = ranks.local(q_BLHD, False)
    if ranks.axis.size == 1:
        return core(q_BLHD, k_BlGD, v_BlGD)[0]
    if ranks.plan.exact:
        use, both = ("keys of whole queries", total), torch.cat([k_BlGD, v_BlGD], dim=2).movedim(1, 0)
        whole = ranks.keeper.gathered(use, ranks.axis, both, Shard(total, ranks.axis.size).sizes)
        return core(q_BLHD, *whole.movedim(0, 1).chunk(2, dim=2))[0]
    out_BLHD, lse_BHL = core(q_BLHD, k_BlGD, v_BlGD)
    mine = torch.cat([out_BLHD.to(lse_BHL.dtype), lse_BHL.transpose(1, 2)[..., None]], dim=-1)
    every = ranks.keeper.gathered("attention of whole queries", ranks.axis, mine[None])
    shares = torch.softmax(every[..., -1:], dim=0)
    return (every[..., :-1] * shares).sum(0).to(q_BLHD.dtype)
