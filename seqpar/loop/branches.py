"""Guidance's branches on this rank: the cfg axis exchanges them, and a guided prediction may be rescaled."""

from __future__ import annotations

import torch
from torch import Tensor

from seqpar.graphs.exchanges import Keeper
from seqpar.kernels.ddim import guide
from seqpar.loop.request import Course
from seqpar.loop.state import State

Branches = tuple[Tensor, Tensor | None]
"""The model's outputs with the prompt and without it (None if there is one branch), (n, l, at least C*p*p) each."""


def parted(out: Tensor, state: State, name: str, course: Course, keeper: Keeper, user: object) -> Branches:
    """Return both branches of a stream's output on this rank, from the other rank of the cfg axis where there is one.

    name: the stream's. user: what needs the exchange as long as it exists.
    """
    if not course.request.guidance.on:
        return out, None
    cfg = keeper.mesh.cfg
    if cfg.size == 1:
        cond, uncond = out.chunk(2)
        return cond, uncond
    # rank 0 of the cfg axis computes the conditional branch, rank 1 the unconditional one
    used = out[..., : state.tokens.shape[-1] * (2 if course.decision.learned else 1)].to(state.tokens.dtype)
    cond, uncond = keeper.gathered((f"branches of {name}", state.shard), cfg, used[None], user=user)
    return cond, uncond


def rescaled(
    branches: tuple[Tensor, Tensor],
    state: State,
    name: str,
    scale: Tensor,
    course: Course,
    keeper: Keeper,
    user: object,
) -> Branches:
    """Return the guided prediction of both branches, rescaled, as the only branch.

    Rescaling brings a share of it to the standard deviation of the conditional prediction over the whole latent.
    scale: guidance's at this step, a device scalar. name, user: see `parted`.
    """
    (cond, uncond), share = branches, course.request.guidance.rescale
    guided = guide(state.tokens, cond, uncond, scale, state.guided_width)
    both = torch.stack((cond[..., : guided.shape[-1]].to(guided.dtype), guided)).double()
    sums = torch.stack((both.sum(dim=(2, 3)), both.square().sum(dim=(2, 3))))
    if keeper.axis.size > 1:
        sums = keeper.gathered(f"deviations of {name}", keeper.axis, sums[None], user=user).sum(dim=0)
    total, squares = sums
    variance = squares - total.square() / (state.shard.total * guided.shape[-1])
    factor = (variance[0] / variance[1]).sqrt().to(guided.dtype)[:, None, None]
    mixed = share * (factor * guided) + (1 - share) * guided
    if course.decision.learned:  # the conditional branch's variances follow the prediction
        width = guided.shape[-1]
        mixed = torch.cat((mixed, cond[..., width : 2 * width].to(mixed.dtype)), dim=-1)
    return mixed, None
