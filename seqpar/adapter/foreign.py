"""What others have put onto a transformer's modules: hooks, replaced forwards, processors, quantised layers.

Such code may read other batch rows or other tokens, and may keep something from one call to the next. Rows and calls
can stay together: every rank then computes whole batches, at the time of the call. Tokens cannot, where ranks split
them: what surely needs all tokens is refused, and what may need them is named, because nobody can tell from outside.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from math import isclose
from typing import Any

import torch
from torch import nn

from seqpar.adapter import processors

# where classes and functions are defined that neither read nor keep anything: they convert or parametrise weights
PASSIVE = ("seqpar.", "peft.", "torch.nn.utils.", "torch._dynamo.", "diffusers.hooks.layerwise_casting")
# where hooks are defined that compute each token by itself: they skip layers, or extrapolate from earlier steps
BY_TOKEN = (
    "diffusers.hooks.faster_cache",
    "diffusers.hooks.layer_skip",
    "diffusers.hooks.mag_cache",
    "diffusers.hooks.pyramid_attention_broadcast",
    "diffusers.hooks.taylorseer_cache",
)
# hooks of diffusers that read the tokens of a rank as if they were all tokens
READS_ALL_TOKENS = {
    "FBCHeadBlockHook": "FirstBlockCache decides by a mean over a rank's own tokens what to compute again",
    "SeaCacheRootHook": "SeaCache decides by a rank's own tokens what to compute again",
    "SeaCacheLeaderBlockHook": "SeaCache decides by a rank's own tokens what to compute again",
    "SmoothedEnergyGuidanceHook": "smoothed energy guidance blurs the queries of the whole picture",
}
DYNAMIC = ("torch.ao.nn.quantized.dynamic", "torch.ao.nn.intrinsic.quantized.dynamic")
BEFORE = "_seqpar_before"  # where a parallelized transformer keeps what its release puts back
SHOWN, WIDTH = 3, 60  # things that are named in a line, and characters of each


@dataclass(frozen=True)
class Found:
    """Something of others. path: of the submodule, "" for the transformer itself. kind: what it is, with its name."""

    path: str
    kind: str
    what: Any

    def __str__(self) -> str:
        return f"{self.kind} is on {self.path or 'the transformer'}"


@dataclass(frozen=True)
class Foreign:
    """What `look` has found. hooks: and replaced forwards. coupled: why rows cannot be computed apart, or None.

    named: what may need all tokens, as a text of limited length that is equal on all ranks; "" for nothing.
    """

    hooks: tuple[Found, ...] = ()
    coupled: str | None = None
    named: str = ""


def look(module: nn.Module) -> Foreign:
    """Return what others have put onto a transformer and its submodules; this takes milliseconds."""
    hooks, own = tuple(hooks_of(module)), tuple(_processors_of(module))
    first = next(iter((*hooks, *own, *_quantised(module))), None)
    may_need_all = [one for one in (*hooks, *own) if one.path and not _home(one.what).startswith(BY_TOKEN)]
    coupled = None if first is None else f"{first} and may read other rows or keep something between calls"
    return Foreign(hooks, coupled, _named(may_need_all))


def refuse_split(module: nn.Module) -> None:
    """Raise ValueError for what would surely compute something else from a rank's own tokens."""
    reasons = [_reads_all_tokens(one.what, str(one)) for one in hooks_of(module)]
    reasons += [f"{one}, with one scale for all tokens" for one in _quantised(module)]
    reason = next((reason for reason in reasons if reason is not None), None)
    if reason is not None:
        raise ValueError(
            f"got {type(module).__name__} on several ranks that split its tokens, expected one that needs no others: "
            f"{reason}; remove that (disable_cache() for a cache), or use cfg= or data= ranks instead"
        )


