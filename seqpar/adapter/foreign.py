"""What others have put onto a transformer's modules: hooks, replaced forwards, attention processors.

Such code may read other batch rows, may keep something from one call to the next, and may come and go between two
calls. `look` says which of it is there, so that a call can then be computed as a plain transformer would: with all
rows of its batch, and at the time at which it was made. It takes milliseconds, and is repeated only after a change.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import isclose
from typing import Any

from torch import nn

from seqpar.adapter import processors

OURS = "seqpar"  # diffusers' hooks of these names are ours
# hooks that change neither tokens nor rows: they only convert the weights of a layer while it runs
HARMLESS = frozenset({"LayerwiseCastingHook", "PeftInputAutocastDisableHook"})
# hooks of diffusers that read the tokens of a rank as if they were all tokens
READS_ALL_TOKENS = {
    "FBCHeadBlockHook": "FirstBlockCache decides by a mean over a rank's own tokens what to compute again",
    "SeaCacheRootHook": "SeaCache decides by a rank's own tokens what to compute again",
    "SeaCacheLeaderBlockHook": "SeaCache decides by a rank's own tokens what to compute again",
    "SmoothedEnergyGuidanceHook": "smoothed energy guidance blurs the queries of the whole picture",
}


@dataclass(frozen=True)
class Hook:
    """A hook, or a replaced forward, that is not ours. path: of the submodule, "" for the transformer itself.

    hook: the object; kind: the name of its class, or what it is.
    """

    path: str
    kind: str
    hook: Any

    def __str__(self) -> str:
        return f"{self.kind} is on {self.path or 'the transformer'}"


@dataclass(frozen=True)
class Foreign:
    """What `look` has found. hooks: without harmless ones. coupled: why rows cannot be computed apart, or None."""

    hooks: tuple[Hook, ...] = ()
    coupled: str | None = None


def look(module: nn.Module) -> Foreign:
    """Return what others have put onto a transformer and its submodules."""
    hooks = tuple(hooks_of(module))
    return Foreign(hooks, _coupled(module, hooks))


def refuse_split(module: nn.Module, hooks: Iterable[Hook]) -> None:
    """Raise ValueError if a hook reads the tokens of a rank as if they were all tokens."""
    reason = next((reason for hook in hooks if (reason := _reads_all_tokens(hook)) is not None), None)
    if reason is not None:
        raise ValueError(
            f"got a {type(module).__name__} whose tokens cannot be split, expected one without such hooks: {reason}; "
            f"remove them (disable_cache() for a cache), or use no ranks on ulysses and ring"
        )


def hooks_of(module: nn.Module) -> Iterator[Hook]:
    """Yield the hooks and replaced forwards that are neither ours nor harmless.

    Of the transformer itself only diffusers' hooks are looked at: torch's run outside of its forward, where all tokens
    are together.
    """
    for path, one in module.named_modules():
        registry: Any = getattr(one, "_diffusers_hook", None)
        hooks: dict[str, Any] = {} if registry is None else registry.hooks
        for name, hook in hooks.items():
            if not name.startswith(OURS) and type(hook).__name__ not in HARMLESS:
                yield Hook(path, f"diffusers' {type(hook).__name__}", hook)
        if not path:
            continue
        for hook in (*one._forward_pre_hooks.values(), *one._forward_hooks.values()):
            yield Hook(path, "a forward hook", hook)
        if hasattr(one, "_hf_hook"):
            yield Hook(path, f"accelerate's {type(one._hf_hook).__name__}", one._hf_hook)
        elif _is_replaced(one, len(hooks)):
            yield Hook(path, "a replaced forward", vars(one)["forward"])


def _is_replaced(module: nn.Module, hooks: int) -> bool:
    """Return whether a module's forward is neither its class's own nor that with diffusers' hooks around it.

    hooks: how many of diffusers' it has; each puts a function around the forward that was there, as `__wrapped__`.
    """
    forward: Any = vars(module).get("forward")
    for _ in range(hooks):
        if not hasattr(forward, "__wrapped__"):
            return True
        forward = forward.__wrapped__
    return forward is not None and getattr(forward, "__func__", None) is not type(module).forward


def _reads_all_tokens(hook: Hook) -> str | None:
    kind = type(hook.hook).__name__
    if kind in READS_ALL_TOKENS:
        return READS_ALL_TOKENS[kind]
    if kind == "MagCacheHeadHook" and hook.hook.config.calibrate:
        return "MagCache measures its ratios on a rank's own tokens while it calibrates"
    if kind.endswith("SkipHook") and not isclose(getattr(hook.hook, "dropout", 1.0), 1.0):
        return f"{hook} and draws random numbers for a rank's own tokens"
    return None


def _coupled(module: nn.Module, hooks: tuple[Hook, ...]) -> str | None:
    """Return the first reason for which a row's result may depend on other rows of its batch."""
    if hooks:
        return f"{hooks[0]} and may read other rows or keep something between calls"
    for path, one in module.named_modules():
        if type(one).__module__.startswith("torch.ao.nn.quantized.dynamic"):
            return f"{path} is quantised with one scale for all rows"
        processor = getattr(one, "processor", None)
        if processor is not None and not _is_known(processors.own_of(processor)):
            return f"the attention processor {type(processors.own_of(processor)).__name__} may read other rows"
    return None


def _is_known(processor: object) -> bool:
    """Return whether a processor is one of diffusers' models, which read no other rows but for perturbed attention."""
    kind = type(processor)
    ours = kind.__module__ == processors.__name__
    return ours or (kind.__module__.startswith("diffusers.models.") and "PAG" not in kind.__name__)
