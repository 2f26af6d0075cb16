"""Rules of norms: group norms take their statistics over the strips of all ranks.

Each rank sends (mean, sum of squared deviations) of each group; they are combined in the order of the ranks, by the
formula of Chan, Golub and LeVeque, so that all ranks get the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from seqpar.vae.place import Place


def group_norm(place: Place, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Apply the rule of `torch.nn.functional.group_norm` to a strip (N, C, ...)."""
    return _group_norm(place, *args, **kwargs)


def _group_norm(
    place: Place,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    x_NCl = input
    n, channels = x_NCl.shape[:2]
    exact = torch.float64 if x_NCl.dtype == torch.float64 else torch.float32
    x_NGk = x_NCl.reshape(n, num_groups, -1).to(exact)
    var_NG, mean_NG = torch.var_mean(x_NGk, dim=-1, correction=0)
    mean_NG, var_NG = combine(place, mean_NG, var_NG, x_NGk.shape[-1])
    # a value for each channel, so that the memory format of x stays
    shape = (n, channels, *(1,) * (x_NCl.ndim - 2))
    mean_NC, scale_NC = (x.repeat_interleave(channels // num_groups, dim=1) for x in (mean_NG, (var_NG + eps).rsqrt()))
    if weight is not None:
        scale_NC = scale_NC * weight.to(exact)
    y_NCl = (x_NCl.to(exact) - mean_NC.view(shape)) * scale_NC.view(shape)
    if bias is not None:
        y_NCl = y_NCl + bias.to(exact).view(1, *shape[1:])
    return y_NCl.to(x_NCl.dtype)


def combine(place: Place, mean_NG: Tensor, var_NG: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return mean and variance over all strips from those of this rank's, each over `count` elements of a group."""
    if place.cut.axis.size == 1:
        return mean_NG, var_NG
    means_RNG, vars_RNG = place.exchanges.every(torch.stack((mean_NG, var_NG))).unbind(1)
    weights_R = [size / sum(place.cut.sizes) for size in place.cut.sizes]
    mean_NG = sum(weight * mean for weight, mean in zip(weights_R, means_RNG, strict=True))  # pyright: ignore
    spread = zip(weights_R, means_RNG, vars_RNG, strict=True)
    return mean_NG, sum(weight * (var + (mean - mean_NG) ** 2) for weight, mean, var in spread)  # pyright: ignore
