"""Finds what besides attention may couple a transformer's tokens: hooks, replaced forwards, quantised layers.

On several ranks all of them see the tokens of one rank. What surely needs all tokens is refused; what may need them is
named, because nobody can tell from outside.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from seqpar.adapter.cuts import Cuts

# where functions and classes are defined that compute each token by itself, or skip, cast and extrapolate all of them
HARMLESS = (
    "seqpar.",
    "peft.",
    "torch.nn.utils.",
    "torch._dynamo.",
    "diffusers.hooks.layer_skip",
    "diffusers.hooks.layerwise_casting",
    "diffusers.hooks.mag_cache",
    "diffusers.hooks.pyramid_attention_broadcast",
    "diffusers.hooks.taylorseer_cache",
)
BLURS = "diffusers.hooks.smoothed_energy_guidance_utils"
DYNAMIC = ("torch.ao.nn.quantized.dynamic", "torch.ao.nn.intrinsic.quantized.dynamic")
SHOWN, WIDTH = 3, 60  # hooks that are named, and characters of each


def refuse(module: nn.Module, cuts: Cuts) -> None:
    """Raise ValueError for what would surely compute something else from a rank's own tokens."""
    blocks = {path.partition(".")[0] for path in cuts.attention}
    for path, one in module.named_modules():
        reason = _why_not(one) if path.partition(".")[0] in blocks else None
        if reason is not None:
            raise ValueError(f"got {reason[0]} at {path} on several ranks that split the tokens, expected {reason[1]}")


def scales_tensors(one: nn.Module) -> bool:
    """Return whether a layer quantises its whole input with one scale, which couples tokens and batch rows."""
    packed = getattr(one, "_packed_params", None)
    return type(one).__module__.startswith(DYNAMIC) and getattr(packed, "dtype", None) != torch.float16


def _why_not(one: nn.Module) -> tuple[str, str] | None:
    """Return what is got and what is expected, or None."""
    if scales_tensors(one):
        told = f"a dynamically quantised {type(one).__name__}, with one scale for all tokens,"
        return told, "a scale for each token; quantise the weights alone, or use one rank"
    if any(_home(hook).startswith(BLURS) for hook in _of_diffusers(one)):
        return "smoothed energy guidance, which blurs the image's queries,", "none; use cfg= or data= ranks instead"
    return None


def foreign(module: nn.Module) -> str:
    """Return what others put on the submodules, as a text of limited length that is equal on all ranks; "" for nothing.

    The transformer's own hooks are left out: they run around a call, on all tokens.
    """
    places: dict[str, list[str]] = {}
    for path, one in module.named_modules():
        for name in _foreign(one) if path else ():
            places.setdefault(name[:WIDTH], []).append(path)
    told = [f"{name} on {_counted(paths)}" for name, paths in list(places.items())[:SHOWN]]
    return ", ".join([*told, *([f"{len(places) - SHOWN} others"] if len(places) > SHOWN else [])])


def _counted(paths: list[str]) -> str:
    return paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"


def _foreign(one: nn.Module) -> Iterator[str]:
    """Yield the names of hooks and of a forward that are not of this submodule's class, or known to be harmless."""
    if type(one).__module__.startswith(HARMLESS):
        return
    hooks = (*_of_diffusers(one), *one._forward_pre_hooks.values(), *one._forward_hooks.values())
    yield from (f"hook {_name(hook)}" for hook in hooks if not _home(hook).startswith(HARMLESS))
    forward = _unhooked(vars(one).get("forward"))
    own = forward is None or getattr(forward, "__func__", None) is type(one).forward
    if not own and not _home(forward).startswith(HARMLESS):
        yield f"forward {_name(forward)}"


def _of_diffusers(one: nn.Module) -> tuple[Any, ...]:
    registry = vars(one).get("_diffusers_hook")
    return tuple(registry.hooks.values()) if registry is not None else ()


def _unhooked(forward: Any) -> Any:
    """Return the forward inside of those that diffusers' hooks have put around it."""
    while isinstance(forward, partial) and _home(forward.func) == "diffusers.hooks.hooks":
        forward = vars(forward)["__wrapped__"]
    return forward


def _home(what: Any) -> str:
    """Return the module in which a function or the class of an object is defined."""
    return f"{getattr(what, '__module__', None)}"


def _name(what: Any) -> str:
    return getattr(what, "__qualname__", type(what).__name__)
