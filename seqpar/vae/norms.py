"""Rules of norms: statistics over the strips of all ranks, and one kernel for a norm and the SiLU that follows it.

A group norm returns a tensor that is not written yet (`Later`), and `silu` writes norm and SiLU in one pass. Moments of
groups are combined in the order of the ranks, so that all ranks get the same bits. In channels-last memory the bias of
a convolution is added by the norm or sum that follows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from seqpar.kernels import group_norm as kernels
from seqpar.kernels import residual
from seqpar.kernels.channel_norm import channel_norm
from seqpar.vae.later import Biased, ChannelNorm, GroupNorm
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
    how = place.later.how(input)
    if how is not None and not isinstance(how, Biased):
        place.later.write(input)
    shift = how.bias if isinstance(how, Biased) else None
    x_NC = how.x if isinstance(how, Biased) else kernels.dense(input)[0]
    moments_NG3 = combine(place, kernels.moments(x_NC, num_groups, shift))
    return place.later.add(x_NC, GroupNorm(x_NC, moments_NG3, kernels.Affine(weight, bias, eps, shift)))


def combine(place: Place, moments_NG3: Tensor) -> Tensor:
    """Return the moments of groups over all strips, from those of this rank's."""
    return moments_NG3 if place.cut.axis.size == 1 else kernels.combine(place.exchanges.every(moments_NG3))


def silu(place: Place, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Apply the rule of `torch.nn.functional.silu`: together with the norm before it, if that is not written yet."""
    return _silu(place, function, *args, **kwargs)


def _silu(place: Place, function: Callable[..., Any], input: Tensor, inplace: bool = False) -> Tensor:
    how = place.later.how(input)
    if how is None:
        if inplace:
            place.later.finish()  # a norm that is not written yet may read what this overwrites
        return function(input, inplace=inplace)
    if inplace:
        place.later.write(input, silu=True)
        return input
    out = torch.empty_like(input)
    how.write(out, silu=True)
    return out


def over_channels(x_NC: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the RMSNorm of x, (N, C, ...), over its channels; weight and bias have C elements.

    A function mode sees it, like a function of torch.
    """
    if has_torch_function((x_NC,)):
        return handle_torch_function(over_channels, (x_NC,), x_NC, weight, bias)
    return channel_norm(x_NC, weight.flatten(), None if bias is None else bias.flatten())


def norm_of_channels(
    place: Place, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """Apply the rule of `over_channels`, which is local."""
    x_NC, weight, bias = args
    x_NC, _ = kernels.dense(x_NC)
    return place.later.add(x_NC, ChannelNorm(x_NC, weight.flatten(), None if bias is None else bias.flatten()))


def add(place: Place, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Apply the rule of addition, which is local: biases of convolutions that were left out are added as well."""
    pairs: list[residual.Shifted] = []
    for x in args:
        how = place.later.how(x)
        pairs.append((how.x, how.bias) if isinstance(how, Biased) else (x, None))
    alike = len(args) == 2 and not kwargs and all(isinstance(x, Tensor) for x in args)
    if alike and any(bias is not None for _, bias in pairs) and _same(*args) and not _norm_waits(place, *args):
        first, second = pairs
        return residual.add(first, second)
    place.later.settle(function, args, kwargs)
    return function(*args, **kwargs)


def _same(x: Tensor, y: Tensor) -> bool:
    return (x.shape, x.stride(), x.dtype, x.device) == (y.shape, y.stride(), y.dtype, y.device)


def _norm_waits(place: Place, *given: Tensor) -> bool:
    return any(place.later.how(x) is not None and not isinstance(place.later.how(x), Biased) for x in given)


def left_out(place: Place, input: Tensor, bias: Tensor | None) -> bool:
    """Return whether a convolution of this input leaves out its bias for what follows: in channels-last memory."""
    return bias is not None and bias.dtype == input.dtype and kernels.places_last(input) is False


def biased(place: Place, y: Tensor, bias: Tensor) -> Tensor:
    """Return the output y of a convolution without its bias, which is added when y is read."""
    if kernels.places_last(y) is False:
        return place.later.keep(y, Biased(y.detach(), bias))
    return y.add_(bias.view(-1, *[1] * (y.ndim - 2)))


def divide(place: Place, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Apply the rule of division, which is local; modules in `SCALED` by the number 1 save the copy of plain torch.

    Elsewhere the input may have another user, who would see what an in-place function makes of the result.
    """
    if len(args) == 2 and not kwargs and isinstance(args[1], (int, float)) and args[1] == 1:
        x = args[0]
        if isinstance(x, Tensor) and x.is_floating_point() and type(place.module()).__name__ in SCALED:
            return x
    return function(*args, **kwargs)


SCALED = frozenset(("ResnetBlock2D", "Attention"))
"""Modules of diffusers that divide a sum that nobody else has by their scale, which is nearly always 1."""


@contextmanager
def single_functions(vae: nn.Module) -> Iterator[None]:
    """While it is entered, the modules in `FORWARDS` call one function each, which the rules then see.

    Wan and Qwen-Image write these as many functions, with conversions to fp32 in between. A module whose `forward` was
    replaced by somebody else, to load its weights for example, is left alone. The VAE object itself is changed
    meanwhile (and `ParallelVAE` sets its `use_tiling`), so two threads must not call one VAE at the same time.
    """
    changed: list[nn.Module] = []
    try:
        for module in vae.modules():
            forward = FORWARDS.get(type(module).__name__)
            if forward is not None and "forward" not in vars(module):
                module.forward = partial(forward, module)
                changed.append(module)
        yield
    finally:
        for module in changed:
            del module.forward


def _norm(module: Any, x: Tensor) -> Tensor:
    if not module.channel_first:
        return type(module).forward(module, x)
    bias = module.bias if isinstance(module.bias, Tensor) else None
    return over_channels(x, module.gamma, bias)


def _upsample(module: Any, x: Tensor) -> Tensor:
    """Upsample in x's dtype; a nearest one only copies, so that the bits are those of a conversion to fp32 and back.

    fp64 is left to diffusers, which rounds it to fp32.
    """
    if not module.mode.startswith("nearest") or x.dtype == torch.float64:
        return type(module).forward(module, x)
    return F.interpolate(x, size=module.size, scale_factor=module.scale_factor, mode=module.mode)


FORWARDS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "WanRMS_norm": _norm,
    "QwenImageRMS_norm": _norm,
    "WanUpsample": _upsample,
    "QwenImageUpsample": _upsample,
}