def hooks_of(module: nn.Module) -> Iterator[Found]:
    """Yield hooks, and forwards that are not of a submodule's class.

    Hooks of torch on the transformer itself are left out: they run around a call, on all tokens.
    """
    for path, one in module.named_modules():
        hooks = [hook for hook in _of_diffusers(one) if not _home(hook).startswith(PASSIVE)]
        yield from (Found(path, f"hook {type(hook).__name__}", hook) for hook in hooks)
        hooks = (*one._forward_pre_hooks.values(), *one._forward_hooks.values()) if path else ()
        yield from (Found(path, f"hook {_name(x)}", x) for x in hooks if not _home(x).startswith(PASSIVE))
        forward = _unhooked(_set_on(one))
        own = forward is None or getattr(forward, "__func__", None) is type(one).forward
        if path and hasattr(one, "_hf_hook"):
            yield Found(path, f"accelerate's hook {type(one._hf_hook).__name__}", one._hf_hook)
        elif not own and not _home(forward).startswith(PASSIVE):
            yield Found(path, f"forward {_name(forward)}", forward)
        elif is_patched(type(one), "forward"):
            yield Found(path, f"class with the forward {_name(type(one).forward)}", type(one).forward)


def is_patched(kind: type, method: str) -> bool:
    """Return whether a method was put onto a class by code of another package than the class's.

    A wrapper copies the names of what it wraps, but not the globals of the code.
    """
    code: Any = getattr(kind, method)
    home = str(getattr(code, "__globals__", {}).get("__name__", kind.__module__))
    owners = {base.__module__.partition(".")[0] for base in kind.__mro__}
    return home.partition(".")[0] not in owners | {"torch", "diffusers", "accelerate", "peft", "seqpar"}


def _set_on(one: nn.Module) -> Any:
    """Return the forward that was set on an object; of a parallelized transformer, what it had before."""
    before = vars(one).get(BEFORE)
    return vars(one).get("forward") if before is None else before.attributes.get("forward")


def _processors_of(module: nn.Module) -> Iterator[Found]:
    """Yield attention processors that may read other rows: a user's own, and those of perturbed attention."""
    for path, one in module.named_modules():
        processor = processors.own_of(getattr(one, "processor", None))
        home, name = _home(processor), type(processor).__name__
        known = home.startswith(("diffusers.models.", "seqpar.")) and "PAG" not in name
        if processor is not None and (not known or is_patched(type(processor), "__call__")):
            yield Found(path, f"processor {name}", processor)


def _quantised(module: nn.Module) -> Iterator[Found]:
    """Yield layers of blocks that are quantised with one scale for all rows and tokens of a call."""
    for path, one in module.named_modules():
        dtype = getattr(getattr(one, "_packed_params", None), "dtype", None)
        if (
            type(one).__module__.startswith(DYNAMIC)
            and dtype != torch.float16
            and ("blocks" in path or "layers" in path)
        ):
            yield Found(path, f"dynamically quantised {type(one).__name__}", one)


def _reads_all_tokens(hook: Any, shown: str) -> str | None:
    kind = type(hook).__name__
    if kind in READS_ALL_TOKENS:
        return READS_ALL_TOKENS[kind]
    if kind == "MagCacheHeadHook" and hook.config.calibrate:
        return "MagCache measures its ratios on a rank's own tokens while it calibrates"
    if kind.endswith("SkipHook") and not isclose(getattr(hook, "dropout", 1.0), 1.0):
        return f"{shown} and draws random numbers for a rank's own tokens"
    return None


def _named(every: Iterable[Found]) -> str:
    places: dict[str, list[str]] = {}
    for one in every:
        places.setdefault(one.kind[:WIDTH], []).append(one.path)
    shown = [f"{kind} on {_counted(paths)}" for kind, paths in list(places.items())[:SHOWN]]
    return ", ".join([*shown, *([f"{len(places) - SHOWN} others"] if len(places) > SHOWN else [])])


def _counted(paths: list[str]) -> str:
    return paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"


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
